"""The user's command line: `vllm serve` with DSpark on loopback, asked by the openai client and by ours, and soaked."""

import pytest
from openai import BadRequestError, OpenAI
from soak_vllm import gauge, random_jobs, serving, soak
from test_requests import LONG, run, tokens

from dspark import SamplingParams
from dspark.vllm.client import generate_at_endpoint

REQUESTS = 40
OPTIONS = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16", "--enforce-eager")


@pytest.fixture(scope="module")
def url(target, drafter):
    with serving(str(target), str(drafter()), 4, OPTIONS) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none")


GREEDY = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


def test_completions(client, target, engine):
    expected = tokens(run(engine()))
    for prompt, wanted in zip(LONG, expected, strict=True):
        answer = client.completions.create(model=str(target), prompt=prompt, **GREEDY)
        assert answer.choices[0].token_ids == wanted
        assert answer.usage.completion_tokens == len(wanted)


def test_streamed_completions(client, target, engine):
    expected = tokens(run(engine()))
    for prompt, wanted in zip(LONG[:3], expected, strict=False):
        chunks = client.completions.create(model=str(target), prompt=prompt, stream=True, **GREEDY)
        assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == wanted


def test_chat(client, target):
    messages = [{"role": "user", "content": "hello"}]
    answers = [
        client.chat.completions.create(model=str(target), messages=messages, max_tokens=16, temperature=0.8, seed=3)
        for _ in range(2)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_a_refused_parameter_is_the_clients_error(client, target):
    with pytest.raises(BadRequestError, match="min_p"):
        client.completions.create(model=str(target), prompt=[5, 6], max_tokens=4, extra_body={"min_p": 0.2})


def test_our_client_reads_the_steps_from_the_counters(url, engine, drafter):
    """This server does not report the steps of each request; the engine in this process does."""
    params = [SamplingParams(temperature=0, max_new_tokens=24 + i, ignore_eos=True) for i in range(len(LONG))]
    generations = generate_at_endpoint(url, LONG, params)
    speculative = {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"}
    for generation, prompt in zip(generations, LONG, strict=True):
        limit = params[len(generation.token_ids) - 24].max_new_tokens
        output = run(engine(drafter(), speculative=speculative), [prompt], max_tokens=limit)[0].outputs[0]
        assert generation.token_ids == list(output.token_ids)
        assert generation.finish_reason == "length"
        assert sorted(s.num_accepted for s in generation.steps) == sorted(output.spec_decode_metrics.per_step_accepted)
        assert sum(step.num_committed for step in generation.steps) == len(generation.token_ids) - 1


def test_soak(url, target, engine):
    """Random requests, 16 at a time, some abandoned; the script of the same name runs 200."""
    jobs = random_jobs(REQUESTS, vocab_size=259, max_model_len=256, seed=0)

    def reference(jobs):
        return [tokens(run(engine(), [job.prompt], max_tokens=job.max_tokens, ignore_eos=False))[0] for job in jobs]

    assert soak(url, str(target), jobs, 16, reference) == []
    assert gauge(url, "vllm:spec_decode_num_accepted_tokens_total") > 0
