"""Inputs of the Markov chain's tests.

All numbers are small multiples of a power of two, so that every sum is exact in any order: the kernels' logits of the
heads without a sigmoid equal the reference's bit for bit, and tokens can be compared without a tolerance.
"""

from dataclasses import dataclass, replace

import torch

from dspark.kernels.markov import ChainOutput, ChainRequests, MarkovWeights, bias_ref, features_ref, initial_state

BF16 = torch.bfloat16
TIE = 1e-4  # a lead above this is not decided by the rounding of a key, which is below 1e-5 here


@dataclass(frozen=True)
class Case:
    """One shape of a chain."""

    batch: int = 3
    steps: int = 2
    columns: int = 300
    rank: int = 16
    hidden: int = 24
    kind: str = "vanilla"
    confidence: str = "none"
    dtype: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32
    temperature: tuple[float, ...] = (1.0,)
    padding: tuple[int, ...] = ()
    reduced: bool = False
    scattered: bool = False
    fp8: bool = False
    masked: float = 0.0
    logit_scale: float = 1.0
    state: bool = False
    seed: int = 0

    @property
    def vocabulary(self) -> int:
        return 2 * self.columns + 5 if self.reduced else self.columns


@dataclass(frozen=True)
class Inputs:
    """What a chain takes."""

    weights: MarkovWeights
    base: torch.Tensor
    hidden: torch.Tensor
    requests: ChainRequests

    @property
    def live(self) -> torch.Tensor:
        rows = self.requests.cache_rows
        return torch.ones_like(self.requests.anchors, dtype=torch.bool) if rows is None else rows >= 0

    def rows(self, index: list[int]) -> "Inputs":
        """Some of the requests."""
        r = self.requests
        picked = {
            name: None if getattr(r, name) is None else getattr(r, name)[index]
            for name in ("anchors", "positions", "seeds", "temperature", "state")
        }
        return replace(
            self, base=self.base[index], hidden=self.hidden[index], requests=ChainRequests(**picked, cache_rows=None)
        )


def multiples(generator: torch.Generator, *shape: int, unit: float, bound: int) -> torch.Tensor:
    return torch.randint(-bound, bound + 1, shape, generator=generator).float() * unit


def make_weights(case: Case, device: str, g: torch.Generator) -> MarkovWeights:
    rank, hidden = case.rank, case.hidden
    joint = {"gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}.get(case.kind)
    confidence = {"none": 0, "hidden": hidden, "hidden+markov": hidden + rank}[case.confidence]

    def tensor(*shape: int, unit: float) -> torch.Tensor:
        return multiples(g, *shape, unit=unit, bound=8).to(device, case.dtype)

    weights = MarkovWeights(
        kind=case.kind,
        w1=None if case.kind == "none" else tensor(case.vocabulary, rank, unit=1 / 8),
        w2=None if case.kind == "none" else tensor(case.columns, rank, unit=1 / 8),
        joint_weight=tensor(*joint, unit=1 / 32) if joint else None,
        joint_bias=tensor(joint[0], unit=1 / 32) if joint else None,
        confidence_weight=tensor(confidence, unit=1 / 32) if confidence else None,
        confidence_bias=torch.tensor([0.25], device=device, dtype=case.dtype) if confidence else None,
        target_ids=torch.randperm(case.vocabulary, generator=g)[: case.columns].to(device) if case.reduced else None,
        logit_scale=case.logit_scale,
    )
    return weights.quantized() if case.fp8 else weights


def make(case: Case, device: str) -> Inputs:
    g = torch.Generator().manual_seed(case.seed)
    weights = make_weights(case, device, g)
    base = multiples(g, case.batch, case.steps, case.columns, unit=1 / 8, bound=24)
    if case.masked:
        base[torch.rand(base.shape, generator=g) < case.masked] = float("-inf")
        base[..., case.columns // 2] = 0.0  # something is left of every row
    rows = torch.randperm(2 * case.batch, generator=g)[: case.batch]
    rows[list(case.padding)] = -1
    temperature = (case.temperature * case.batch)[: case.batch]
    requests = ChainRequests(
        anchors=torch.randint(0, case.vocabulary, (case.batch,), generator=g).to(device),
        positions=torch.randint(0, 2**20, (case.batch,), generator=g).to(device),
        seeds=torch.randint(-(2**63), 2**63 - 1, (case.batch,), generator=g).to(device),
        temperature=torch.tensor(temperature, device=device),
        cache_rows=rows.to(device),
        state=multiples(g, case.batch, case.rank, unit=1 / 8, bound=8).to(device) if case.state else None,
    )
    hidden = multiples(g, case.batch, case.steps, case.hidden, unit=1 / 8, bound=8)
    return Inputs(weights, base.to(device, case.cache), hidden.to(device, case.dtype), requests)


def poisoned_output(case: Case, inputs: Inputs) -> ChainOutput:
    """Outputs full of NaN, with a cache of twice the rows."""
    width = case.vocabulary if case.scattered else case.columns
    batch = len(inputs.base)
    cache = torch.full((2 * batch, case.steps, width), float("nan"), dtype=case.cache, device=inputs.base.device)
    out = ChainOutput.allocate(inputs.weights, inputs.base, cache)
    out.tokens.fill_(-7)
    out.lse.fill_(float("nan"))
    return out


def forced_logits(inputs: Inputs, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, K, D] float32 of the definition, not rounded, had these tokens [B, K] been drawn."""
    weights, state, rows = inputs.weights, initial_state(inputs.weights, inputs.requests), []
    previous = inputs.requests.anchors
    for i in range(inputs.base.shape[1]):
        embedded = None if weights.w1 is None else weights.w1[previous].float()
        features, state = features_ref(weights, embedded, inputs.hidden[:, i].float(), state)
        rows.append((inputs.base[:, i].float() + bias_ref(weights, features)) * weights.logit_scale)
        previous = tokens[:, i].clamp_min(0)
    return torch.stack(rows, dim=1)


def unit_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance of neighbouring numbers of `dtype` at these magnitudes."""
    return torch.exp2(torch.floor(torch.log2(values.abs().clamp_min(2.0**-20)))) * torch.finfo(dtype).eps
