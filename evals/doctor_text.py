"""What `dspark doctor` judges readings on: a little of the target's own text, with the target's states and laws.

The target continues some prompts by itself. One pass over prompt and continuation gives the hidden states of every
layer that some reading taps, and the distribution p of every token of the continuation. A reading drafts a block behind
chosen tokens (anchors) with the text's own tokens as its chain (teacher forcing) and is scored there.

Read next: `dspark.evals.readings` (what is tried) and `dspark.evals.doctor` (what follows from it). Two commands:

    dspark doctor
    dspark doctor TARGET DRAFTER --prompts 24
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dspark.cache import RaggedKV
from dspark.drafter import Drafter
from dspark.loop import generate
from dspark.sampling import SamplingParams
from dspark.target import HFTarget

ROWS_PER_PASS = 64
ANCHORS_PER_CHUNK = 32


@dataclass(frozen=True)
class TargetText:
    """Texts of R requests, padded to T tokens.

    `tokens` [R, T] int64. `lengths`: tokens of each. `prompt_lengths`: where each continuation begins. `states`: by tap
    id (of `DrafterConfig.tap_ids`), [R, T, hidden]. `next_probs`: per request, [continuation, V] float32 law of token
    `prompt_length + row`, in the type of the target's device.
    """

    tokens: torch.Tensor
    lengths: list[int]
    prompt_lengths: list[int]
    states: dict[int, torch.Tensor]
    next_probs: list[torch.Tensor]


def collect(
    target: HFTarget, prompts: Sequence[Sequence[int]], tap_ids: Sequence[int], num_tokens: int, seed: int
) -> TargetText:
    """Let the target continue the prompts, and keep what scoring needs.

    Args:
        target: the target; its taps are changed.
        prompts: token ids.
        tap_ids: all states that any reading reads.
        num_tokens: length of each continuation.
        seed: of the continuations, drawn at temperature 1.
    """
    params = [
        SamplingParams(temperature=1.0, seed=seed + i, max_new_tokens=num_tokens, ignore_eos=True)
        for i in range(len(prompts))
    ]
    done = generate(target, None, prompts, params, max_batch_size=len(prompts))
    texts = [generation.prompt_ids + generation.token_ids for generation in done]
    lengths, prompt_lengths = [len(text) for text in texts], [len(prompt) for prompt in prompts]
    tokens = torch.zeros(len(texts), max(lengths), dtype=torch.int64, device=target.device)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    states, probs = _states_and_laws(target, tokens, lengths, prompt_lengths, sorted(set(tap_ids)))
    return TargetText(tokens, lengths, prompt_lengths, states, probs)


@torch.inference_mode()
def _states_and_laws(
    target: HFTarget, tokens: torch.Tensor, lengths: list[int], prompt_lengths: list[int], tap_ids: list[int]
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """One run over the texts, some rows at a time, for a pass of all rows would hold [R, T, V] logits."""
    target.tap(tap_ids)
    cache = target.new_cache(len(lengths))
    taps: list[torch.Tensor] = []
    laws: list[list[torch.Tensor]] = [[] for _ in lengths]
    for start in range(0, tokens.shape[1], ROWS_PER_PASS):
        chunk = tokens[:, start : start + ROWS_PER_PASS]
        output = target.verify(cache, chunk)
        target.commit(cache, [min(max(length - start, 0), chunk.shape[1]) for length in lengths])
        taps.append(output.taps)
        for row, (begin, end) in enumerate(zip(prompt_lengths, lengths, strict=True)):
            first, last = max(begin - 1 - start, 0), min(end - 1 - start, chunk.shape[1])  # row t gives token t + 1
            if last > first:
                laws[row].append(output.logits[row, first:last].float().softmax(-1))
    width = target.hidden_size
    joined = torch.cat(taps, dim=1)
    states = {tap: joined[..., i * width : (i + 1) * width] for i, tap in enumerate(tap_ids)}
    return states, [torch.cat(parts) for parts in laws]


@dataclass(frozen=True)
class Anchors:
    """Where blocks are drafted: `request` [N] and absolute `position` [N] of the anchor, int64 on the CPU."""

    request: torch.Tensor
    position: torch.Tensor

    def thinned(self, step: int) -> "Anchors":
        """Every `step`-th."""
        return Anchors(self.request[::step], self.position[::step])

    def chunks(self) -> Iterator["Anchors"]:
        """Groups that fit into memory."""
        parts = zip(self.request.split(ANCHORS_PER_CHUNK), self.position.split(ANCHORS_PER_CHUNK), strict=True)
        return (Anchors(*part) for part in parts)


def choose_anchors(text: TargetText, num_drafts: int, per_request: int) -> Anchors:
    """Up to `per_request` anchors in each continuation, evenly spread, each with `num_drafts` tokens behind it."""
    requests, positions = [], []
    for row, (begin, end) in enumerate(zip(text.prompt_lengths, text.lengths, strict=True)):
        last = end - 1 - num_drafts
        if last >= begin:
            chosen = np.unique(np.linspace(begin, last, per_request).round().astype(int))
            requests += [row] * len(chosen)
            positions += chosen.tolist()
    return Anchors(torch.tensor(requests, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64))


@torch.inference_mode()
def overlaps(drafter: Drafter, text: TargetText, anchors: Anchors, num_drafts: int) -> np.ndarray:
    """Chance that each draft would be accepted behind the text's tokens, sum over v of min(p, q) = 1 - TV.

    Args:
        drafter: a reading of the checkpoint.
        text: with the states of all its taps.
        anchors: N of them, with `num_drafts` tokens behind each.
        num_drafts: K, at most `drafter.config.max_draft_tokens`.

    Returns:
        [N, K] float64; NaN where the drafter's logits are.
    """
    taps = torch.cat([text.states[tap] for tap in drafter.config.tap_ids], dim=-1)
    context = drafter.new_cache(len(text.lengths))
    drafter.extend(context, taps, text.lengths)
    parts = []
    for chunk in anchors.chunks():
        walk = _Walk(drafter, text, chunk)
        hidden = drafter.block_hidden(_context_before(context, chunk), walk.tokens_at(0))
        drafter.chain(hidden, walk.tokens_at(0), num_drafts, walk.pick)
        parts.append(torch.stack(walk.found, dim=1).double().cpu().numpy())
    return np.concatenate(parts)


def constant_overlaps(text: TargetText, anchors: Anchors, num_drafts: int) -> np.ndarray:
    """[N, K] float64: the same for a drafter that knows nothing but how often each token comes in this text."""
    frequency = torch.cat(text.next_probs).mean(0)
    every = [torch.minimum(law, frequency).sum(-1).double().cpu().numpy() for law in text.next_probs]
    rows = zip(anchors.request.tolist(), anchors.position.tolist(), strict=True)
    starts = [(r, t + 1 - text.prompt_lengths[r]) for r, t in rows]
    return np.stack([every[r][start : start + num_drafts] for r, start in starts])


class _Walk:
    """A chain along the text: `pick` scores a draft and answers with the text's own token."""

    def __init__(self, drafter: Drafter, text: TargetText, anchors: Anchors) -> None:
        self.text, self.anchors, self.found = text, anchors, list[torch.Tensor]()
        self.ids, self.vocab_size = drafter.draft_ids(), drafter.target_vocab_size

    def tokens_at(self, offset: int) -> torch.Tensor:
        """[n] tokens of the text, `offset` behind the anchors."""
        device = self.text.tokens.device
        return self.text.tokens[self.anchors.request.to(device), self.anchors.position.to(device) + offset]

    def pick(self, i: int, logits: torch.Tensor) -> torch.Tensor:
        rows = zip(self.anchors.request.tolist(), self.anchors.position.tolist(), strict=True)
        p = torch.stack([self.text.next_probs[r][t + 1 + i - self.text.prompt_lengths[r]] for r, t in rows])
        if self.ids is not None:
            p = p[:, self.ids]
        q = F.softmax(logits[:, : self.vocab_size].float() if self.ids is None else logits.float(), dim=-1)
        self.found.append(torch.minimum(p[:, : q.shape[-1]], q).sum(-1))
        return self.tokens_at(i + 1)


def _context_before(context: RaggedKV, anchors: Anchors) -> RaggedKV:
    """The context of each anchor: the rows before its position."""
    cut = RaggedKV(len(context.keys), 0, context.lengths.device)
    index = anchors.request.to(context.lengths.device)
    longest = int(anchors.position.max())
    cut.keys = [None if keys is None else keys[index, :longest] for keys in context.keys]
    cut.values = [None if values is None else values[index, :longest] for values in context.values]
    cut.lengths = anchors.position.to(context.lengths.device)
    cut.host_lengths = anchors.position.tolist()
    return cut
