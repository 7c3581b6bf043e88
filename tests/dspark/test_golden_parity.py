"""The drafter against outputs of the trainers' own code: several rounds with partial acceptance, every head kind,
both packagings and layouts.

`tests/golden/<case>` holds tiny random checkpoints with inputs and float64 outputs recorded from DeepSpec and
speculators (tests/golden/README.md).
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dspark
from dspark.sampling import SamplingParams, SamplingTensors, Streams

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    pytest.param("A1", id="deepspec-vanilla"),
    pytest.param("A2", id="deepspec-gated"),
    pytest.param("A3", id="deepspec-rnn"),
    pytest.param("A0", id="deepspec-rank-0"),
    pytest.param("B1", id="speculators-1pN-reduced-vocabulary-sliding"),
    pytest.param("B2", id="speculators-anchor-first"),
]
# float64: both sides round each operation, and logits reach 13. float32: the trainers' own runs differ by up to 1e-5.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}


def load(case: str, dtype: torch.dtype) -> tuple[dspark.Drafter, dict[str, torch.Tensor]]:
    drafter = dspark.load_drafter(GOLDEN / case, dtype=dtype)
    return drafter, load_file(GOLDEN / case / "golden.safetensors")


def rounds(drafter, golden, dtype):
    """Feed the context of each recorded round; yields (round, cache) with the cache at the round's start."""
    ids = list(drafter.config.tap_ids)
    taps = golden["in.hidden_states"].to(dtype)[ids].permute(1, 0, 2).flatten(1)[None]
    verify = golden["in.verify_hidden_states"].to(dtype)[:, ids].permute(0, 2, 1, 3).flatten(2)
    cache = drafter.new_cache(1)
    prompt_len = int(golden["in.prompt_len"])
    drafter.extend(cache, taps[:, :prompt_len], [prompt_len])
    for r in range(len(golden["in.start"])):
        if r:
            drafter.extend(cache, verify[r - 1][None], [int(golden["in.accepted"][r - 1]) + 1])
        assert cache.lengths.tolist() == [int(golden["in.start"][r])]
        yield r, cache


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_context_block_chain_and_confidence_equal_the_trainer(case, dtype):
    drafter, golden = load(case, dtype)
    close = {"rtol": 0, "atol": TOLERANCE[dtype], "check_dtype": False}
    taps = golden["in.hidden_states"].to(dtype)[list(drafter.config.tap_ids)].permute(1, 0, 2).flatten(1)
    torch.testing.assert_close(drafter.context_features(taps), golden["out.context"], **close)
    first, num_drafts = drafter.config.first_draft_row, drafter.config.max_draft_tokens
    for r, cache in rounds(drafter, golden, dtype):
        anchors = golden["in.anchor"][r][None]
        hidden = drafter.block_hidden(cache, anchors)
        torch.testing.assert_close(hidden[0], golden["out.hidden"][r], **close)
        torch.testing.assert_close(drafter.base_logits(hidden)[0], golden["out.base_logits"][r], **close)
        ids, logits, tokens = drafter.draft_ids(), [], []

        def greedy(_, corrected, ids=ids, logits=logits, tokens=tokens):
            logits.append(corrected)
            best = corrected.argmax(-1)
            tokens.append(best if ids is None else ids[best])
            return tokens[-1]

        confidence = drafter.chain(hidden, anchors, num_drafts, greedy)
        torch.testing.assert_close(torch.stack(logits, 1)[0], golden["out.logits"][r][first:], **close)
        torch.testing.assert_close(confidence[0], golden["out.confidence"][r][first:], **close)
        assert torch.stack(tokens, 1)[0].tolist() == golden["out.draft_tokens"][r].tolist()


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, None])
@pytest.mark.parametrize("case", CASES)
def test_greedy_proposals_equal_the_trainer_for_every_k(case, num_draft_tokens):
    drafter, golden = load(case, torch.float64)
    num_draft_tokens = num_draft_tokens or drafter.config.max_draft_tokens
    sampling = SamplingTensors.stack([SamplingParams(temperature=0)], "cpu")
    streams = Streams.for_params([SamplingParams(seed=0)], "cpu")
    for r, cache in rounds(drafter, golden, torch.float64):
        draft = drafter.propose(cache, golden["in.anchor"][r][None], sampling, streams, num_draft_tokens)
        assert draft.tokens[0].tolist() == golden["out.draft_tokens"][r][:num_draft_tokens].tolist()


@pytest.mark.parametrize("case", CASES)
def test_batched_rounds_of_different_lengths_equal_single_ones(case):
    """Two requests at different rounds of the same recording, in one batch with the shorter one's slots padded."""
    drafter, golden = load(case, torch.float64)
    ids = list(drafter.config.tap_ids)
    taps = golden["in.hidden_states"].double()[ids].permute(1, 0, 2).flatten(1)
    starts = golden["in.start"][[3, 0]].tolist()
    padded = torch.full((2, max(starts), taps.shape[-1]), float("nan"), dtype=torch.float64)
    for row, start in enumerate(starts):
        padded[row, :start] = taps[:start]
    cache = drafter.new_cache(2)
    drafter.extend(cache, padded, starts)
    hidden = drafter.block_hidden(cache, golden["in.anchor"][[3, 0]])
    torch.testing.assert_close(hidden, golden["out.hidden"][[3, 0]], rtol=0, atol=1e-10)
