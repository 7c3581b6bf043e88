"""At temperature 0 in float32 a DSpark engine emits what the same vLLM emits without speculation, token for token.

And it does so by the library's drafts: each block is the one that `dspark.generate` drafts with the same checkpoint and
the same target in transformers, and each request accepts as many of them, step by step.
"""

from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaForCausalLM
from vllm import SamplingParams

from dspark import Drafter, HFTarget, generate, load_drafter
from dspark import SamplingParams as LibrarySampling
from dspark.vllm.v1 import DSparkProposer

# Mixed lengths, within and across blocks of the cache.
PROMPTS = [[5 + i, 20, 30 + i] * (1 + 3 * i) for i in range(7)]
NUM_TOKENS = 40
SLIDING = ["sliding_attention", "sliding_attention"]


def emitted(llm, prompts=PROMPTS, **params):
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | params)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def library(target):
    model = HFTarget(LlamaForCausalLM.from_pretrained(target).eval())

    def run(drafter, num_draft_tokens, prompts=PROMPTS):
        params = LibrarySampling(temperature=0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
        loaded = load_drafter(drafter, target=model, dtype=torch.float32)
        return generate(model, loaded, prompts, params, num_draft_tokens=num_draft_tokens)

    return run


@contextmanager
def recorded(proposer_class, blocks):
    """Append the first request's drafts of every `propose` call to `blocks`."""
    original = proposer_class.propose

    def propose(*args, **kwargs):
        result = original(*args, **kwargs)
        blocks.append((result if torch.is_tensor(result) else result.tokens)[0].tolist())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposer_class, "propose", propose)
        yield


CASES = [
    pytest.param("deepspec", {}, 4, "greedy", id="anchor-first"),
    pytest.param("deepspec", {}, 4, "probabilistic", id="anchor-first-probabilistic"),
    pytest.param("deepspec", {}, 1, "greedy", id="one-draft-of-a-block-of-four"),
    pytest.param("deepspec", {}, 3, "greedy", id="three-drafts-of-a-block-of-four"),
    pytest.param("deepspec", {"sample_from_anchor": False}, 3, "greedy", id="1+N"),
    pytest.param("deepspec", {"markov_head_type": "gated"}, 4, "greedy", id="gated-head"),
    pytest.param("deepspec", {"markov_head_type": "rnn"}, 4, "greedy", id="rnn-head"),
    pytest.param(
        "deepspec", {"markov_rank": 0, "confidence_head_with_markov": False}, 4, "greedy", id="without-markov-head"
    ),
    pytest.param("deepspec", {"layer_types": SLIDING, "sliding_window": 5}, 4, "greedy", id="windows-causal-block"),
    pytest.param("speculators", {}, 4, "greedy", id="reduced-vocabulary-1+N-mixed-layers"),
    pytest.param("speculators", {}, 4, "probabilistic", id="reduced-vocabulary-probabilistic"),
    pytest.param("speculators", {"sliding_window_non_causal": True}, 2, "greedy", id="windows-bidirectional-block"),
]


@pytest.mark.parametrize(("packaging", "changes", "num_drafts", "drafting"), CASES)
def test_greedy_output_and_accepted_drafts(packaging, changes, num_drafts, drafting, engine, drafter, library):
    path = drafter(packaging, **changes)
    speculative = {"num_speculative_tokens": num_drafts, "draft_sample_method": drafting}
    outputs = emitted(engine(path, speculative=speculative))
    assert tokens(outputs) == tokens(emitted(engine()))

    expected = library(path, num_drafts)
    assert tokens(outputs) == [generation.token_ids for generation in expected]
    for output, generation in zip(outputs, expected, strict=True):
        steps = output.outputs[0].spec_decode_metrics.per_step_accepted
        # The last step is cut at the length limit by the library, and counted whole by vLLM.
        assert steps[:-1] == [step.num_accepted for step in generation.steps][:-1]
        assert len(steps) == len(generation.steps)
    accepted = sum(step.num_accepted for generation in expected for step in generation.steps)
    assert accepted > 0 or changes.get("markov_rank") == 0, "no draft was accepted: a wrong one would not be seen"


@pytest.mark.parametrize(("packaging", "changes", "num_drafts", "drafting"), CASES)
def test_drafts_are_the_librarys(packaging, changes, num_drafts, drafting, engine, drafter, library):
    path = drafter(packaging, **changes)
    llm = engine(path, speculative={"num_speculative_tokens": num_drafts, "draft_sample_method": drafting})
    served, expected = [], []

    with recorded(DSparkProposer, served):
        emitted(llm, [PROMPTS[4]])
    with recorded(Drafter, expected):
        library(path, num_drafts, [PROMPTS[4]])
    assert len(expected) > 5
    for block, drafted in zip(served, expected, strict=False):  # vLLM drafts once more, after the last token
        assert block[: len(drafted)] == drafted  # near the length limit the library drafts fewer


def test_compiled_target(engine, drafter, library):
    """vLLM's default. Without a Markov head the drafts depend on every tap, the embedding included."""
    path = drafter(markov_rank=0, confidence_head_with_markov=False)
    llm, served, expected = engine(path, enforce_eager=False), [], []
    with recorded(DSparkProposer, served):
        outputs = emitted(llm, [PROMPTS[4]])
    with recorded(Drafter, expected):
        generations = library(path, 4, [PROMPTS[4]])
    assert tokens(outputs) == [generation.token_ids for generation in generations]
    assert [b[: len(d)] for b, d in zip(served, expected, strict=False)] == expected
