"""Shared memory that the compiler asks for, of every kernel of a chain; a program, because the interpreter and the
compiler can't be had in one process.

    python markov_compile.py '[{"dtype": "float32", "rank": 128, "kind": "gated", "batch": 16, "columns": 512}]'

compiles for sm_90, which needs no GPU, and prints a JSON list of [kernel, bytes, bytes of the plan] a case. What is
launched is caught at the launch, so that arguments are the real ones; tensors are shapes without memory.
"""

import json
import sys
from unittest import mock

import torch

from dspark.kernels import markov_candidates, markov_chain, markov_features, markov_plan, triton
from dspark.kernels.markov import FP8, ChainOutput, ChainRequests, MarkovWeights

STEPS, HIDDEN = 8, 2048
MULTIPROCESSORS = 132
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_cooperative_grid")
KERNELS = {
    markov_chain: ("_features_kernel", "_chain_kernel", "_held_chain_kernel"),
    markov_candidates: ("_candidates_chain_kernel", "_group_maxima_kernel", "_select_kernel"),
    markov_features: ("_hidden_products_kernel",),
}


def head(case: dict) -> tuple[MarkovWeights, torch.Tensor]:
    """Weights and base logits of a case, on the meta device."""
    rank, columns, kind = case["rank"], case["columns"], case["kind"]
    dtype = getattr(torch, case["dtype"])

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    fp8 = case.get("fp8", False) and kind != "none"
    joint = {"gated": (rank, HIDDEN + rank), "rnn": (3 * rank, 2 * rank + HIDDEN)}.get(kind)
    weights = MarkovWeights(
        kind=kind,
        w1=None if kind == "none" else empty(columns, rank),
        w2=None if kind == "none" else empty(columns, rank, dtype=FP8 if fp8 else dtype),
        w2_scale=empty(columns, dtype=torch.float32) if fp8 else None,
        joint_weight=empty(*joint) if joint else None,
        joint_bias=empty(joint[0]) if joint else None,
        confidence_weight=empty(HIDDEN + (0 if kind == "none" else rank)),
        confidence_bias=empty(1),
        target_ids=empty(columns, dtype=torch.int64) if case.get("reduced") else None,
    )
    base = empty(case["batch"], STEPS, columns, dtype=getattr(torch, case.get("base", case["dtype"])))
    return weights, base


class Launches:
    """Stands in for a kernel; keeps (kernel, positional arguments, keywords) of its launches."""

    def __init__(self, kernel: object, into: list) -> None:
        self.kernel, self.into = kernel, into

    def __getitem__(self, grid: tuple) -> object:
        return lambda *args, **keywords: self.into.append((self.kernel, args, keywords))


def launches(case: dict) -> tuple[list, int]:
    """What a case launches, and the shared memory of its plan."""
    weights, base = head(case)
    hidden = torch.empty(len(base), STEPS, HIDDEN, dtype=getattr(torch, case["dtype"]), device="meta")
    numbers = torch.empty(len(base), dtype=torch.int64, device="meta")
    requests = ChainRequests(numbers, numbers, numbers, numbers.float(), numbers)
    caught, bound = [], 0
    with mock.patch.object(markov_plan, "device_programs", lambda device, residents: residents * MULTIPROCESSORS):
        with_launches = [
            mock.patch.object(module, name, Launches(getattr(module, name), caught))
            for module, names in KERNELS.items()
            for name in names
        ]
        for each in with_launches:
            each.start()
        if case.get("candidates"):
            out = markov_candidates.SparseOutput.allocate(weights, base, case["candidates"])
            workspace = markov_candidates.CandidatesWorkspace(weights, base, case["candidates"])
            markov_candidates.candidates_chain(weights, base, hidden, requests, out, workspace)
        else:
            workspace = markov_chain.DenseWorkspace(weights, base)
            bound = workspace.plan.shared
            out = ChainOutput.allocate(weights, base)
            markov_chain.dense_chain(weights, base, hidden, requests, out, workspace)
        for each in with_launches:
            each.stop()
    once = {kernel.fn.__name__: (kernel, args, keywords) for kernel, args, keywords in caught}
    return list(once.values()), bound


def compiled(kernel: object, args: tuple, keywords: dict) -> object:
    """A launch, compiled as Triton would specialise it: multiples of 16, and ones."""
    signature, constants, attributes = {}, {}, {}
    general = set(kernel.do_not_specialize or ())
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        value = args[i] if i < len(args) else keywords[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and name not in general):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and name not in general:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    options = {name: keywords[name] for name in OPTIONS if name in keywords}
    return triton.compile(source, target=target, options=options)


def main() -> None:
    """Compile the cases of the command line."""
    results = []
    for case in json.loads(sys.argv[1]):
        caught, bound = launches(case)
        wanted = case.get("kernels")
        results.append(
            [
                [kernel.fn.__name__, compiled(kernel, args, keywords).metadata.shared, bound]
                for kernel, args, keywords in caught
                if wanted is None or kernel.fn.__name__ in wanted
            ]
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
