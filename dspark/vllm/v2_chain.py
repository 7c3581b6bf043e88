"""The sequential part of drafting on vLLM's V2 runner: vLLM's buffers, our chain.

vLLM calls this inside its captured graph, so that nothing here may wait for the device or allocate per request. The
chain is `dspark.kernels.markov`: every kind of head, the whole draft vocabulary or the best candidates of each row.
What verification reads one step later goes into a `ProposalStore` under vLLM's request slots, because the batch is
ordered anew in between.

Random numbers are `dspark.sampling.streams`: Philox of the request's seed (vLLM draws one for requests without), the
absolute position of the token, and the purpose DRAFT. With adaptive verification drafts are trimmed by what was drawn
before, and each step has numbers of its own (`dspark.schedule.step_positions`): a trimmed draft's are not used again.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dspark.kernels.markov import ChainOutput, ChainRequests, MarkovWeights, chain_ref, features_ref
from dspark.kernels.markov_candidates import (
    CandidatesWorkspace,
    SparseOutput,
    bias_lists,
    candidates_chain,
    candidates_chain_ref,
)
from dspark.kernels.markov_chain import DenseWorkspace, dense_chain
from dspark.schedule import STEP_STRIDE
from dspark.vllm.v2_models import DSparkDraftModel
from dspark.vllm.v2_plan import Plan
from dspark.vllm.v2_rows import StepBuffers, StepRows, gather_rows, scatter_rows


@dataclass(frozen=True)
class StepInputs:
    """One step's inputs. R requests, graph padding included.

    Attributes:
        base: [R, K, D] logits before the Markov bias, multiplied by the model's logit scale.
        hidden: [R, K, H] of the rows that draft, after the final norm.
        lead: [R, H] of the block's row 0 in the 1+N layout, on which a recurrent head steps too; None anchor-first.
        rows: who the requests are.
    """

    base: torch.Tensor
    hidden: torch.Tensor
    lead: torch.Tensor | None
    rows: StepRows


class ProposalStore:
    """What the drafts of each request slot were drawn from; written by the chain, read by verification.

    Attributes:
        logits: [slots, K, V] over target ids, before temperature; -inf where the draft vocabulary has no entry. None
            for one-hot and sparse proposals.
        logsumexp: [slots, K] float32 of those divided by the request's temperature; None likewise.
        ids: [slots, K, k] int64 target ids of a sparse proposal; None otherwise.
        values: [slots, K, k] float32 logits of those before temperature; None otherwise.
    """

    def __init__(self, plan: Plan, num_slots: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate.

        Args:
            plan: what is stored.
            num_slots: vLLM's max_num_reqs.
            vocab_size: of the target.
            dtype: of dense logits.
            device: of the buffers.
        """
        steps = plan.num_draft_tokens
        self.num_slots, self.num_draft_tokens, self.device = num_slots, steps, device
        self.logits: torch.Tensor | None = None
        self.ids: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.logsumexp: torch.Tensor | None = None
        if plan.sparse:
            self.ids = torch.zeros(num_slots, steps, plan.topk, dtype=torch.int64, device=device)
            self.values = torch.zeros(num_slots, steps, plan.topk, dtype=torch.float32, device=device)
        elif plan.probabilistic:
            # In a reduced vocabulary only the drafter's columns are ever written.
            self.logits = torch.full((num_slots, steps, vocab_size), float("-inf"), dtype=dtype, device=device)
            self.logsumexp = torch.zeros(num_slots, steps, dtype=torch.float32, device=device)

    def vllm_cache(self) -> torch.Tensor | None:
        """What stands for the proposals in vLLM, [slots, K, V]: without columns where they are sparse, and None where
        they are one-hot, which is how vLLM marks those."""
        if self.ids is None:
            return self.logits
        return torch.empty(self.num_slots, self.num_draft_tokens, 0, device=self.device)


class Chain:
    """Drafts a block for every request of a step.

    Attributes:
        description: what it is made of, for the log.
    """

    def __init__(self, model: DSparkDraftModel, plan: Plan, store: ProposalStore, *, adaptive: bool) -> None:
        """Collect the weights.

        Args:
            model: loaded.
            plan: what runs.
            store: receives the proposals.
            adaptive: whether vLLM's adaptive verification reads confidences, and trims drafts by them.
        """
        assert not adaptive or plan.num_draft_tokens <= STEP_STRIDE, "drafts would meet the noise of the next step"
        self.model, self.plan, self.store, self.adaptive = model, plan, store, adaptive
        self.columns = min(model.drafter.draft_vocab_size, model.target_vocab_size)  # rows beyond are padding
        self.weights = chain_weights(model, self.columns, with_confidence=adaptive)
        if plan.options.w2 == "fp8" and self.weights.w2 is not None:
            self.weights = self.weights.quantized()
        self.uses_kernels = plan.chain == "kernels" and store.device.type == "cuda"
        listed = self.uses_kernels and plan.topk is not None
        self._lists = bias_lists(self.weights, plan.topk) if listed else None
        self._workspaces: dict[int, Any] = {}
        self.description = self._describe()

    def run(self, step: StepInputs, tokens: torch.Tensor, confidence_probs: torch.Tensor) -> None:
        """Draft.

        Args:
            step: inputs.
            tokens: [R, K] int64, contiguous; receives target ids.
            confidence_probs: [R, K] float32, receives acceptance probabilities if verification is adaptive.
        """
        base = step.base[..., : self.columns]
        if self.weights.logit_scale != 1.0:
            base = base / self.weights.logit_scale  # vLLM has applied it; the chain scales the sum
        hidden = step.hidden if self.weights.reads_hidden else None
        confidence = torch.empty_like(confidence_probs) if self.adaptive else None
        walk = self._walk_all if self.plan.topk is None else self._walk_candidates
        walk(base, hidden, self._requests(step), tokens, confidence)
        if confidence is not None:
            confidence_probs.copy_(self.model.acceptance_probability(confidence))

    def _walk_all(
        self,
        base: torch.Tensor,
        hidden: torch.Tensor | None,
        requests: ChainRequests,
        tokens: torch.Tensor,
        confidence: torch.Tensor | None,
    ) -> None:
        """Over the whole draft vocabulary."""
        store = self.store
        out = ChainOutput(
            tokens=tokens,
            lse=torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device),
            confidence=confidence,
            cache=store.logits,
        )
        if self.uses_kernels:
            dense_chain(self.weights, base, hidden, requests, out, self._workspace(base))
        else:
            chain_ref(self.weights, base, hidden, requests, out)
        if store.logsumexp is not None:
            scatter_rows(requests.cache_rows, out.lse, store.logsumexp)

    def _walk_candidates(
        self,
        base: torch.Tensor,
        hidden: torch.Tensor | None,
        requests: ChainRequests,
        tokens: torch.Tensor,
        confidence: torch.Tensor | None,
    ) -> None:
        """Over some candidates of each row."""
        new = SparseOutput.allocate(self.weights, base, self.plan.topk)
        out = SparseOutput(tokens, new.ids, new.logits, new.lse, confidence)
        if self.uses_kernels:
            candidates_chain(self.weights, base, hidden, requests, out, self._workspace(base))
        else:
            candidates_chain_ref(self.weights, base, hidden, requests, out)
        if self.store.ids is not None:
            scatter_rows(requests.cache_rows, out.ids, self.store.ids)
            scatter_rows(requests.cache_rows, out.logits, self.store.values)

    def gather(self, buffers: StepBuffers, num_reqs: int) -> StepRows:
        """Who the R requests of a step are, from vLLM's buffers."""
        return gather_rows(buffers, num_reqs, greedy=not self.plan.probabilistic, step_noise=self.adaptive)

    def _requests(self, step: StepInputs) -> ChainRequests:
        rows = step.rows
        state = None if step.lead is None else self._state_after_lead(rows.anchors, step.lead)
        return ChainRequests(rows.anchors, rows.positions, rows.seeds, rows.temperature, rows.slots, state)

    def _state_after_lead(self, anchors: torch.Tensor, lead: torch.Tensor) -> torch.Tensor | None:
        """[R, rank] float32: a recurrent head has stepped on row 0, which only re-states the anchor, in training."""
        weights = self.weights
        if weights.kind != "rnn":
            return None
        zeros = torch.zeros(len(anchors), weights.rank, device=anchors.device)
        return features_ref(weights, weights.w1[anchors].float(), lead.float(), zeros)[1]

    def _workspace(self, base: torch.Tensor) -> Any:
        """One for each batch size; made in the run that vLLM does before it captures that size."""
        batch = base.shape[0]
        if batch not in self._workspaces:
            self._workspaces[batch] = (
                DenseWorkspace(self.weights, base)
                if self.plan.topk is None
                else CandidatesWorkspace(self.weights, base, self.plan.topk, self._lists)
            )
        return self._workspaces[batch]

    def _describe(self) -> str:
        if not self.uses_kernels:
            return "" if self.plan.chain == "reference" else "PyTorch (no CUDA device)"
        w2 = "8-bit W2" if self.weights.w2_scale is not None else "W2 as stored"
        return f"our kernels, {w2}" if self.weights.w2 is not None else "our kernels"


def chain_weights(model: DSparkDraftModel, columns: int, *, with_confidence: bool) -> MarkovWeights:
    """The tensors of a served drafter, shared and not copied.

    Args:
        model: loaded.
        columns: rows of W2 to use; the target's vocabulary may end before the drafter's.
        with_confidence: whether confidences are wanted.
    """
    head, confidence = model.markov_head, model.confidence_head if with_confidence else None
    joint = getattr(head, "gate_proj", None) or getattr(head, "joint_proj", None)
    return MarkovWeights(
        kind=model.drafter.markov_kind,
        w1=None if head is None else head.markov_w1.weight.detach(),
        w2=None if head is None else head.markov_w2.weight.detach()[:columns],
        joint_weight=None if joint is None else joint.weight.detach(),
        joint_bias=None if joint is None else joint.bias.detach(),
        confidence_weight=None if confidence is None else confidence.proj.weight.detach()[0],
        confidence_bias=None if confidence is None else confidence.proj.bias.detach(),
        target_ids=model.draft_ids(),
        logit_scale=model.logit_scale,
    )
