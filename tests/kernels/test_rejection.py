"""The rejection kernels against the definition: forms of q, ragged batches, and what must not matter."""

from dataclasses import replace

import pytest
import torch
from rejection_cases import CASES, Case, alone, random_step, settled

from dspark.kernels import rejection
from dspark.kernels.rejection import Block, DraftLaw, Verified, Workspace, launch_verify, verify, verify_ref
from dspark.kernels.rejection_ref import BAD_TARGET, FOREIGN, UNDRAWN, raise_for_status

# The interpreter computes with numpy, which warns where a device gives inf or NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS = 1 if DEVICE == "cpu" else 10


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(rejection, "JUDGE_TILE", (64, 4))
    monkeypatch.setattr(rejection, "EMIT_TILE", (64, 4))


def run(case: Case, block: Block, law: DraftLaw, workspace: Workspace | None = None, **options) -> Verified:
    batch, k = len(block.seeds), case.num_draft_tokens
    workspace = workspace or Workspace(batch, k, case.vocab_size, DEVICE)
    return launch_verify(block, law, workspace, Verified.empty(batch, k, DEVICE), **options)


def same(got: Verified, want: Verified, rows: torch.Tensor | slice = slice(None)) -> bool:
    names = ("tokens", "num_emitted", "num_accepted", "status")
    return all(torch.equal(getattr(got, name)[rows], getattr(want, name)[rows]) for name in names)


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_reference(name):
    """Where no decision is within rounding of a tie, which is a small part of the requests."""
    case = CASES[name]
    workspace = Workspace(len(case.counts), case.num_draft_tokens, case.vocab_size, DEVICE)
    unsettled = 0
    for seed in range(REPEATS):
        block, law = random_step(case, seed, DEVICE)
        clear = settled(block, law, case.num_draft_tokens)
        want = verify_ref(block, law, case.num_draft_tokens)
        got = run(case, block, law, workspace)
        assert same(got, want, clear), (seed, got.tokens, want.tokens)
        unsettled += int((~clear).sum())
        assert not got.status.any()
        slot = torch.arange(case.num_draft_tokens + 1, device=DEVICE)
        assert torch.equal(got.tokens >= 0, slot < got.num_emitted[:, None])
    assert unsettled <= 1 + REPEATS // 5


@pytest.mark.parametrize("name", ["one-hot", "dense", "dense-stored-sum", "dense-probs", "sparse", "sparse-probs"])
def test_overlap_is_that_of_every_offered_draft_reached_or_not(name):
    case = replace(CASES[name], counts=(3, 2, 0, 3, 1), placeholders=True)
    block, law = random_step(case, 9, DEVICE)
    want = verify_ref(block, law, 3, overlap=True)
    got = run(case, block, law, overlap=True)
    torch.testing.assert_close(got.overlap, want.overlap, equal_nan=True, atol=1e-5, rtol=1e-4)
    assert same(got, run(case, block, law))
    assert got.overlap.isnan().sum(-1).tolist() == [2, 1, 3, 2, 2]
