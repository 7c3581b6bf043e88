"""Through vLLM's scheduler, runner and rejection sampler, emitted text has the target's distribution.

Each case draws 2,000 continuations of three tokens for each of two prompts, all requests in a few large batches, and
compares the counts of all continuations with the exact law, computed from the target in transformers. False-alarm
rate: 1e-4 a test at most, fixed by the engine's seed. `test_the_test_sees_a_wrong_q` shows what the same test does when
the verifier gets another q than the drafts were drawn from.
"""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from served_pairs import write_drafter, write_target
from transformers import LlamaForCausalLM
from vllm import SamplingParams

from dspark.sampling import SamplingParams as LibrarySampling
from dspark.sampling import SamplingTensors, to_distribution
from dspark.vllm.v1 import DSparkProposer

VOCAB = 8
LENGTH = 3
PROMPTS = ([1, 2], [3, 0, 2, 1, 1])
REQUESTS = 2000
FALSE_ALARM_RATE = 1e-4


@pytest.fixture(scope="module")
def small_target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("small") / "target", vocab_size=VOCAB, spread=1.0)


@pytest.fixture(scope="module")
def drawn(small_target, tmp_path_factory, engine):
    """drawn(packaging, changes, speculative, params, seeded): counts of the continuations of each prompt."""
    drafters: dict[str, Path] = {}

    def run(packaging="deepspec", changes=None, speculative=None, params=None, seeded=False):
        key = f"{packaging}{changes}"
        if key not in drafters:
            folder = tmp_path_factory.mktemp("small_drafter")
            # Rank 4 of 8: the drafter's distribution is close to the target's, and different.
            drafters[key] = write_drafter(folder, small_target, packaging, changes, rank=4)
        llm = engine(
            drafters[key],
            model=str(small_target),
            skip_tokenizer_init=True,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            speculative={"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"} | (speculative or {}),
        )
        # Enough tokens after the counted ones that whole blocks are verified at them.
        common = {"max_tokens": LENGTH + 4, "ignore_eos": True, "detokenize": False} | (params or {})
        prompts = [{"prompt_token_ids": PROMPTS[i % 2]} for i in range(2 * REQUESTS)]
        sampling = [SamplingParams(**common, seed=i if seeded else None) for i in range(2 * REQUESTS)]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        accepted = sum(sum(output.outputs[0].spec_decode_metrics.per_step_accepted) for output in outputs)
        assert accepted > REQUESTS, "almost nothing was accepted: the test would only see recovered tokens"
        counts = [Counter(), Counter()]
        for i, output in enumerate(outputs):
            counts[i % 2][tuple(output.outputs[0].token_ids[:LENGTH])] += 1
        return counts

    return run


def law(target: Path, prompt: list[int], params: dict) -> dict[tuple[int, ...], float]:
    """Probability of every continuation, by teacher forcing in float64."""
    model = LlamaForCausalLM.from_pretrained(target).double().eval()
    continuations = list(itertools.product(range(VOCAB), repeat=LENGTH))
    text = torch.cat([torch.tensor(prompt).expand(len(continuations), -1), torch.tensor(continuations)], dim=1)
    with torch.inference_mode():
        logits = model(text).logits[:, len(prompt) - 1 : -1]
    fields = {name: value for name, value in params.items() if name in ("temperature", "top_k", "top_p")}
    probs = to_distribution(logits, SamplingTensors.stack([LibrarySampling(**fields)] * len(text), "cpu"))
    joint = probs.gather(-1, torch.tensor(continuations)[..., None])[..., 0].prod(-1)
    return dict(zip(continuations, joint.tolist(), strict=True))


def p_value(counts: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square p-value, cells expecting fewer than 5 pooled; an impossible continuation makes it 0."""
    total = counts.total()
    if any(expected[text] == 0 for text in counts):
        return 0.0
    mean = np.array([expected[text] * total for text in expected])
    seen = np.array([counts[text] for text in expected])
    small = mean < 5
    mean, seen = np.append(mean[~small], mean[small].sum()), np.append(seen[~small], seen[small].sum())
    return stats.chisquare(seen[mean > 0], mean[mean > 0]).pvalue


def p_values(counts, target, params):
    return [p_value(c, law(target, prompt, params)) for c, prompt in zip(counts, PROMPTS, strict=True)]


TRUNCATED = {"temperature": 0.8, "top_k": 4, "top_p": 0.9}


@pytest.mark.parametrize(
    ("packaging", "changes", "speculative", "params", "seeded"),
    [
        pytest.param("deepspec", None, None, {"temperature": 1.0}, False, id="probabilistic"),
        pytest.param("deepspec", None, None, TRUNCATED, False, id="temperature-top-k-top-p"),
        pytest.param("deepspec", None, None, {"temperature": 1.0}, True, id="a-seed-for-every-request"),
        pytest.param("deepspec", None, {"num_speculative_tokens": 2}, {"temperature": 1.0}, False, id="two-of-four"),
        pytest.param(
            "deepspec", None, {"draft_sample_method": "greedy"}, {"temperature": 1.0}, False, id="greedy-drafts"
        ),
        pytest.param("deepspec", {"markov_head_type": "rnn"}, None, {"temperature": 1.0}, False, id="rnn-head"),
        pytest.param("speculators", None, None, {"temperature": 1.0}, False, id="reduced-vocabulary-1+N"),
        pytest.param("speculators", None, None, TRUNCATED, False, id="reduced-vocabulary-truncated"),
    ],
)
def test_continuations_follow_the_target(packaging, changes, speculative, params, seeded, drawn, small_target):
    counts = drawn(packaging, changes, speculative, params, seeded)
    assert min(p_values(counts, small_target, params)) > FALSE_ALARM_RATE / 2


def test_the_test_sees_a_wrong_q(drawn, small_target, monkeypatch):
    """The drafts are drawn from q, the verifier is told a flatter one: the text leans towards the drafter."""
    original = DSparkProposer.take_last_draft_probs

    def flattened(self):
        draft_probs = original(self)
        return None if draft_probs is None else draft_probs.sqrt() / draft_probs.sqrt().sum(-1, keepdim=True)

    monkeypatch.setattr(DSparkProposer, "take_last_draft_probs", flattened)
    counts = drawn(params={"temperature": 1.0})
    assert max(p_values(counts, small_target, {"temperature": 1.0})) < FALSE_ALARM_RATE
