"""Faults reported of systems of this kind, each with a small input whose right answer is known by hand.

Most have no error message: the text stays good and acceptance falls, or acceptance rises and the text is wrong.
"""

import math

import pytest
import torch
from checkpoints_util import deepspec, speculators, write_speculators
from pairs import HIDDEN, LAYERS, counting_pair, drafter_config, tiny_drafter, tiny_target
from transformers import XGLMConfig, XGLMForCausalLM

from dspark import SamplingParams, generate, load_drafter
from dspark.drafter import Drafter
from dspark.evals.acceptance import measure_acceptance
from dspark.sampling import SamplingTensors, Streams, rejection_sample, to_distribution
from dspark.target import HFTarget

GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


def sampling_of(params: list[SamplingParams]) -> tuple[SamplingTensors, Streams]:
    return SamplingTensors.stack(params, "cpu"), Streams.for_params(params, "cpu")


# --- block layout --------------------------------------------------------------------------------------------------

VOCAB = HIDDEN  # one hidden unit per token


class CountingBlock(Drafter):
    """A backbone that was trained to count: row j says anchor + j + 1 in the anchor-first layout, anchor + j in 1+N.

    `trained_anchor_first` is what it was trained in; `config.anchor_first` is how it is read.
    """

    trained_anchor_first = True
    rows_run: list[int]

    def forward_block(self, cache, embedded):
        self.rows_run.append(embedded.shape[1])
        steps = torch.arange(embedded.shape[1]) + (1 if self.trained_anchor_first else 0)
        said = embedded[:, 0].argmax(-1)[:, None] + steps
        return torch.nn.functional.one_hot(said % VOCAB, VOCAB).to(embedded.dtype)


def counting_block(num_rows: int, trained_anchor_first: bool, read_anchor_first: bool) -> tuple:
    target, _ = counting_pair(VOCAB)
    config = drafter_config(
        VOCAB,
        block_size=num_rows,
        anchor_first=read_anchor_first,
        markov_kind="none",
        markov_rank=0,
        confidence="none",
        owns_embedding=False,
    )
    drafter = CountingBlock(config).double().eval().requires_grad_(False)
    drafter.trained_anchor_first, drafter.rows_run = trained_anchor_first, []
    drafter.lm_head.weight.copy_(20 * torch.eye(VOCAB))
    drafter.share(target.input_embedding, None, VOCAB)
    return target, drafter


def drafts_after(drafter, anchor: int, num_draft_tokens: int) -> list[int]:
    cache = drafter.new_cache(1)
    drafter.extend(cache, torch.zeros(1, 3, 2 * HIDDEN, dtype=torch.float64), [3])
    sampling, streams = sampling_of([GREEDY])
    return drafter.propose(cache, torch.tensor([anchor]), sampling, streams, num_draft_tokens).tokens[0].tolist()


@pytest.mark.parametrize(("anchor_first", "num_rows"), [(True, 4), (False, 5)], ids=["anchor-first", "1pN"])
def test_both_layouts_draft_the_tokens_after_the_anchor(anchor_first, num_rows):
    _, drafter = counting_block(num_rows, anchor_first, anchor_first)
    assert drafts_after(drafter, 5, 4) == [6, 7, 8, 9]
    assert drafter.rows_run == [num_rows]


@pytest.mark.parametrize(
    ("trained_anchor_first", "drafts"), [(True, [7, 8, 9]), (False, [5, 6, 7, 8])], ids=["anchor-first", "1pN"]
)
def test_a_block_read_in_the_other_layout_is_shifted_by_one(trained_anchor_first, drafts):
    """So that the stubs above are known to tell the layouts apart."""
    _, drafter = counting_block(4, trained_anchor_first, not trained_anchor_first)
    assert drafts_after(drafter, 5, len(drafts)) == drafts


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("anchor_first", [True, False], ids=["anchor-first", "1pN"])
def test_a_right_block_is_accepted_whole_in_both_layouts(anchor_first, num_draft_tokens):
    target, drafter = counting_block(8 if anchor_first else 9, anchor_first, anchor_first)
    params = SamplingParams(temperature=0, max_new_tokens=1 + 2 * (num_draft_tokens + 1))
    (result,) = generate(target, drafter, [[3]], params, num_draft_tokens=num_draft_tokens)
    assert result.token_ids == [token % VOCAB for token in range(4, 4 + params.max_new_tokens)]
    assert [step.num_accepted for step in result.steps] == [num_draft_tokens] * 2


@pytest.mark.parametrize(("anchor_first", "accepted"), [(True, 3), (False, 2)], ids=["anchor-first", "1pN"])
def test_three_right_slots_are_three_or_two_drafts(anchor_first, accepted):
    target, drafter = counting_block(3, anchor_first, anchor_first)
    (result,) = generate(target, drafter, [[3]], SamplingParams(temperature=0, max_new_tokens=1 + 4 * (accepted + 1)))
    figures = measure_acceptance([result.steps])
    assert figures.tokens_per_step.value == accepted + 1
    assert figures.acceptance_rate.value == 1.0


# --- taps ----------------------------------------------------------------------------------------------------------


def adding_target():
    """Embeddings are 0 and each layer adds 1; a final norm with uneven weights would show in a normed tap."""
    target = tiny_target()
    target.input_embedding.zero_()
    target.model.get_decoder().norm.weight.copy_(torch.linspace(2, 5, HIDDEN))
    for layer in target.layers:
        layer.forward = lambda hidden_states, *args, **kwargs: hidden_states + 1
    return target


def tapped(target, tap_ids) -> list[float]:
    """The value of each tap; all its entries and positions are equal, after prefill and after verification."""
    target.tap(tap_ids)
    cache = target.new_cache(1)
    prompt, step = target.prefill(cache, [[1, 2, 3]]), target.verify(cache, torch.tensor([[4, 5]]))
    taps = torch.cat([prompt.taps, step.taps], dim=1).unflatten(-1, (len(tap_ids), HIDDEN))
    assert torch.equal(taps, taps[:, :1, :, :1].expand_as(taps))
    return taps[0, 0, :, 0].tolist()


@torch.no_grad()
def test_a_tap_is_the_output_of_the_layer_that_the_checkpoint_means():
    target = adding_target()
    assert tapped(target, deepspec({"target_layer_ids": [-1, 0, 2]}).tap_ids) == [0, 1, 3]
    assert tapped(target, speculators({"aux_hidden_state_layer_ids": [0, 1, 3]}).tap_ids) == [0, 1, 3]
    assert tapped(target, (1, 3, 0)) == [1, 3, 0]  # in the listed order
    assert tapped(target, (LAYERS,)) == [LAYERS]  # of the last layer too, before the norm
    with pytest.raises(ValueError, match=r"tap 5 is outside 0\.\.4"):
        target.tap((1, 5))


# --- masks and context ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer_types", "non_causal", "reaches"),
    [
        pytest.param(["full_attention"] * 2, False, True, id="full"),
        pytest.param(["sliding_attention"] * 2, False, False, id="sliding-is-causal"),
        pytest.param(["sliding_attention"] * 2, True, True, id="sliding-stated-non-causal"),
        pytest.param(["sliding_attention", "full_attention"], False, True, id="mixed"),
    ],
)
def test_the_last_slot_reaches_slot_0_only_through_a_bidirectional_layer(layer_types, non_causal, reaches, tmp_path):
    changes = {"transformer_layer_config.layer_types": layer_types, "sliding_window_non_causal": non_causal}
    drafter = load_drafter(write_speculators(tmp_path, changes), dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    cache = drafter.new_cache(1)
    drafter.extend(cache, torch.randn(1, 12, 96, generator=generator, dtype=torch.float64), [12])
    block = torch.randn(1, 5, 32, generator=generator, dtype=torch.float64)
    changed = block.clone()
    changed[:, -1] += 1
    before, after = drafter.forward_block(cache, block)[0], drafter.forward_block(cache, changed)[0]
    moved = (before - after).abs().amax(-1)
    assert moved[-1] > 1e-3
    assert bool(moved[0] > 1e-6) == reaches
    assert reaches or torch.equal(before[:-1], after[:-1])


def test_verification_stays_causal():
    target = tiny_target()
    target.tap((1, LAYERS))
    cache = target.new_cache(1)
    target.prefill(cache, [PROMPTS[1]])
    first, second = (target.verify(cache, torch.tensor([[3, 1, 4, last]])) for last in (1, 5))
    assert torch.equal(first.logits[:, :-1], second.logits[:, :-1])
    assert torch.equal(first.taps[:, :-1], second.taps[:, :-1])
    assert not torch.allclose(first.logits[:, -1], second.logits[:, -1])


@torch.inference_mode()
def poison(cache, lengths: list[int], value: float) -> None:
    """Overwrite every slot behind a request's committed ones."""
    for store in (*cache.keys, *cache.values):
        for row, length in enumerate(lengths):
            store[row, length:] = value


@pytest.mark.parametrize(("lengths", "value"), [([7], math.nan), ([3, 9, 1], 1e30)], ids=["alone", "ragged"])
def test_slots_that_were_not_committed_are_never_read(lengths, value):
    """Draft context and target cache, after a round with rejected rows.

    In a ragged batch a shorter request's spare slots take part with weight 0, so there they must only be finite.
    """
    target = tiny_target()
    drafter = tiny_drafter(drafter_config(), target)
    target.tap(drafter.config.tap_ids)
    prompts = [[(5 * i + j) % 16 for j in range(n)] for i, n in enumerate(lengths)]
    anchors = torch.tensor([3, 8, 2][: len(lengths)])
    sampling, streams = sampling_of([SamplingParams(temperature=0.8, seed=i) for i in range(len(lengths))])
    results = []
    for poisoned in (False, True):
        cache, context = target.new_cache(len(lengths)), drafter.new_cache(len(lengths))
        drafter.extend(context, target.prefill(cache, prompts).taps, lengths)
        rejected = target.verify(cache, torch.stack([anchors] * 5, dim=1))
        target.commit(cache, [2] * len(lengths))
        drafter.extend(context, rejected.taps, [2] * len(lengths))
        if poisoned:
            poison(cache, [length + 2 for length in lengths], value)
            poison(context, [length + 2 for length in lengths], value)
        draft = drafter.propose(context, anchors, sampling, streams, 4)
        output = target.verify(cache, torch.cat([anchors[:, None], draft.tokens], dim=1))
        results.append((draft.proposal.dense(16), draft.confidence_logits, output.logits, output.taps))
    for clean, dirty in zip(*results, strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, dirty)


def test_a_prompt_in_pieces_leaves_the_context_of_one_piece():
    target = tiny_target()
    drafter = tiny_drafter(drafter_config(), target)
    target.tap(drafter.config.tap_ids)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    whole, context = target.new_cache(1), drafter.new_cache(1)
    drafter.extend(context, target.prefill(whole, [prompt]).taps, [10])
    pieces, context_in_pieces = target.new_cache(1), drafter.new_cache(1)
    for start in (0, 4, 8):
        piece = torch.tensor([prompt[start : start + 4]])
        output = target.verify(pieces, piece)
        target.commit(pieces, [piece.shape[1]])
        drafter.extend(context_in_pieces, output.taps, [piece.shape[1]])
    for layer in range(2):
        for one, other in zip(context.read(layer, 10), context_in_pieces.read(layer, 10), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    anchor, request = torch.tensor([7]), sampling_of([SamplingParams(temperature=1.0, seed=3)])
    one, other = (drafter.propose(cache, anchor, *request, 4) for cache in (context, context_in_pieces))
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.proposal.dense(16), other.proposal.dense(16), rtol=0, atol=1e-12)
    block = torch.cat([anchor[:, None], one.tokens], dim=1)
    torch.testing.assert_close(target.verify(whole, block).logits, target.verify(pieces, block).logits)


# --- q -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_vocab_size", [16, 9], ids=["full", "reduced"])
@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("anchor_first", [True, False], ids=["anchor-first", "1pN"])
def test_q_is_the_distribution_after_the_markov_bias_bit_for_bit(anchor_first, kind, draft_vocab_size):
    """Row i of the proposal is the distribution of the corrected logits along the drafted tokens, at each request's
    own parameters.
    """
    target = tiny_target()
    changes = {"markov_kind": kind} if kind != "none" else {"markov_kind": kind, "markov_rank": 0, "confidence": "none"}
    config = drafter_config(block_size=5, anchor_first=anchor_first, draft_vocab_size=draft_vocab_size, **changes)
    drafter = tiny_drafter(config, target)
    params = [
        SamplingParams(temperature=1.5, seed=1),
        SamplingParams(temperature=0.6, top_k=5, seed=2),
        SamplingParams(temperature=0.0, seed=3),
        SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02, seed=4),
    ]
    cache, anchors = drafter.new_cache(4), torch.tensor([1, 5, 9, 13])
    taps = torch.randn(4, 6, 2 * HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drafter.extend(cache, taps, [6, 2, 4, 1])
    sampling, streams = sampling_of(params)
    draft = drafter.propose(cache, anchors, sampling, streams, 4)
    drawn_from = []

    def pick(i, logits):
        drawn_from.append(to_distribution(logits, sampling))
        return draft.tokens[:, i]

    drafter.chain(drafter.block_hidden(cache, anchors), anchors, 4, pick)
    ids = drafter.draft_ids()
    q = draft.proposal.dense(16)
    assert torch.equal(q if ids is None else q[..., ids], torch.stack(drawn_from, dim=1))
    assert torch.equal(q.gather(-1, draft.tokens[..., None])[..., 0], draft.proposal.prob())
    assert (draft.proposal.prob() > 0).all()


def test_a_target_that_adds_masks_to_its_scores_itself_sees_no_later_token():
    """XGLM's attention knows no boolean masks: it would take True for 1, and see everything."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4}
    model = XGLMForCausalLM(XGLMConfig(vocab_size=16, pad_token_id=None, init_std=0.3, **sizes)).eval()
    prompts, rest = [[1, 2, 3, 4, 5, 6, 7], [9, 8]], torch.tensor([[5, 6, 7], [1, 2, 3]])
    target = HFTarget(model)
    cache = target.new_cache(2)
    target.prefill(cache, prompts)
    logits = target.verify(cache, rest).logits
    for row, prompt in enumerate(prompts):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + rest[row].tolist()])).logits[0, len(prompt) :]
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_a_chain_of_more_drafts_than_rows_is_no_shorter_block():
    target = tiny_target(16)
    drafter = tiny_drafter(drafter_config(16, block_size=4), target)
    hidden = drafter.block_hidden(drafter.new_cache(1), torch.tensor([1]))
    with pytest.raises(ValueError, match="shorter"):
        drafter.chain(hidden, torch.tensor([1]), 5, lambda i, logits: logits.argmax(-1))


class TwoTexts(Drafter):
    """Slot 0 is a or c, slot 1 is b or d, each with probability 1/2: the marginals of a target that says ab or cd."""

    def forward_block(self, cache, embedded):
        hidden = embedded.new_zeros(*embedded.shape)
        hidden[:, 0, [0, 2]] = 1.0
        hidden[:, 1, [1, 3]] = 1.0
        return hidden


@pytest.mark.parametrize(
    ("rank", "drafting", "coherent"),
    [
        pytest.param(VOCAB, "probabilistic", 1.0, id="markov-on-the-sampled-token"),
        pytest.param(0, "probabilistic", 0.5, id="independent-slots"),
        pytest.param(0, "greedy", 1.0, id="argmax-without-markov"),
    ],
)
def test_the_markov_head_keeps_a_sampled_pair_together(rank, drafting, coherent):
    """400 seeded requests; of independent slots the coherent half has a standard deviation of 10, and 60 are six."""
    requests = 400
    kind = {"markov_kind": "vanilla" if rank else "none", "markov_rank": rank, "confidence": "none"}
    drafter = TwoTexts(drafter_config(VOCAB, block_size=2, **kind)).double().eval().requires_grad_(False)
    drafter.embed_tokens.weight.zero_()
    drafter.lm_head.weight.copy_(60 * torch.eye(VOCAB))
    if rank:
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        drafter.markov_head.markov_w2.weight.zero_()
        drafter.markov_head.markov_w2.weight[[1, 3], [0, 2]] = 60.0  # b after a, d after c
    sampling, streams = sampling_of([SamplingParams(seed=seed) for seed in range(requests)])
    cache = drafter.new_cache(requests)
    anchors = torch.full((requests,), 7)
    draft = drafter.propose(cache, anchors, sampling, streams, 2, drafting)
    pairs = [tuple(pair) for pair in draft.tokens.tolist()]
    together = sum(pair in ((0, 1), (2, 3)) for pair in pairs)
    assert abs(together - coherent * requests) <= (60 if coherent == 0.5 else 0)
    p = torch.zeros(requests, 3, VOCAB, dtype=torch.float64)
    p[:, 0, [0, 2]] = 0.5
    p[torch.arange(requests), 1, draft.tokens[:, 0] + 1] = 1.0
    p[:, 2, 9] = 1.0
    accepted = rejection_sample(draft.proposal, p, streams, torch.ones(requests, dtype=torch.int64)).num_accepted
    if drafting == "probabilistic":
        assert {pair[0] for pair in pairs} == {0, 2}
        assert torch.equal(accepted, torch.tensor([2 if pair in ((0, 1), (2, 3)) else 1 for pair in pairs]))
    else:  # the one-hot draft "ab" is kept when the target says a, and that is half of the time
        assert set(pairs) == {(0, 1)}
        assert set(accepted.tolist()) == {0, 2}


@pytest.mark.parametrize("order", [[2, 0], [1], [1, 2, 0]], ids=["reordered-one-dropped", "one-left", "turned"])
def test_requests_keep_their_drafts_and_caches_when_the_batch_changes_before_verification(order):
    target = tiny_target()
    drafter = tiny_drafter(drafter_config(draft_vocab_size=9), target)
    target.tap(drafter.config.tap_ids)
    lengths = [len(prompt) for prompt in PROMPTS]
    sampling, streams = sampling_of([SamplingParams(temperature=t, seed=3) for t in (1.0, 0.0, 0.7)])
    anchors = torch.tensor([3, 8, 2])

    def round_of(rows):
        cache, context = target.new_cache(3), drafter.new_cache(3)
        drafter.extend(context, target.prefill(cache, PROMPTS).taps, lengths)
        draft = drafter.propose(context, anchors, sampling, streams, 4)
        index = torch.tensor(rows)
        cache.keep(rows)
        context.keep(rows)
        proposal, own = draft.proposal.rows(index), (sampling.rows(index), streams.rows(index))
        output = target.verify(cache, torch.cat([anchors[index, None], proposal.tokens], dim=1))
        verified = rejection_sample(proposal, to_distribution(output.logits, own[0]), own[1], cache.lengths + 1)
        kept = verified.num_emitted.tolist()
        target.commit(cache, kept)
        drafter.extend(context, output.taps, kept)
        last = verified.tokens.gather(1, verified.num_accepted[:, None])[:, 0]
        return verified.tokens, drafter.propose(context, last, *own, 4).tokens

    for whole, part in zip(round_of([0, 1, 2]), round_of(order), strict=True):
        assert torch.equal(whole[order], part)
