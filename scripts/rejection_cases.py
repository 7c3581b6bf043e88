"""Inputs for the rejection kernels, and which of their outcomes rounding cannot change.

Shared by the tests, which run them small, and by `bench_rejection.py`, which checks before it times.
"""

from dataclasses import dataclass, replace

import torch

from dspark.kernels.rejection_ref import RECOVERY, TARGET, Block, DraftLaw, acceptance_ref, laws_ref, noise_ref

# Relative error of a float32 softmax entry: a fixed part (the sum, exp2, the logarithm of the noise), and one that
# grows with the exponent, which is a product rounded to 24 bits.
FIXED, PER_NAT = 4e-6, 4e-7


@dataclass(frozen=True)
class Case:
    """Sizes and kinds of a random step.

    Attributes:
        counts: drafts of each request, 0..K.
        vocab_size: V.
        form: "one-hot", "dense", "sparse".
        probs: q given as probabilities rather than logits.
        stored: logsumexp given (dense logits only).
        dtype: of the draft's values.
        target_dtype: of the target's logits.
        temperatures: cycled through the requests.
        cut: share of the target's logits that are -inf.
        draft_cut: the same entries are cut from q.
        placeholders: every third request's drafts end early with -1.
        num_listed: k of the sparse form.
        noise: standard deviation of the draft's logits around the target's.
    """

    counts: tuple[int, ...]
    vocab_size: int = 150
    form: str = "dense"
    probs: bool = False
    stored: bool = False
    dtype: torch.dtype = torch.float32
    target_dtype: torch.dtype = torch.float32
    temperatures: tuple[float, ...] = (1.0, 0.6, 0.0, 1.7)
    cut: float = 0.0
    draft_cut: bool = False
    placeholders: bool = False
    num_listed: int = 12
    noise: float = 0.7

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return max(self.counts)


SEVENTEEN = (3, 0, 2, 3, 1, 3, 3, 0, 3, 2, 3, 3, 1, 3, 3, 3, 2)

CASES = {
    "one-hot": Case((3, 2, 0), form="one-hot"),
    "dense": Case((3, 2, 0)),
    "dense-bfloat16-cache": Case((3, 3, 3), dtype=torch.bfloat16),
    "dense-bfloat16-both": Case((3, 3, 3), dtype=torch.bfloat16, target_dtype=torch.bfloat16),
    "dense-float16-target": Case((3, 3, 3), target_dtype=torch.float16),
    "dense-stored-sum": Case((3, 3, 3), stored=True),
    "dense-stored-sum-bfloat16": Case((2, 3, 3), stored=True, dtype=torch.bfloat16),
    "dense-probs": Case((3, 1, 3), probs=True),
    "sparse": Case((3, 2, 0), form="sparse"),
    "sparse-bfloat16": Case((3, 3, 3), form="sparse", dtype=torch.bfloat16),
    "sparse-probs": Case((3, 3, 3), form="sparse", probs=True),
    "sparse-one-id": Case((3, 3, 3), form="sparse", num_listed=1),
    "sparse-most-of-the-vocabulary": Case((3, 3, 3), form="sparse", num_listed=140),
    "one-request": Case((3,)),
    "seventeen-requests-with-placeholders": Case(SEVENTEEN, 100, placeholders=True),
    "seventeen-sparse": Case(SEVENTEEN, 100, form="sparse", placeholders=True),
    "seventeen-one-hot": Case(SEVENTEEN, 100, form="one-hot", placeholders=True),
    "target-cut": Case((3, 3, 3), cut=0.8),
    "both-cut": Case((3, 3, 3), cut=0.8, draft_cut=True),
    "both-cut-stored": Case((3, 3, 3), cut=0.8, draft_cut=True, stored=True),
    "one-hot-cut": Case((3, 3, 3), cut=0.95, form="one-hot"),
    "whole-tiles": Case((3, 3), vocab_size=192),
    "one-tile": Case((3, 3), vocab_size=40),
    "row-of-one-token-more": Case((3, 3), vocab_size=129),
    "all-greedy": Case((3, 3, 2), temperatures=(0.0,)),
    "nearly-equal": Case((3, 3, 3), noise=0.02),
    "extreme-temperatures": Case((3, 3, 3), temperatures=(1e-3, 0.02, 1e20)),
    "eight-drafts": Case((8, 8, 5), noise=0.3),
}


def random_step(case: Case, seed: int = 0, device: torch.device | str = "cpu") -> tuple[Block, DraftLaw]:
    """A step as a server has it: rows packed, q in the request's slot of a cache with one slot more, in mixed order."""
    generator = torch.Generator(device).manual_seed(seed)
    batch, vocab_size, k = len(case.counts), case.vocab_size, case.num_draft_tokens
    counts = torch.tensor(case.counts, device=device)
    starts = torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0))
    num_rows = int(starts[-1])
    wide = torch.randn(batch, k + 1, vocab_size, generator=generator, device=device) * 2
    values = wide[:, :k] + torch.randn(batch, k, vocab_size, generator=generator, device=device) * case.noise
    if case.cut:
        gone = torch.rand(batch, 1, vocab_size, generator=generator, device=device) < case.cut
        wide = wide.masked_fill(gone, -torch.inf)
        values = values.masked_fill(gone, -torch.inf) if case.draft_cut else values
    temperature = torch.tensor([case.temperatures[b % len(case.temperatures)] for b in range(batch)], device=device)
    heat = temperature.masked_fill(temperature == 0, 1.0)[:, None, None]
    ids = None
    if case.form == "sparse":
        values, ids = values.topk(min(case.num_listed, vocab_size), dim=-1)
        order = torch.rand(values.shape, generator=generator, device=device).argsort(-1)
        values, ids = values.gather(-1, order), ids.gather(-1, order)
    values = values.to(case.dtype)
    q = (values.float() / heat).softmax(-1)
    race = torch.empty_like(q).exponential_(generator=generator) / q
    picked = race.argmin(-1)
    if ids is not None:
        picked = ids.gather(-1, picked[..., None])[..., 0]
    likely = wide[:, :k].argmax(-1)
    usual = torch.rand(likely.shape, generator=generator, device=device) < 0.8
    picked = torch.where((temperature == 0)[:, None] & usual, likely, picked)
    if case.placeholders:
        picked[::3, k // 2 :] = -1

    lane = torch.arange(k + 1, device=device)
    inside = lane <= counts[:, None]
    tokens = torch.cat([torch.full((batch, 1), vocab_size + 7, device=device), picked], 1)[inside]
    slots = torch.randperm(batch + 1, generator=generator, device=device)[:batch]
    law = DraftLaw()
    if case.form != "one-hot":
        law = DraftLaw(
            _in_slots(q.to(case.dtype) if case.probs else values, slots),
            None if ids is None else _in_slots(ids, slots),
            slots.int(),
            case.probs,
            _in_slots((values.float() / heat).logsumexp(-1), slots) if case.stored else None,
        )
    block = Block(
        wide[inside].to(case.target_dtype),
        tokens,
        starts.int(),
        torch.randint(0, 100_000, (num_rows,), generator=generator, device=device),
        temperature,
        torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator, device=device),
    )
    return block, law


def _in_slots(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """rows [B, ...] placed at slots [B] of a cache; NaN, or an impossible id, elsewhere."""
    empty = torch.nan if rows.is_floating_point() else torch.iinfo(rows.dtype).max
    cache = torch.full((len(rows) + 1, *rows.shape[1:]), empty, dtype=rows.dtype, device=rows.device)
    cache[slots] = rows
    return cache


def alone(block: Block, law: DraftLaw, request: int) -> tuple[Block, DraftLaw]:
    """One request of a step as a step of its own."""
    low, high = block.row_starts[request].item(), block.row_starts[request + 1].item()
    mine = slice(request, request + 1)
    starts = torch.tensor([0, high - low], dtype=torch.int32, device=block.logits.device)
    rows = (block.logits[low:high], block.tokens[low:high], starts, block.positions[low:high])
    slots = None if law.slots is None else law.slots[mine].contiguous()
    return Block(*rows, block.temperature[mine], block.seeds[mine]), replace(law, slots=slots)


def settled(block: Block, law: DraftLaw, num_draft_tokens: int) -> torch.Tensor:
    """[B] bool: whether every decision of a request is further from a tie than float32 rounding reaches.

    In float64: u q against p of every draft up to the first rejection, and the earliest time of the race, its latest
    possible value, against the earliest possible ones of all others.
    """
    laws = laws_ref(block, law, num_draft_tokens, torch.float64)
    greedy, seeds = block.by_request(block.temperature) == 0, block.by_request(block.seeds)
    request = torch.arange(len(greedy), device=greedy.device)
    slot = torch.arange(num_draft_tokens, device=greedy.device)
    index = laws.drafts.clamp(0, block.logits.shape[1] - 1)[..., None]
    p, q = (side[:, :num_draft_tokens].gather(-1, index)[..., 0] for side in (laws.p, laws.q))
    u = acceptance_ref(seeds, block.positions[laws.rows[:, :-1]])
    accepts = torch.where(greedy[:, None], p > 0, u * q < p) & (slot < laws.run[:, None])
    accepted = accepts.long().cumprod(-1).sum(-1)
    near = (u * q - p).abs() <= _error(p) + u * _error(q)
    judged = (slot <= accepted[:, None]) & (slot < laws.run[:, None])
    near_decision = (near & judged).any(-1)

    rejected = (accepted < laws.run) & ~greedy
    weight = laws.p[request, accepted]
    doubt = _error(weight)
    at = rejected.nonzero()[:, 0]
    taken = laws.q[at, accepted[at]]
    weight[at], doubt[at] = weight[at] - taken, doubt[at] + _error(taken)
    position = block.positions[laws.rows[request, accepted]]
    noise = torch.empty_like(weight)
    for chosen, purpose in ((rejected, RECOVERY), (~rejected, TARGET)):
        noise[chosen] = noise_ref(seeds[chosen], position[chosen], purpose, weight.shape[-1])
    latest = torch.where(weight > doubt, noise * (1 + FIXED) / (weight - doubt), torch.inf).amin(-1)
    earliest = torch.where(weight + doubt > 0, noise * (1 - FIXED) / (weight + doubt), torch.inf)
    near_race = (earliest <= latest[:, None]).sum(-1) != 1
    return greedy | ~(near_decision | near_race)


def _error(p: torch.Tensor) -> torch.Tensor:
    return p * (FIXED + PER_NAT * -p.clamp_min(1e-300).log())
