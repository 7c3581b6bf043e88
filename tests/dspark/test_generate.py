"""The whole loop with the real classes: the output is the target's, step by step bookkeeping is right, and a request
is alone in its batch.
"""

import re

import pytest
import torch
from pairs import FAMILIES, counting_pair, drafter_config, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from tiny_target import write_tiny_target

from dspark import HFTarget, SamplingParams, generate
from dspark.config import LayerConfig
from dspark.default import load_target, local_target

GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]

DRAFTERS = [
    pytest.param({}, id="vanilla"),
    pytest.param({"markov_kind": "gated"}, id="gated"),
    pytest.param({"markov_kind": "rnn"}, id="rnn"),
    pytest.param({"markov_rank": 0, "markov_kind": "none", "confidence": "hidden"}, id="rank-0"),
    pytest.param({"block_size": 9, "anchor_first": False}, id="1pN-block-9"),
    pytest.param({"block_size": 8}, id="anchor-first-block-8"),
    pytest.param({"markov_kind": "rnn", "block_size": 5, "anchor_first": False}, id="1pN-rnn"),
    pytest.param({"layers": (LayerConfig(), LayerConfig(window=3, causal=True))}, id="sliding-causal"),
    pytest.param({"draft_vocab_size": 9}, id="reduced-vocabulary"),
    pytest.param({"confidence": "none"}, id="no-confidence"),
    pytest.param({"owns_embedding": False, "owns_head": False}, id="shared-embedding-and-head"),
    pytest.param({"tap_ids": (0, 2, 4)}, id="taps-embedding-and-last-layer"),
]


def tokens(generations):
    return [g.token_ids for g in generations]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", DRAFTERS)
def test_greedy_output_is_the_targets_for_every_k(changes, family):
    target = tiny_target(family=family)
    drafter = tiny_drafter(drafter_config(**changes), target)
    plain = tokens(generate(target, None, PROMPTS, GREEDY))
    alone = tokens(generate(target, None, [PROMPTS[0]], GREEDY)) + tokens(generate(target, None, PROMPTS[1:], GREEDY))
    assert plain == alone
    for num_draft_tokens in range(1, drafter.config.max_draft_tokens + 1):
        drafted = generate(target, drafter, PROMPTS, GREEDY, num_draft_tokens=num_draft_tokens)
        assert tokens(drafted) == plain, num_draft_tokens
        assert sum(step.num_offered for g in drafted for step in g.steps) > 0


def test_plain_decoding_equals_transformers_generate():
    target = tiny_target()
    expected = target.model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=24, do_sample=False)[0, 7:].tolist()
    assert tokens(generate(target, None, [PROMPTS[1]], GREEDY)) == [expected]


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_a_drafter_that_is_always_right_commits_k_plus_one_each_step(num_draft_tokens):
    target, drafter = counting_pair(block_size=8)
    params = SamplingParams(temperature=0, max_new_tokens=2 * (num_draft_tokens + 1) + 1)
    result = generate(target, drafter, [[3], [10, 11]], params, num_draft_tokens=num_draft_tokens)
    assert tokens(result) == [
        [t % 32 for t in range(start + 1, start + 1 + params.max_new_tokens)] for start in (3, 11)
    ]
    for generation in result:
        assert [(s.num_offered, s.num_accepted, s.num_committed) for s in generation.steps] == [
            (num_draft_tokens, num_draft_tokens, num_draft_tokens + 1)
        ] * 2


def test_accepted_lengths_follow_where_the_drafter_is_wrong():
    target, drafter = counting_pair(wrong_after=(7, 12), block_size=8)
    (result,) = generate(target, drafter, [[2]], SamplingParams(temperature=0, max_new_tokens=20))
    assert result.token_ids == list(range(3, 23))
    # anchor 3: drafts 4 5 6 7, wrong after 7, 8 recovered; anchor 8: drafts 9..12, 13 recovered; then all eight drafts
    assert [(s.position, s.num_accepted, s.num_committed) for s in result.steps] == [(1, 4, 5), (6, 4, 5), (11, 8, 9)]
    assert result.finish_reason == "length"


def test_drafts_near_the_length_limit_are_not_offered_beyond_it():
    target, drafter = counting_pair(block_size=8)
    (result,) = generate(target, drafter, [[2]], SamplingParams(temperature=0, max_new_tokens=4))
    assert [(s.num_offered, s.num_committed) for s in result.steps] == [(2, 3)]
    (single,) = generate(target, drafter, [[2]], SamplingParams(temperature=0, max_new_tokens=1))
    assert single.steps == []
    assert single.finish_reason == "length"


@pytest.mark.parametrize(
    ("max_new_tokens", "committed", "reason"),
    [
        pytest.param(2, [3, 4], "length", id="cap-first"),
        pytest.param(3, [3, 4, 5], "length", id="cap-one-before"),
        pytest.param(4, [3, 4, 5, 6], "stop", id="stop-at-the-cap-is-a-stop"),
        pytest.param(50, [3, 4, 5, 6], "stop", id="stop-inside-a-block"),
    ],
)
def test_a_stop_inside_an_accepted_block_ends_the_request_there(max_new_tokens, committed, reason):
    target, drafter = counting_pair(block_size=8)
    params = SamplingParams(temperature=0, max_new_tokens=max_new_tokens, stop_token_ids=(6,))
    seen = []
    (result,) = generate(target, drafter, [[2]], params, on_tokens=lambda i, new, step: seen.append((i, new)))
    assert result.token_ids == committed
    assert result.finish_reason == reason
    assert [token for _, new in seen for token in new] == committed
    if max_new_tokens == 50:  # 3 from prefill, then 4 5 6 of eight accepted drafts: neither 8 accepted nor 9 committed
        (step,) = result.steps
        assert (step.num_offered, step.num_accepted, step.num_committed) == (3, 3, 3)
        assert len(step.accept_probs) == len(step.confidence) == 3


def test_a_stop_as_bonus_recovered_or_first_token():
    target, drafter = counting_pair(wrong_after=(7,), block_size=4)
    for stop, last_step in [(8, (4, 4, 5)), (3, None)]:  # 8 is the bonus token of the first step
        params = SamplingParams(temperature=0, max_new_tokens=50, stop_token_ids=(stop,))
        (result,) = generate(target, drafter, [[2]], params)
        assert result.token_ids[-1] == stop
        assert result.finish_reason == "stop"
        steps = [(s.num_offered, s.num_accepted, s.num_committed) for s in result.steps]
        assert steps == ([last_step] if last_step else [])
    target, drafter = counting_pair(wrong_after=(5,), block_size=4)
    (result,) = generate(target, drafter, [[2]], SamplingParams(temperature=0, stop_token_ids=(6,)))
    assert [(s.num_offered, s.num_accepted, s.num_committed) for s in result.steps] == [(4, 2, 3)]  # 6 is recovered


def test_model_stop_tokens_count_unless_eos_is_ignored():
    target, drafter = counting_pair(block_size=4)
    target.model.generation_config.eos_token_id = [9, 6]
    assert generate(target, drafter, [[2]], GREEDY)[0].token_ids == [3, 4, 5, 6]
    ignoring = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    assert generate(target, drafter, [[2]], ignoring)[0].token_ids == list(range(3, 11))


def test_generation_ends_at_the_targets_last_position():
    target = tiny_target(max_positions=20)
    drafter = tiny_drafter(drafter_config(), target)
    (result,) = generate(target, drafter, [PROMPTS[1]], SamplingParams(temperature=0, max_new_tokens=99))
    assert len(result.token_ids) == 20 - 7
    assert result.finish_reason == "length"
    assert (
        result.token_ids
        == generate(target, None, [PROMPTS[1]], SamplingParams(temperature=0, max_new_tokens=99))[0].token_ids
    )


def test_drafting_stops_at_the_drafters_last_position_and_generation_goes_on():
    target = tiny_target()
    drafter = tiny_drafter(drafter_config(max_position_embeddings=16), target)
    (result,) = generate(target, drafter, [PROMPTS[1]], GREEDY)
    assert result.token_ids == generate(target, None, [PROMPTS[1]], GREEDY)[0].token_ids
    offered = {step.position: step.num_offered for step in result.steps}
    assert all((n == 0) == (position + 4 > 16) for position, n in offered.items() if position < 29)


def test_requests_that_wait_join_as_others_finish():
    target = tiny_target()
    drafter = tiny_drafter(drafter_config(), target)
    prompts = [PROMPTS[i % 3] for i in range(7)]
    params = [SamplingParams(temperature=0, max_new_tokens=3 + 4 * i) for i in range(7)]
    finished = []
    result = generate(target, drafter, prompts, params, max_batch_size=3, on_finish=lambda i, g: finished.append(i))
    assert sorted(finished) == list(range(7))
    for prompt, request, generation in zip(prompts, params, result, strict=True):
        assert tokens(generate(target, drafter, [prompt], request)) == [generation.token_ids]


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 9}], ids=["full", "reduced"])
def test_a_seeded_request_is_the_same_alone_and_in_any_batch(changes, drafting):
    target = tiny_target()
    drafter = tiny_drafter(drafter_config(**changes), target)
    seeded = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_new_tokens=20)
    other = [
        SamplingParams(temperature=1.3, max_new_tokens=5),
        SamplingParams(temperature=0, max_new_tokens=17),
        SamplingParams(temperature=0.7, top_k=4, seed=1234, max_new_tokens=9),
    ]
    alone = generate(target, drafter, [PROMPTS[1]], seeded, drafting=drafting)[0]
    for position, max_batch_size in [(0, 4), (2, 4), (3, 2)]:
        params, prompts = list(other), [PROMPTS[0], PROMPTS[2], [5] * 30]
        params.insert(position, seeded)
        prompts.insert(position, PROMPTS[1])
        batched = generate(target, drafter, prompts, params, drafting=drafting, max_batch_size=max_batch_size)
        assert batched[position].token_ids == alone.token_ids
        assert [(s.num_offered, s.num_accepted) for s in batched[position].steps] == [
            (s.num_offered, s.num_accepted) for s in alone.steps
        ]
    assert generate(target, drafter, [PROMPTS[1]], seeded, drafting=drafting)[0].token_ids == alone.token_ids
    reseeded = SamplingParams(temperature=0.9, top_p=0.95, seed=1235, max_new_tokens=20)
    assert generate(target, drafter, [PROMPTS[1]], reseeded, drafting=drafting)[0].token_ids != alone.token_ids


def test_plain_decoding_of_a_seeded_request_is_reproducible_in_any_batch():
    target = tiny_target()
    seeded = SamplingParams(temperature=1.0, seed=7, max_new_tokens=12)
    alone = generate(target, None, [PROMPTS[0]], seeded)[0].token_ids
    assert generate(target, None, [PROMPTS[1], PROMPTS[0]], [GREEDY, seeded])[1].token_ids == alone


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda t, d: generate(t, d, [[]], GREEDY), "prompt 0 is empty", id="empty"),
        pytest.param(lambda t, d: generate(t, d, [[1], [99]], GREEDY), "prompt 1 holds token id 99", id="vocabulary"),
        pytest.param(lambda t, d: generate(t, d, [[1] * 256], GREEDY), "256 positions", id="too-long"),
        pytest.param(
            lambda t, d: generate(t, d, [[1]], GREEDY, num_draft_tokens=5),
            r"num_draft_tokens=5 is outside 1\.\.4",
            id="k-above-the-block",
        ),
        pytest.param(
            lambda t, d: generate(t, d, [[1]], GREEDY, num_draft_tokens=0),
            r"num_draft_tokens=0 is outside 1\.\.4: nothing would be drafted",
            id="k-zero",
        ),
        pytest.param(
            lambda t, d: generate(t, d, [[1]], [GREEDY, GREEDY]), "2 sampling params for 1 prompts", id="params"
        ),
        pytest.param(
            lambda t, d: generate(t, None, [[1]], GREEDY, num_draft_tokens=3),
            "num_draft_tokens=3 without a drafter",
            id="k-without-a-drafter",
        ),
        pytest.param(lambda t, d: generate(t, d, "text", GREEDY), "expected a list of prompts", id="one-text"),
        pytest.param(lambda t, d: generate(t, d, ["text"], GREEDY), "no tokenizer", id="no-tokenizer"),
        pytest.param(lambda t, d: generate(t, d, [[1]], GREEDY, max_batch_size=0), "max_batch_size=0", id="batch-size"),
    ],
)
def test_bad_requests_are_named(call, message):
    target = tiny_target()
    with pytest.raises(ValueError, match=message):
        call(target, tiny_drafter(drafter_config(), target))


def test_a_drafter_for_another_target_is_refused():
    target = tiny_target()
    drafter = tiny_drafter(drafter_config(vocab_size=24), tiny_target(24))
    with pytest.raises(ValueError, match="vocabulary of 24, the target has 16"):
        generate(target, drafter, [[1]], GREEDY)


def test_options_that_say_where_a_target_is_hold_for_its_tokenizer_too(tmp_path):
    write_tiny_target(tmp_path / "inner")
    target = HFTarget.from_pretrained(str(tmp_path), subfolder="inner")
    assert target.decode(target.encode("AB")) == "AB"


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(lambda path: HFTarget.from_pretrained(str(path)), id="library"),
        pytest.param(
            lambda path: load_target(local_target(path), dtype=torch.float32, device="cpu"), id="command-line"
        ),
    ],
)
def test_a_target_that_lacks_a_weight_is_refused(load, tmp_path):
    """transformers would draw it at random, and any text, acceptance or cost measured with it would be of no model."""
    write_tiny_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"is no complete target.*{re.escape(name)}"):
        load(tmp_path)
