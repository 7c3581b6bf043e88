"""Texts of several requests on the device, and the limits of what fits there: the shared part of scoring anchors.

Read next: `dspark.evals.block_scores`, which scores on them. Two commands that do so:

    dspark quality --dataset default
    dspark quality TARGET DRAFTER --dataset FILE.jsonl --temperature 1
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dspark.cache import RaggedKV
from dspark.drafter import Drafter
from dspark.evals.target_states import HIDDEN, StateStore, TargetPath, tap_layers, target_logits
from dspark.sampling import Drafting, SamplingParams, to_distribution
from dspark.target import HFTarget

# Bytes for distributions of one group of requests, and again for one chunk of anchors.
CPU_BYTES, GPU_SHARE, GPU_BYTES = 256 << 20, 1 / 10, 12 << 30


@dataclass(frozen=True)
class ScoringRule:
    """What drafts and target are sampled with, and how many drafts a block has.

    Paths are samples of the target under `params`. `num_draft_tokens` is the largest K of interest. `max_anchors`:
    score so many anchors of each path, evenly spread over those with K tokens behind them; None scores all.
    """

    params: SamplingParams
    num_draft_tokens: int
    drafting: Drafting = "probabilistic"
    draft_truncation: bool = True
    max_anchors: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether p is one-hot."""
        return self.params.temperature == 0

    @property
    def one_hot_drafts(self) -> bool:
        """Whether q is one-hot."""
        return self.greedy or self.drafting == "greedy"

    @property
    def draft_params(self) -> SamplingParams:
        """What shapes q."""
        return self.params if self.draft_truncation else SamplingParams(temperature=self.params.temperature)

    def anchors_of(self, path: TargetPath) -> torch.Tensor:
        """Offsets [n] int64 in the path behind which blocks are scored."""
        last = path.num_anchors - self.num_draft_tokens
        if self.max_anchors is None or last < 0:
            return torch.arange(path.num_anchors if self.max_anchors is None else 0)
        return torch.linspace(0, last, self.max_anchors).round().to(torch.int64).unique()


def budget_bytes(target: HFTarget) -> int:
    """What one group of requests, and one chunk of anchors, may take on the target's device."""
    if target.device.type != "cuda":
        return CPU_BYTES
    return min(GPU_BYTES, int(torch.cuda.get_device_properties(target.device).total_memory * GPU_SHARE))


def budget_rows(target: HFTarget, copies: int) -> int:
    """Rows [V] of float32 that fit into the budget `copies` times."""
    return max(budget_bytes(target) // (4 * copies * target.vocab_size), 1)


def group_paths(paths: list[tuple[int, TargetPath]], max_rows: int) -> Iterator[list[tuple[int, TargetPath]]]:
    """Runs of paths whose padded anchors fit into `max_rows`; at least one path each."""
    group: list[tuple[int, TargetPath]] = []
    longest = 0
    for item in paths:
        longest = max(longest, item[1].num_anchors)
        if group and longest * (len(group) + 1) > max_rows:
            yield group
            group, longest = [], item[1].num_anchors
        group.append(item)
    if group:
        yield group


class TextGroup:
    """A group of G paths on the device, everything that their anchors share.

    `tokens` [G, L]: the paths, padded. `context`: the drafter's keys and values of whole texts. `probs` [G, L-1, V]:
    row t is p of token t + 1; None where the temperature is 0. `likeliest` [G, L-1]: argmax of p. `anchors` [n, 2]:
    (path, t) of every anchor.
    """

    def __init__(
        self, target: HFTarget, drafter: Drafter, store: StateStore, paths: list[TargetPath], rule: ScoringRule
    ) -> None:
        device = target.device
        self.paths = paths
        states = store.load([path.index for path in paths], [HIDDEN, *tap_layers(drafter.config.tap_ids)])
        self.tokens = _pad([torch.tensor(path.token_ids) for path in paths]).to(device)
        taps = _pad([torch.cat(layers[1:], dim=-1) for layers in states]).to(device)
        self.context = drafter.new_cache(len(paths))
        drafter.extend(self.context, taps, [len(layers[1]) for layers in states])
        hidden = _pad([layers[0] for layers in states]).to(device)
        logits = target_logits(target, hidden)
        self.likeliest = logits.argmax(-1)
        self.probs = None if rule.greedy else to_distribution(logits, rule.params)
        self.vocab_size = logits.shape[-1]
        offsets = [rule.anchors_of(path) for path in paths]
        self.anchors = torch.cat([F.pad(at[:, None], (1, 0), value=row) for row, at in enumerate(offsets)])
        # One draw per anchor and draft, by request, so that they do not depend on the grouping.
        self.uniform = _pad([_uniform(path, rule.num_draft_tokens) for path in paths]).to(device)
        self.ids = drafter.draft_ids()
        self.column = None
        if self.ids is not None:
            self.column = torch.full((self.vocab_size,), -1, device=device)
            self.column[self.ids] = torch.arange(len(self.ids), device=device)

    def anchors_in(self, num_bytes: int) -> int:
        """Anchors whose context fits into `num_bytes`: each gets its own copy, and one layer's once more."""
        stored = [kept for kept in (*self.context.keys, *self.context.values) if kept is not None]
        each = sum(self.context.max_length * kept[0, 0].numel() * kept.element_size() for kept in stored)
        return num_bytes // max(2 * each, 1)

    def num_rescored(self, rows: torch.Tensor, offsets: torch.Tensor) -> int:
        """Path tokens behind these anchors that the states rule out."""
        token = self.tokens[rows, offsets + 1]
        if self.probs is None:
            return int((self.likeliest[rows, offsets] != token).sum())
        return int((self.probs[rows, offsets].gather(-1, token[:, None]) == 0).sum())


def _uniform(path: TargetPath, num_draft_tokens: int) -> torch.Tensor:
    """[num_anchors, K + 1] float64: the choice of the rejection, and of each draft from it on."""
    generator = torch.Generator().manual_seed(path.index)
    return torch.rand(path.num_anchors, num_draft_tokens + 1, generator=generator, dtype=torch.float64)


def _pad(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n, longest, ...] with zeros behind shorter rows."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def context_at(context: RaggedKV, rows: torch.Tensor, lengths: list[int]) -> RaggedKV:
    """The drafter's context as it is when each anchor's block is drafted: of path `rows[a]`, `lengths[a]` tokens."""
    cut = RaggedKV(len(context.keys), len(lengths), rows.device)
    longest = max(lengths)
    cut.keys = [None if keys is None else keys[:, :longest][rows] for keys in context.keys]
    cut.values = [None if values is None else values[:, :longest][rows] for values in context.values]
    cut.advance(lengths)
    return cut
