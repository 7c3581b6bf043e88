"""The DSpark drafter: backbone, Markov head and confidence head behind `extend` and `propose`.

One round, with s committed tokens and the anchor (last emitted token) at position s:

    block   = embed([anchor, mask, ..., mask])            all trained rows, because bidirectional rows see each other
    hidden  = backbone(block | context 0..s-1)
    base    = lm_head(hidden)
    prev    = anchor
    for i in 0..K-1:                                      row = first_draft_row + i
        logits_i = base[row] + bias(prev, hidden[row]);   q_i = distribution(logits_i);   prev = draft_i ~ q_i

Draft i is the token at position s + 1 + i in both block layouts. No sampling logic of its own: distributions, noise
and proposals are `dspark.sampling`.
Source: DeepSpec, modeling/dspark; the 1+N layout and reduced vocabularies speculators, models/dspark.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dspark.backbone import Backbone
from dspark.cache import RaggedKV
from dspark.confidence import ConfidenceCalibration
from dspark.config import DrafterConfig
from dspark.heads import MARKOV_HEADS, ConfidenceHead
from dspark.sampling import BlockDraws, Drafting, Proposal, SamplingTensors, Streams


@dataclass(frozen=True)
class Draft:
    """What one round proposes.

    `proposal` holds the draft tokens [B, K] (target ids) and q, the very distributions they were drawn from.
    `confidence_logits` is [B, K], calibrated if the drafter has a calibration, or None.
    """

    proposal: Proposal
    confidence_logits: torch.Tensor | None

    @property
    def tokens(self) -> torch.Tensor:
        return self.proposal.tokens


class Drafter(Backbone):
    """A loaded drafter. Build with `dspark.load_drafter`; tensor names are the checkpoint's.

    `d2t` (reduced vocabulary only) holds offsets: the target id of draft id i is `i + d2t[i]`.
    """

    d2t: torch.Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.markov_head = MARKOV_HEADS[config.markov_kind](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence != "none" else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.owns_embedding else None
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.owns_head else None
        reduced = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.reduced_vocabulary else None
        self.register_buffer("d2t", reduced)
        self.calibration: ConfidenceCalibration | None = None
        self.target_vocab_size = config.vocab_size
        self._shared_embedding: torch.Tensor | None = None
        self._shared_head: torch.Tensor | None = None

    def share(self, embedding: torch.Tensor | None, head: torch.Tensor | None, target_vocab_size: int) -> None:
        """Use the target's raw matrices where the checkpoint has none. Own tensors are never replaced.

        Args:
            embedding: [Vt, hidden] input embedding of the target, unscaled.
            head: [Vt, hidden] output head of the target (for a tied target, the embedding itself).
            target_vocab_size: Vt. Draft logits beyond it are padding and cropped.
        """
        if self.embed_tokens is None and embedding is not None:
            self._shared_embedding = embedding.detach().to(self.device, self.dtype)
        if self.lm_head is None and head is not None:
            self._shared_head = head.detach().to(self.device, self.dtype)[: self.config.draft_vocab_size]
        self.target_vocab_size = target_vocab_size

    def calibrate(self, calibration: ConfidenceCalibration | None) -> None:
        """Apply a calibration to every confidence from here on; None takes the head's own.

        Raises:
            ValueError: there is no confidence head, or not one temperature for each draft position.
        """
        if calibration is not None and self.confidence_head is None:
            raise ValueError("this drafter has no confidence head: there is nothing to calibrate")
        if calibration is not None and len(calibration.scaling.temperatures) != self.config.max_draft_tokens:
            raise ValueError(
                f"{len(calibration.scaling.temperatures)} temperatures for {self.config.max_draft_tokens} draft "
                "positions: one is needed for each"
            )
        self.calibration = calibration
        if self.confidence_head is not None:
            self.confidence_head.scaling = (
                None if calibration is None else torch.tensor(calibration.scaling, device=self.device)
            )

    @property
    def embedding_weight(self) -> torch.Tensor:
        """[V, hidden], own or the target's."""
        weight = self.embed_tokens.weight if self.embed_tokens is not None else self._shared_embedding
        return _present(weight, "embed_tokens")

    @property
    def head_weight(self) -> torch.Tensor:
        """[draft vocabulary, hidden], own or the target's."""
        weight = self.lm_head.weight if self.lm_head is not None else self._shared_head
        return _present(weight, "lm_head")

    def new_cache(self, batch_size: int) -> RaggedKV:
        """Empty context for `batch_size` requests."""
        return RaggedKV(self.config.num_layers, batch_size, self.device)

    @torch.inference_mode()
    def extend(self, cache: RaggedKV, taps: torch.Tensor, num_rows: Sequence[int]) -> None:
        """Append the context of newly committed tokens.

        Args:
            cache: changed in place; its lengths grow by `num_rows`.
            taps: [B, T, num_taps * target_hidden], rows from position `cache.lengths[b]` on.
            num_rows: per request, how many of the T rows were committed; the rest (rejected or padding) is not stored.
        """
        if rows := max(num_rows):
            self.write_context(cache, taps[:, :rows], num_rows)
        cache.advance(num_rows)

    def block_hidden(self, cache: RaggedKV, anchors: torch.Tensor) -> torch.Tensor:
        """Hidden states of a whole block: anchors [B] -> [B, block_size, hidden]."""
        ids = torch.full((anchors.shape[0], self.config.block_size), self.config.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        return self.forward_block(cache, F.embedding(ids, self.embedding_weight))

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits before the Markov bias: [..., hidden] -> [..., draft vocabulary]."""
        return F.linear(hidden, self.head_weight)

    def chain(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        num_draft_tokens: int,
        pick: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor | None:
        """Walk the block left to right.

        Args:
            hidden: [B, block_size, hidden] of `block_hidden`.
            anchors: [B] target ids.
            num_draft_tokens: K, at most `config.max_draft_tokens`.
            pick: called with i and the corrected logits [B, draft vocabulary] of draft i in at least float32; returns
                its token [B] as target ids.

        Returns:
            Confidence logits [B, K], calibrated if the drafter has a calibration; None without a confidence head.
        """
        first = self.config.first_draft_row
        drafting = hidden[:, first : first + num_draft_tokens]
        base = self.base_logits(drafting)
        rows, uncorrected = drafting.unbind(1), base.to(torch.promote_types(base.dtype, torch.float32)).unbind(1)
        head, previous = self.markov_head, anchors
        embedded: list[torch.Tensor] = []
        if head is not None:
            state = head.initial_state(hidden[:, 0])
            for row in range(first):  # the trainer steps a recurrent head on the context-only row too
                _, state = head(head.markov_w1(previous), hidden[:, row], state)
        for i, row_hidden, logits in zip(range(num_draft_tokens), rows, uncorrected, strict=True):
            if head is not None:
                embedded.append(head.markov_w1(previous))
                features, state = head(embedded[i], row_hidden, state)
                logits = logits + head.markov_w2(features)
            if self.config.logit_scale != 1.0:
                logits = logits * self.config.logit_scale
            previous = pick(i, logits)
        if self.confidence_head is None or not rows:
            return None
        return self.confidence_head.calibrated(self.confidence_head.of_block(rows, embedded))

    @torch.inference_mode()
    def propose(
        self,
        cache: RaggedKV,
        anchors: torch.Tensor,
        sampling: SamplingTensors,
        streams: Streams,
        num_draft_tokens: int,
        drafting: Drafting = "probabilistic",
        noise_positions: torch.Tensor | None = None,
    ) -> Draft:
        """Draft K tokens for each request.

        Args:
            cache: context of B requests, `lengths[b]` = position of the anchor.
            anchors: [B] int64 target ids, each below the target's vocabulary size.
            sampling: parameters that shape q (temperature, and truncation if the draft is to apply it).
            streams: one random stream per request.
            num_draft_tokens: K in 1..config.max_draft_tokens.
            drafting: "probabilistic" draws from q; "greedy" takes the argmax, and q is one-hot.
            noise_positions: [B, K] int64, positions whose draft noise the drafts use; by default their own, draft i
                that of `lengths[b] + 1 + i`. A run whose schedule trims passes `dspark.schedule.step_positions`.

        Returns:
            The draft. Row i of its proposal is exactly what draft i was drawn from.

        Raises:
            ValueError: K is outside the range the drafter was trained for.
        """
        check_num_draft_tokens(self.config, num_draft_tokens)
        ids = self.draft_ids()
        if noise_positions is None:
            noise_positions = cache.lengths[:, None] + torch.arange(1, num_draft_tokens + 1, device=anchors.device)
        block = BlockDraws(sampling, streams, noise_positions, drafting, ids)

        def pick(i: int, logits: torch.Tensor) -> torch.Tensor:
            return block.draw(i, logits if ids is not None else logits[:, : self.target_vocab_size])

        confidence = self.chain(self.block_hidden(cache, anchors), anchors, num_draft_tokens, pick)
        return Draft(block.proposal(), confidence)

    def draft_ids(self) -> torch.Tensor | None:
        """Target ids [draft vocabulary] of the output rows, or None where they are the target's own ids 0..Vt-1."""
        return None if self.d2t is None else torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t


def variant(base: Drafter, config: DrafterConfig | None = None, **modules: nn.Module | None) -> Drafter:
    """A drafter with the weights of `base`, another record, or other modules; `base` is not changed."""
    twin = Drafter.__new__(Drafter)
    twin.__dict__ = {
        **base.__dict__,
        "_modules": {**base._modules, **modules},
        "_buffers": dict(base._buffers),
        "config": config or base.config,
    }
    return twin


def check_num_draft_tokens(config: DrafterConfig, num_draft_tokens: int) -> None:
    """Refuse a K that the drafter was not trained for (ValueError)."""
    if num_draft_tokens < 1:
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens} is outside 1..{config.max_draft_tokens}: nothing would be drafted, "
            "and every step would be a plain one with the drafter's cost on top; leave it out for all that the drafter "
            "was trained for"
        )
    if num_draft_tokens > config.max_draft_tokens:
        layout = "anchor-first" if config.anchor_first else "1+N"
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens} is outside 1..{config.max_draft_tokens}: the drafter was trained "
            f"with block_size={config.block_size} in the {layout} layout; rows beyond it were never trained and would "
            "collapse the acceptance of every position"
        )


def _present(weight: torch.Tensor | None, name: str) -> torch.Tensor:
    if weight is None:
        raise ValueError(
            f"this drafter has no {name} of its own and needs the target's: "
            "load it with load_drafter(..., target=target)"
        )
    return weight
