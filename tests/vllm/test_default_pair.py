"""The embedded pair behind `vllm serve`, started as a user starts it, with the openai client and ours.

Greedy texts are those of the same vLLM without speculation, in float32; and the drafts are as good as in the library's
own loop on the same prompts. The target is fetched on first use; without it the tests are skipped with the reason.
"""

import numpy as np
import pytest
import torch
from openai import OpenAI
from soak_vllm import serving
from vllm import LLM

from dspark import SamplingParams, generate, load_drafter
from dspark.default import default_drafter_path, load_target, resolve_default_target
from dspark.evals import format_prompt, load_dataset, measure_acceptance
from dspark.evals.stats import Bootstrap
from dspark.vllm.client import generate_at_endpoint, generate_in_engine

pytestmark = pytest.mark.network
NUM_DRAFT_TOKENS = 8
OPTIONS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "12")
REPORT_STEPS = ("--per-request-spec-decode-metrics", "detailed")
GREEDY = [SamplingParams(temperature=0, max_new_tokens=length) for length in (96, 48, 64, 48)]
SAMPLED = [SamplingParams(temperature=1, seed=seed, max_new_tokens=32) for seed in range(24)]


@pytest.fixture(scope="module")
def location():
    try:
        return resolve_default_target()
    except ValueError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(f"the target cannot be fetched: {error}")


@pytest.fixture(scope="module")
def library(location):
    """The pair as the library loads it."""
    target = load_target(location, dtype=torch.float32, device="cpu")
    return target, load_drafter(default_drafter_path(), target=target, dtype=torch.float32)


@pytest.fixture(scope="module")
def texts():
    return [prompt.text for prompt in load_dataset("default", len(SAMPLED)).prompts]


@pytest.fixture(scope="module")
def prompts(library, texts):
    return [format_prompt(library[0], text) for text in texts]


@pytest.fixture(scope="module")
def plain(location, prompts):
    """Greedy texts of the same vLLM without speculation."""
    llm = LLM(model=str(location.folder), dtype="float32", max_model_len=512, max_num_seqs=12, enforce_eager=True)
    generations = generate_in_engine(llm, prompts[: len(GREEDY)], GREEDY)
    return [generation.token_ids for generation in generations]


@pytest.fixture(scope="module")
def url(location):
    with serving(
        str(location.folder), str(default_drafter_path()), NUM_DRAFT_TOKENS, OPTIONS + REPORT_STEPS
    ) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none")


@pytest.fixture(scope="module")
def served(url, prompts):
    """The same prompts on the server, all at once."""
    return generate_at_endpoint(url, prompts[: len(GREEDY)], GREEDY, max_batch_size=len(GREEDY))


def test_greedy_texts_are_those_without_speculation(served, plain):
    assert [generation.token_ids for generation in served] == plain


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_completions(client, location, prompts, plain, stream):
    extra = {"return_token_ids": True}
    answer = client.completions.create(
        model=str(location.folder), prompt=prompts[1], max_tokens=48, temperature=0, stream=stream, extra_body=extra
    )
    parts = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    assert [token for part in parts for token in part.token_ids or ()] == plain[1]
    assert parts[-1].finish_reason in ("length", "stop")
    if stream:
        assert len(parts) < len(plain[1])  # accepted drafts arrive together


def test_chat(client, location, library, texts, plain):
    """The server formats a chat as the library does."""
    chunks = client.chat.completions.create(
        model=str(location.folder),
        messages=[{"role": "user", "content": texts[3]}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == library[0].decode(plain[3])


def test_greedy_tokens_per_step(served, library, prompts):
    """Equal where the two frameworks round to the same texts, and within the library's bootstrap interval always."""
    mine = generate(*library, prompts[: len(GREEDY)], GREEDY)
    figures = [
        measure_acceptance([g.steps for g in generations], Bootstrap(len(GREEDY))) for generations in (mine, served)
    ]
    expected, got = (each.tokens_per_step for each in figures)
    if [g.token_ids for g in mine] == [g.token_ids for g in served]:
        assert got == expected
    assert expected.low <= got.value <= expected.high
    assert got.value > 1.3  # the drafter was trained for this target


def test_sampled_tokens_per_step(url, library, prompts):
    """At temperature 1 the two draw other numbers. Student's t of the differences per prompt, 23 degrees of freedom:
    beyond 3.8 with probability below 1e-3."""
    served = generate_at_endpoint(url, prompts, SAMPLED, max_batch_size=8)
    mine = generate(*library, prompts, SAMPLED, max_batch_size=8)
    rates = np.array([[np.mean([s.num_committed for s in g.steps]) for g in run] for run in (served, mine)])
    difference = rates[0] - rates[1]
    assert abs(difference.mean()) < 3.8 * difference.std(ddof=1) / len(difference) ** 0.5
    assert rates[0].mean() > 1.3
