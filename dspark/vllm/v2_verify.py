"""Verification on vLLM's V2 runner with `dspark.kernels.rejection`, in vLLM's packed layout.

Request b of a step has the logits rows row_starts[b] .. row_starts[b+1]-1. Row j was computed from input token j (the
request's newest token, then its drafts) at position `pos`, and predicts the token at position `pos` + 1; draft i is
input token i + 1, judged by row i.

The noise is Philox of the request's seed and the predicted token's absolute position, with a purpose for acceptance,
for recovery, and for a token that no draft stands behind; the draft's own numbers have a fourth. Plain steps use the
third too, so that a request's tokens do not depend on whether its neighbours are being drafted for.
"""

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, flashinfer_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dspark.kernels.rejection import Block, DraftLaw, Verified, Workspace, verify
from dspark.vllm.v2_chain import ProposalStore


class Verifier:
    """Verifies steps and samples plain ones, with the requests' state that vLLM's sampler holds."""

    def __init__(self, store: ProposalStore, sampler: Sampler, num_draft_tokens: int) -> None:
        """Args: what drafts were drawn from; vLLM's sampler; K."""
        self.store, self.sampler, self.num_draft_tokens = store, sampler, num_draft_tokens
        self.workspace: Workspace | None = None

    def verify(
        self,
        processed: torch.Tensor,
        drafts: torch.Tensor,
        valid_drafts: torch.Tensor,
        *,
        pos: torch.Tensor,
        row_starts: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Emit a step's tokens.

        Args:
            processed: [N, V] target logits after every sampling parameter, temperature included.
            drafts: [N] input tokens; those of placeholders are -1.
            valid_drafts: [N] the same with -1 where a grammar forbids the draft.
            pos: [N] positions of the input tokens.
            row_starts: [R + 1].
            slots: [R] request slots.

        Returns:
            Tokens [R, K + 1] int64, -1 past the end; how many [R] int32.
        """
        if valid_drafts.data_ptr() != drafts.data_ptr():
            forbid_drafts(processed, drafts, valid_drafts)
        verified = self._run(processed, drafts, pos, row_starts, slots, self.num_draft_tokens)
        return verified.tokens, verified.num_emitted

    def sample_plain(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        has_topp_only_rows: bool,
        use_fused_sampler: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """vLLM's `Sampler._sample_random` with our numbers; a fused sampler (no seeds asked for) stays vLLM's.

        Returns:
            Tokens [N] int64, and the logits [N, V] they were drawn from.
        """
        if use_fused_sampler:
            return flashinfer_sample(processed_logits, top_k, top_p).long(), processed_logits
        processed = apply_top_k_top_p(processed_logits, top_k, top_p, has_topp_only_rows=has_topp_only_rows)
        num_rows = processed.shape[0]
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=processed.device)
        # A request's first input token is not read, and there is no other.
        verified = self._run(processed, starts[:num_rows], pos, starts, expanded_idx_mapping, 0)
        return verified.tokens[:, 0], processed

    def _run(
        self,
        processed: torch.Tensor,
        drafts: torch.Tensor,
        pos: torch.Tensor,
        row_starts: torch.Tensor,
        slots: torch.Tensor,
        num_draft_tokens: int,
    ) -> Verified:
        """A step, or with K = 0 a plain one, from vLLM's state of each slot."""
        states, store = self.sampler.sampling_states, self.store
        temperature = states.temperature.gpu
        block = Block(
            logits=processed,
            tokens=drafts,
            row_starts=row_starts,
            positions=pos + 1,
            temperature=temperature.sign(),  # vLLM has divided the logits of the others by it
            seeds=states.seeds.gpu,
            slots=slots,
        )
        law = DraftLaw()
        if num_draft_tokens:
            values = store.logits if store.ids is None else store.values
            law = DraftLaw(values, store.ids, slots, logsumexp=store.logsumexp, temperature=temperature)
        if self.workspace is None and processed.is_cuda:
            # Of its own and for the largest step, since captured graphs go on using it.
            self.workspace = Workspace(len(temperature), self.num_draft_tokens, processed.shape[1], processed.device)
        return verify(block, law, num_draft_tokens, workspace=self.workspace)


def forbid_drafts(logits: torch.Tensor, drafts: torch.Tensor, valid_drafts: torch.Tensor) -> None:
    """Take the probability from drafts that a grammar forbids, so that they are rejected as any other draft is.

    vLLM marks such drafts as placeholders, after which it draws from p. That is not p's law: whether the draft is
    forbidden depends on its draw. A rejection draws from what p has more than q. The grammar has masked the row of a
    request's first forbidden draft already, and no later row is read.

    Args:
        logits: [N, V], changed in place.
        drafts: [N] input tokens.
        valid_drafts: [N] the same, -1 where forbidden.
    """
    judged, ids = logits[:-1], drafts[1:].long().clamp_min(0)[:, None]
    forbidden = ((valid_drafts[1:] < 0) & (drafts[1:] >= 0))[:, None]
    judged.scatter_(1, ids, torch.where(forbidden, float("-inf"), judged.gather(1, ids)))
