"""The sequential part of drafting on vLLM's V2 runner: vLLM's buffers, our chain.

vLLM calls this inside its captured graph, so that nothing here may wait for the device or allocate per request. The
chain is `dspark.kernels.markov`: every kind of head, the whole draft vocabulary or the best candidates of each row.
What verification reads one step later goes into a `ProposalStore` under vLLM's request slots, because the batch is
ordered anew in between.

Random numbers are `dspark.sampling.streams`: Philox of the request's seed (vLLM draws one for requests without), the
absolute position of the token, and the purpose DRAFT. With adaptive verification drafts are trimmed by what was drawn
before, and each step has numbers of its own (`dspark.schedule.step_streams`): a trimmed draft's are not used again.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dspark.kernels.markov import ChainOutput, ChainRequests, MarkovWeights, chain_ref, features_ref
from dspark.kernels.markov_candidates import (
    CandidatesWorkspace,
    SparseOutput,
    candidates_chain,
    candidates_chain_ref,
)
from dspark.kernels.markov_chain import DenseWorkspace, dense_chain
from dspark.sampling import Streams
from dspark.schedule import step_streams
from dspark.vllm.v2_models import DSparkDraftModel
from dspark.vllm.v2_plan import Plan


@dataclass(frozen=True)
class StepInputs:
    """One step's inputs as vLLM has them. R requests, graph padding included.

    Attributes:
        base: [R, K, D] logits before the Markov bias, multiplied by the model's logit scale.
        hidden: [R, K, H] of the rows that draft, after the final norm.
        lead: [R, H] of the block's row 0 in the 1+N layout, on which a recurrent head steps too; None anchor-first.
        anchors: [R] target ids, any integer type.
        slots: [R] int64, where the request's state stands; -1 marks padding, for which nothing may be stored.
        positions: [R, K] int64, absolute position of each drafted token.
        temperature: [slots] float32.
        seeds: [slots] int64.
    """

    base: torch.Tensor
    hidden: torch.Tensor
    lead: torch.Tensor | None
    anchors: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


class ProposalStore:
    """What the drafts of each request slot were drawn from; written by the chain, read by verification.

    Attributes:
        logits: [slots, K, V] over target ids, before temperature; -inf where the draft vocabulary has no entry. None
            for one-hot and sparse proposals.
        logsumexp: [slots, K] float32 of those divided by the request's temperature; None likewise.
        ids: [slots + 1, K, k] int64 target ids of a sparse proposal; None otherwise.
        values: [slots + 1, K, k] float32 logits of those before temperature; None otherwise.
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
        # What is put under slots after the chain has a row more, which takes what padding writes.
        if plan.sparse:
            self.ids = torch.zeros(num_slots + 1, steps, plan.topk, dtype=torch.int64, device=device)
            self.values = torch.zeros(num_slots + 1, steps, plan.topk, dtype=torch.float32, device=device)
        elif plan.probabilistic:
            # In a reduced vocabulary only the drafter's columns are ever written.
            self.logits = torch.full((num_slots, steps, vocab_size), float("-inf"), dtype=dtype, device=device)
            self._sums = torch.zeros(num_slots + 1, steps, dtype=torch.float32, device=device)
            self.logsumexp = self._sums[:num_slots]

    def vllm_cache(self) -> torch.Tensor | None:
        """What stands for the proposals in vLLM, [slots, K, V]: without columns where they are sparse, and None where
        they are one-hot, which is how vLLM marks those."""
        if self.ids is None:
            return self.logits
        return torch.empty(self.num_slots, self.num_draft_tokens, 0, device=self.device)

    def keep_sums(self, slots: torch.Tensor, sums: torch.Tensor) -> None:
        """Put the logsumexp [R, K] of a step under its slots [R]."""
        self._sums[self._rows(slots)] = sums

    def keep_candidates(self, slots: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Put the candidates [R, K, k] of a step under its slots [R]."""
        rows = self._rows(slots)
        self.ids[rows], self.values[rows] = ids, values

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.where(slots < 0, self.num_slots, slots)


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
        self.model, self.plan, self.store, self.adaptive = model, plan, store, adaptive
        self.columns = min(model.drafter.draft_vocab_size, model.target_vocab_size)  # rows beyond are padding
        self.weights = chain_weights(model, self.columns, with_confidence=adaptive)
        if plan.options.w2 == "fp8" and self.weights.w2 is not None:
            self.weights = self.weights.quantized()
        self.uses_kernels = plan.chain == "kernels" and store.device.type == "cuda"
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
        walk(step.slots, base, hidden, self._requests(step), tokens, confidence)
        if confidence is not None:
            confidence_probs.copy_(self.model.acceptance_probability(confidence))

    def _walk_all(
        self,
        slots: torch.Tensor,
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
            cache=torch.empty_like(base) if store.logits is None else store.logits,
        )
        if self.uses_kernels:
            dense_chain(self.weights, base, hidden, requests, out, self._workspace(base))
        else:
            chain_ref(self.weights, base, hidden, requests, out)
        if store.logsumexp is not None:
            store.keep_sums(slots, out.lse)

    def _walk_candidates(
        self,
        slots: torch.Tensor,
        base: torch.Tensor,
        hidden: torch.Tensor | None,
        requests: ChainRequests,
        tokens: torch.Tensor,
        confidence: torch.Tensor | None,
    ) -> None:
        """Over the best base logits of each row."""
        new = SparseOutput.allocate(self.weights, base, self.plan.topk)
        out = SparseOutput(tokens, new.ids, new.logits, new.lse, confidence)
        if self.uses_kernels:
            candidates_chain(self.weights, base, hidden, requests, out, self._workspace(base))
        else:
            candidates_chain_ref(self.weights, base, hidden, requests, out)
        if self.store.ids is not None:
            self.store.keep_candidates(slots, out.ids, out.logits)

    def _requests(self, step: StepInputs) -> ChainRequests:
        slots = step.slots.clamp_min(0)
        positions = step.positions[:, 0].contiguous()
        streams = Streams(step.seeds[slots])
        if self.adaptive:
            streams = step_streams(streams, positions - 1)
        temperature = step.temperature[slots]
        row = torch.arange(len(slots), device=slots.device)
        return ChainRequests(
            anchors=step.anchors,
            positions=positions,
            seeds=streams.seeds,
            temperature=temperature if self.plan.probabilistic else torch.zeros_like(temperature),
            # Without a store the logits go to scratch memory, row by row.
            cache_rows=step.slots if self.store.logits is not None else torch.where(step.slots < 0, -1, row),
            state=None if step.lead is None else self._state_after_lead(step.anchors, step.lead),
        )

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
                else CandidatesWorkspace(self.weights, base, self.plan.topk)
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
