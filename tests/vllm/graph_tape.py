"""A CUDA graph without a GPU: a tape of torch operations on the tensors, and with the host's numbers, of its recording.

Replaying computes the same operations on the same memory. What the host has decided or looked up meanwhile, an address
that has changed or a number that was read, is seen by a replay as little as by a replay of a graph.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")


class Tape(TorchDispatchMode):
    """The operations in the block, in order."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = func.overloadpacket is torch.ops.aten.index and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in args[1]
        )
        if masks or func.overloadpacket.__name__ in WAITING:
            raise RuntimeError(f"{func} waits for the device, which no capture allows")
        outputs = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, outputs))
        return outputs

    def play(self):
        for func, args, kwargs, outputs in self.operations:
            aliases = [each.alias_info for each in func._schema.returns]
            if aliases and all(each is not None and not each.is_write for each in aliases):
                continue  # a view goes on showing what it has shown
            again = func(*args, **kwargs)
            if not any(each is not None and each.is_write for each in aliases):
                for old, new in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                    old.copy_(new)


class TapeRecorder:
    """Stands for `v2_graph.Recorder`."""

    recorded = 0

    def __init__(self, device):
        self.device = device

    def record(self, body):
        """What replays `body`, and its outputs, which hold nothing before the first replay."""
        with Tape() as tape:
            outputs = body()
        TapeRecorder.recorded += 1
        for tensor in (outputs[0].sampled_token_ids, *outputs[1:]):
            tensor.fill_(-7)
        return tape.play, outputs
