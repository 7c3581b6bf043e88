"""Rejection sampling of a drafted block: keep a prefix of the drafts, add one token, emit exactly the target's law.

    for i in drafts:   accept if u q_i(draft_i) < p_i(draft_i), u uniform;   stop at the first rejection
    rejected at i:     emit a draw from max(p_i - q_i, 0), normalised
    all accepted:      emit a draw from p after the last draft

Token i is emitted as min(p, q) by acceptance and as (1 - sum(min(p, q))) * residual by recovery, together p. The law
needs the draw of a draft, its acceptance and its recovery to be independent: they read three different streams.
Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318, algorithm 2.
"""

from dataclasses import dataclass

import torch

from dspark.kernels.rejection import Block, DraftLaw, raise_for_status, verify
from dspark.kernels.rejection_ref import MAX_LISTED
from dspark.sampling.params import SamplingTensors, to_distribution
from dspark.sampling.proposal import DenseProposal, OneHotProposal, Proposal, SparseProposal
from dspark.sampling.streams import Purpose, Streams, sample


@dataclass(frozen=True)
class Verification:
    """What one step emits for each request.

    With K = 3, all offered, and drafts (5, 7, 2) of which 7 is rejected and replaced by 4: tokens (5, 4, -1, -1),
    num_accepted 1, num_emitted 2.

    Attributes:
        tokens: [B, K+1] int64; accepted drafts, then one recovered or bonus token, then -1.
        num_accepted: [B] int64, 0..K; the added token is not counted.
        num_emitted: [B] int64, num_accepted + 1.
        accept_probs: [B, K]; expected acceptance sum(min(p, q)) = 1 - TV of each offered draft, reached or not; NaN
            where none was offered.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    num_emitted: torch.Tensor
    accept_probs: torch.Tensor


def rejection_sample(
    proposal: Proposal,
    target_probs: torch.Tensor,
    streams: Streams,
    positions: torch.Tensor,
    num_offered: torch.Tensor | None = None,
) -> Verification:
    """Verify a block of drafts against the target.

    Args:
        proposal: drafts [B, K] and what they were drawn from; K may be 0. A placeholder -1 ends a request's drafts.
        target_probs: [B, K+1, V]; row i is p given the drafts before i. Rows past `num_offered` are not read.
        streams: the requests' random numbers.
        positions: [B] int64, absolute position of the first draft.
        num_offered: [B] int64, drafts that were really verified, 0..K; all K if None. A request with 0 takes a plain
            step from row 0.

    Returns:
        The emitted tokens and counts. A request's row depends on its own inputs only.

    Raises:
        ValueError: shapes disagree, a count is outside 0..K, or a draft is outside the target's vocabulary.
        AssertionError: an offered draft has q = 0, so that it was not drawn from this q.
    """
    batch, num_draft_tokens = proposal.tokens.shape
    offered, drafts, accepted = _judge(proposal, target_probs, streams, positions, num_offered)
    num_accepted = accepted.long().cumprod(-1).sum(-1)

    last = target_probs[torch.arange(batch, device=num_accepted.device), num_accepted][:, None]  # [B, 1, V]
    rejected = (num_accepted < offered.sum(-1)).tolist()
    added = torch.empty_like(num_accepted)
    for purpose in (Purpose.RECOVERY, Purpose.TARGET):
        rows = [row for row, missed in enumerate(rejected) if missed == (purpose is Purpose.RECOVERY)]
        if rows:
            chosen = torch.tensor(rows).to(added.device, non_blocking=True)
            probs = last[chosen]
            if purpose is Purpose.RECOVERY:
                probs = proposal.rows(chosen).position(num_accepted[chosen]).residual(probs)
            where = (positions + num_accepted)[chosen, None]
            added[chosen] = sample(probs, streams.rows(chosen), where, purpose)[:, 0]

    slot = torch.arange(num_draft_tokens + 1, device=num_accepted.device)
    tokens = torch.cat([drafts, added[:, None]], dim=1).masked_fill(slot >= num_accepted[:, None], -1)
    tokens = torch.where(slot == num_accepted[:, None], added[:, None], tokens)
    overlap = proposal.overlap(target_probs[:, :-1]).masked_fill(~offered, float("nan"))
    return Verification(tokens, num_accepted, num_accepted + 1, overlap)


def verify_logits(
    proposal: Proposal,
    logits: torch.Tensor,
    params: SamplingTensors,
    streams: Streams,
    positions: torch.Tensor,
    num_offered: torch.Tensor | None = None,
) -> Verification:
    """`rejection_sample` from the target's logits; with kernels on a GPU, which wait for the device once.

    Args:
        proposal: as in `rejection_sample`.
        logits: [B, K+1, V] before any sampling parameter.
        params: one row per request.
        streams: the requests' random numbers.
        positions: [B] int64, absolute position of the first draft.
        num_offered: [B] int64, as in `rejection_sample`; a GPU does not check the range.

    Returns:
        As `rejection_sample` of `to_distribution(logits, params)`: the same tokens but where a decision is within
        float32 rounding of a tie.

    Raises:
        ValueError: as in `rejection_sample` and `to_distribution`.
        AssertionError: an offered draft has q = 0.
    """
    if not logits.is_cuda or logits.dtype == torch.float64:
        return rejection_sample(proposal, to_distribution(logits, params), streams, positions, num_offered)
    block, law = kernel_inputs(proposal, _cut(logits, params), params, streams, positions, num_offered)
    out = verify(block, law, proposal.num_draft_tokens, overlap=True)
    raise_for_status(out.status)
    assert out.overlap is not None
    return Verification(out.tokens, out.num_accepted.long(), out.num_emitted.long(), out.overlap)


def kernel_inputs(
    proposal: Proposal,
    logits: torch.Tensor,
    params: SamplingTensors,
    streams: Streams,
    positions: torch.Tensor,
    num_offered: torch.Tensor | None = None,
) -> tuple[Block, DraftLaw]:
    """What `dspark.kernels.rejection.verify` takes, from the arguments of `verify_logits`; logits are cut already."""
    batch, num_draft_tokens = proposal.tokens.shape
    if logits.ndim != 3 or logits.shape[:2] != (batch, num_draft_tokens + 1):
        raise ValueError(
            f"logits must be [{batch}, {num_draft_tokens + 1}, V], one row per draft and one after them,"
            f" got {tuple(logits.shape)}"
        )
    lane = torch.arange(num_draft_tokens + 1, device=logits.device)
    drafts = torch.nn.functional.pad(proposal.tokens, (1, 0), value=-1)
    if num_offered is not None:
        drafts = drafts.masked_fill(lane > num_offered[:, None], -1)
    block = Block(
        logits.flatten(0, 1),
        drafts.flatten(),
        torch.arange(batch + 1, device=logits.device) * (num_draft_tokens + 1),
        (positions[:, None] + lane).flatten(),
        params.temperature,
        streams.seeds,
    )
    return block, _draft_law(proposal, logits.shape[-1])


def _draft_law(proposal: Proposal, vocab_size: int) -> DraftLaw:
    """q of a proposal; a long list of ids is spread over the vocabulary."""
    match proposal:
        case OneHotProposal():
            return DraftLaw()
        case SparseProposal(_, ids, probs) if ids.shape[-1] <= MAX_LISTED:
            return DraftLaw(probs.float().contiguous(), ids, probs=True)
        case DenseProposal(_, probs):
            return DraftLaw(probs.float(), probs=True)
    return DraftLaw(proposal.dense(vocab_size).float(), probs=True)


def _cut(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Logits with -inf where `to_distribution` cuts, so that only the temperature is left to apply."""
    temperature, top_k, top_p, min_p = params.host
    truncated = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    if not truncated.any():
        return logits
    mask = torch.from_numpy(truncated).to(logits.device, non_blocking=True)[:, None, None]
    return logits.masked_fill(mask & (to_distribution(logits, params) == 0), float("-inf"))


def _judge(
    proposal: Proposal,
    target_probs: torch.Tensor,
    streams: Streams,
    positions: torch.Tensor,
    num_offered: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which drafts are offered, the drafts with 0 where none is, and which are accepted, each judged alone: [B, K] all.

    Refuses what `rejection_sample` promises to, waiting for the device once for all of it.
    """
    batch, num_draft_tokens = proposal.tokens.shape
    if target_probs.ndim != 3 or target_probs.shape[:2] != (batch, num_draft_tokens + 1):
        raise ValueError(
            f"target_probs must be [{batch}, {num_draft_tokens + 1}, V], one row per draft and one after them,"
            f" got {tuple(target_probs.shape)}"
        )
    vocab_size, device = target_probs.shape[-1], target_probs.device
    slot = torch.arange(num_draft_tokens, device=device)
    counts = torch.full((batch,), num_draft_tokens, device=device) if num_offered is None else num_offered
    offered = (~proposal.empty).long().cumprod(-1).bool() & (slot < counts[:, None])
    foreign = offered & (proposal.tokens >= vocab_size)
    drafts = proposal.tokens.masked_fill(~offered | foreign, 0)
    p = target_probs[:, :-1].gather(-1, drafts[..., None])[..., 0].double()
    q = proposal.prob(drafts).double()
    undrawn = offered & ~(q > 0)
    open_ = offered & (p < q) & (p != 0)  # u lies in [0, 1): no number can change the others
    found = ((counts < 0) | (counts > num_draft_tokens), foreign, undrawn, open_)
    miscounted, any_foreign, any_undrawn, any_open = torch.stack([each.any() for each in found]).tolist()
    if miscounted:
        raise ValueError(f"num_offered must be in 0..{num_draft_tokens}, got {counts.tolist()}")
    if any_foreign:
        raise ValueError(
            f"draft token {int(proposal.tokens.max())} is outside the target's vocabulary of {vocab_size}:"
            " the draft vocabulary's ids were not mapped"
        )
    assert not any_undrawn, (
        f"draft {int(drafts[undrawn][0])} of request {int(undrawn.nonzero()[0, 0])} has q = 0:"
        " it was not drawn from the q that came with it, and the output would be biased"
    )
    if not any_open:
        return offered, drafts, offered & (p > 0)
    return offered, drafts, offered & (streams.uniform(positions[:, None] + slot, Purpose.ACCEPT) * q < p)
