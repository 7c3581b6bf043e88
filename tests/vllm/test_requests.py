"""What requests can ask of the server, each beside the same vLLM without speculation; and how requests share it.

Chunks, prefix-cache hits and preemption must leave the drafter's context rows as they would be without them. That is
checked by the accepted drafts, step by step, against the library; output alone would not show a missing row.
"""

import json
from collections import Counter

import pytest
import torch
from served_pairs import MAX_POSITIONS
from test_distribution import FALSE_ALARM_RATE, p_value
from test_greedy import library, tokens  # noqa: F401  (a fixture)
from tiny_target import tiny_tokenizer
from transformers import LlamaForCausalLM
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

LONG = [[7 + i, 40, 3 + 2 * i, 99] * n for i, n in enumerate((1, 35, 9, 30, 2, 22, 17, 38))]  # 4 to 152 tokens
NUM_TOKENS = 40
DRAFTS = {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"}


def run(llm, prompts=LONG, params=None, **fields):
    sampling = params or SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | fields)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def counter(llm, name):
    return next(metric.value for metric in llm.get_metrics() if metric.name == name)


def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm):
    return scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.fixture(scope="module")
def accepted_in_library(library, drafter):  # noqa: F811
    """Accepted drafts of every step but the last of each prompt of LONG."""
    return [[step.num_accepted for step in g.steps][:-1] for g in library(drafter(), 4, LONG)]


def accepted(outputs):
    return [list(output.outputs[0].spec_decode_metrics.per_step_accepted)[:-1] for output in outputs]


def test_chunked_prefill_in_mixed_batches(engine, drafter, accepted_in_library):
    """At most 48 tokens a step: prompts come in chunks while other requests are being decoded."""
    llm = engine(drafter(), max_num_batched_tokens=48, max_num_seqs=4, speculative=DRAFTS)
    outputs = run(llm)
    assert tokens(outputs) == tokens(run(engine()))
    assert accepted(outputs) == accepted_in_library


def test_prefix_cache_hits(engine, drafter, accepted_in_library):
    llm = engine(drafter(), block_size=32, enable_prefix_caching=True, speculative=DRAFTS)
    first = run(llm)
    hits = counter(llm, "vllm:prefix_cache_hits")
    second = run(llm)
    assert counter(llm, "vllm:prefix_cache_hits") > hits, "nothing was found in the cache: the test shows nothing"
    assert tokens(second) == tokens(first) == tokens(run(engine()))
    assert accepted(first) == accepted(second) == accepted_in_library


def test_preemption(engine, drafter):
    """Room for about two of the long requests: the others are stopped in between, and start again from their tokens."""
    llm = engine(drafter(), block_size=32, num_gpu_blocks_override=14, speculative=DRAFTS)
    before = free_blocks(llm)
    outputs = run(llm)
    assert counter(llm, "vllm:num_preemptions") > 0, "nothing was preempted: the test shows nothing"
    assert tokens(outputs) == tokens(run(engine()))
    assert free_blocks(llm) == before


@pytest.mark.parametrize("index", range(3, 12))
def test_stop_token(index, engine, drafter):
    """Wherever a stop token falls in a block, the text ends with it, and the request says why."""
    plain, llm = engine(), engine(drafter(), speculative=DRAFTS)
    stop = [tokens(run(plain))[0][index]]
    outputs = run(llm, LONG[:1], stop_token_ids=stop), run(plain, LONG[:1], stop_token_ids=stop)
    speculative, expected = (result[0].outputs[0] for result in outputs)
    assert speculative.token_ids == expected.token_ids
    assert (speculative.finish_reason, speculative.stop_reason) == (expected.finish_reason, expected.stop_reason)


def test_length_limits_within_a_block(engine, drafter):
    plain, llm = engine(), engine(drafter(), speculative=DRAFTS)
    for limit in range(1, 9):
        outputs = run(llm, max_tokens=limit)
        assert tokens(outputs) == tokens(run(plain, max_tokens=limit))
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_a_request_near_max_model_len(engine, drafter):
    """It is cut at the limit; the others go on, and their drafts are accepted as if it were not there."""
    plain, llm = engine(), engine(drafter(), speculative=DRAFTS)
    near = [[9, 8, 7, 6] * 61 + [5]]  # 245 of 256
    outputs = run(llm, near + LONG, max_tokens=60)
    assert tokens(outputs) == tokens(run(plain, near + LONG, max_tokens=60))
    assert len(outputs[0].outputs[0].token_ids) == 256 - len(near[0])
    assert accepted(outputs[1:]) == accepted(run(llm, LONG, max_tokens=60))


def test_beyond_the_drafters_positions(engine, drafter):
    """Past its last position nothing is drafted; the text goes on as the target's."""
    short = drafter(max_position_embeddings=128)
    assert MAX_POSITIONS > 128
    prompts = [[11, 12, 13] * 35]  # 105 tokens, and 40 more
    outputs = run(engine(short, speculative=DRAFTS), prompts)
    assert tokens(outputs) == tokens(run(engine(), prompts))


def test_logprobs_are_the_targets(engine, drafter):
    speculative = run(engine(drafter(), speculative=DRAFTS), logprobs=3, prompt_logprobs=2)
    plain = run(engine(), logprobs=3, prompt_logprobs=2)
    for mine, expected in zip(speculative, plain, strict=True):
        pairs = [
            (mine.outputs[0].logprobs, expected.outputs[0].logprobs),
            (mine.prompt_logprobs, expected.prompt_logprobs),
        ]
        for found, wanted in pairs:
            assert len(found) == len(wanted)
            for position, reference in zip(found, wanted, strict=True):
                if reference is None:  # the first prompt token has none
                    assert position is None
                    continue
                assert position.keys() == reference.keys()
                for token, value in reference.items():
                    assert position[token].logprob == pytest.approx(value.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.9, "frequency_penalty": 0.5},
        {"min_tokens": 20, "ignore_eos": False},
        {"allowed_token_ids": list(range(3, 120))},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_parameters_that_change_the_distribution(fields, engine, drafter):
    assert tokens(run(engine(drafter(), speculative=DRAFTS), **fields)) == tokens(run(engine(), **fields))


@pytest.mark.parametrize("fields", [{"min_p": 0.1}, {"logit_bias": {5: 2.0}}], ids=lambda fields: "+".join(fields))
def test_parameters_that_vllm_refuses_with_any_drafter(fields, engine, drafter):
    with pytest.raises(VLLMValidationError, match="min_p and logit_bias sampling parameters are not yet supported"):
        run(engine(drafter(), speculative=DRAFTS), LONG[:1], temperature=1.0, **fields)


@pytest.mark.parametrize("budget", [2048, 48], ids=["whole-prompts", "chunks"])
def test_seeded_requests_do_not_depend_on_the_batch(budget, engine, drafter):
    llm = engine(drafter(), speculative=DRAFTS, max_num_batched_tokens=budget)
    sampled = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    alone = [tokens(run(llm, [prompt], seed=11, **sampled))[0] for prompt in LONG]
    params = [SamplingParams(seed=11, **sampled) for _ in LONG]
    others = [SamplingParams(**sampled) for _ in LONG]
    batch = tokens(run(llm, LONG + LONG, params + others))
    assert batch[: len(LONG)] == alone
    assert batch[len(LONG) :] != alone


def test_two_samples_of_one_request(engine, drafter):
    llm = engine(drafter(), speculative=DRAFTS)
    fields = {"n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 24}
    first, again = (run(llm, LONG[1:2], **fields)[0].outputs for _ in range(2))
    assert first[0].token_ids != first[1].token_ids
    assert [sample.token_ids for sample in first] == [sample.token_ids for sample in again]


SCHEMA = {
    "type": "object",
    "properties": {"mode": {"enum": ["fast", "slow"]}, "on": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["mode", "on", "n"],
    "additionalProperties": False,
}


# vLLM's own default lets whitespace go on for ever, and a random model does.
COMPACT = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


def text(output):
    return tiny_tokenizer().decode(output.outputs[0].token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output(temperature, engine, drafter):
    """JSON by a schema: always valid, and at temperature 0 the text of plain decoding."""
    params = SamplingParams(
        temperature=temperature, max_tokens=120, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    prompts = LONG[:4] * 3
    outputs = run(engine(drafter(), speculative=DRAFTS, **COMPACT), prompts, params)
    for output in outputs:
        value = json.loads(text(output))
        assert value["mode"] in ("fast", "slow")
        assert isinstance(value["on"], bool)
    if temperature == 0:
        assert tokens(outputs) == tokens(run(engine(**COMPACT), prompts, params))


def test_structured_output_follows_the_masked_target(engine, drafter, target):
    """1,500 draws from three choices against their exact law; false-alarm rate 1e-4.

    Drafts that the grammar forbids are dropped before verification, which would bias text drafted at random.
    """
    choices = ["ab", "ad", "cb"]
    params = SamplingParams(temperature=1.0, max_tokens=3, structured_outputs=StructuredOutputsParams(choice=choices))
    llm = engine(drafter(), speculative=DRAFTS, max_num_seqs=256, max_num_batched_tokens=2048)
    counts = Counter(text(output) for output in run(llm, [LONG[0]] * 1500, params))
    assert p_value(counts, choice_law(target, LONG[0], choices)) > FALSE_ALARM_RATE


def choice_law(target, prompt, choices):
    """Probability of each of the two-letter choices when, letter by letter, the others are masked."""
    model = LlamaForCausalLM.from_pretrained(target).double().eval()
    ids = {letter: tiny_tokenizer().convert_tokens_to_ids(letter) for letter in "abcd"}

    def step(text, letters):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + [ids[c] for c in text]])).logits[0, -1]
        return dict(zip(letters, logits[[ids[c] for c in letters]].softmax(0).tolist(), strict=True))

    law = {}
    starts = step("", sorted({choice[0] for choice in choices}))
    for choice in choices:
        following = step(choice[0], sorted({other[1] for other in choices if other[0] == choice[0]}))
        law[choice] = starts[choice[0]] * following[choice[1]]
    return law


def test_no_blocks_are_lost(engine, drafter):
    """After everything above, every block of each engine is free again."""
    for llm in (
        engine(drafter(), speculative=DRAFTS),
        engine(drafter(), block_size=32, num_gpu_blocks_override=14, speculative=DRAFTS),
    ):
        pool = scheduler(llm).kv_cache_manager.block_pool
        assert free_blocks(llm) == pool.num_gpu_blocks - 1  # vLLM keeps block 0 for padding
