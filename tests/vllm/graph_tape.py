"""A CUDA graph without a GPU: a tape of torch operations on the tensors, and with the host's numbers, of its recording.

Replaying computes the same operations on the same memory. What the host has decided or looked up meanwhile, an address
that has changed or a number that was read, is seen by a replay as little as by a replay of a graph.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")


class Tape(TorchDispatchMode):
    """The operations in the block, in order."""

    def __init__(self):
        super().__init__()
        self.operations = []
        self.overwritten = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = func.overloadpacket is torch.ops.aten.index and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in args[1]
        )
        if masks or func.overloadpacket.__name__ in WAITING:
            raise RuntimeError(f"{func} waits for the device, which no capture allows")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[place] if place < len(args) else kwargs[argument.name]
                self.overwritten.append((target, target.clone()))
        outputs = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, outputs))
        return outputs

    def undo(self):
        """Capturing computes nothing: what was there before the block is there again."""
        for target, before in reversed(self.overwritten):
            target.copy_(before)

    def play(self):
        for func, args, kwargs, outputs in self.operations:
            if any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments):
                func(*args, **kwargs)
                continue
            read = places((args, kwargs))
            if not places(outputs) <= read:  # or it is a view, which goes on showing what it has shown
                for old, new in zip(tensors(outputs), tensors(func(*args, **kwargs)), strict=True):
                    old.copy_(new)


def tensors(tree):
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def places(tree):
    return {each.untyped_storage().data_ptr() for each in tensors(tree)}


class TapeRecorder:
    """Stands for `v2_graph.Recorder`."""

    recorded = 0

    def __init__(self, device, room):
        self.device, self.room = device, room

    def record(self, body):
        """What replays `body`, and its outputs, which hold nothing before the first replay."""
        tape = Tape()
        try:
            with tape:
                outputs = body()
        finally:
            tape.undo()
        TapeRecorder.recorded += 1
        for tensor in (outputs[0].sampled_token_ids, *outputs[1:]):
            tensor.fill_(-7)
        return tape.play, outputs
