"""The rejection kernels against the definition: forms of q, ragged batches, and what must not matter."""

from dataclasses import replace

import pytest
import torch
from rejection_cases import CASES, Case, alone, random_step, settled
from triton.runtime import interpreter

from dspark.kernels import rejection
from dspark.kernels.rejection import Block, DraftLaw, Verified, Workspace, launch_verify, verify, verify_ref
from dspark.kernels.rejection_ref import BAD_TARGET, FOREIGN, UNDRAWN, raise_for_status

# The interpreter computes with numpy, which warns where a device gives inf or NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS = 1 if DEVICE == "cpu" else 10


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(rejection, "JUDGE_TILE", rejection.Tile(64, 4))
    monkeypatch.setattr(rejection, "EMIT_TILE", rejection.Tile(128, 4))


def run(case: Case, block: Block, law: DraftLaw, workspace: Workspace | None = None, **options) -> Verified:
    batch, k = len(block.row_starts) - 1, case.num_draft_tokens
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
    case = replace(CASES[name], counts=(3, 0, 2), placeholders=True, vocab_size=90)
    block, law = random_step(case, 9, DEVICE)
    want = verify_ref(block, law, 3, overlap=True)
    got = run(case, block, law, overlap=True)
    torch.testing.assert_close(got.overlap, want.overlap, equal_nan=True, atol=1e-5, rtol=1e-4)
    assert same(got, run(case, block, law))
    assert got.overlap.isnan().sum(-1).tolist() == [2, 3, 1]


# What must not matter


@pytest.mark.parametrize("name", ["dense", "sparse", "one-hot"])
def test_a_request_does_not_depend_on_its_batch(name):
    """Bit for bit: the same blocks of the vocabulary, whoever else is there."""
    case = replace(CASES[name], counts=(3, 1, 0), temperatures=(1.0, 0.0, 0.5))
    block, law = random_step(case, 3, DEVICE)
    together = run(case, block, law, overlap=True)
    for request in range(3):
        single = run(replace(case, counts=(3,)), *alone(block, law, request), overlap=True)
        assert same(single, Verified(*(x[request : request + 1] for x in vars(together).values())))
        assert torch.equal(single.overlap.nan_to_num(), together.overlap[request : request + 1].nan_to_num())


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_how_many_tiles_a_thread_block_takes_does_not_matter(name, monkeypatch):
    """Bit for bit: the number depends on the size of the batch, which a request must not feel."""
    case = replace(CASES[name], counts=(2, 1), vocab_size=300)
    block, law = random_step(case, 7, DEVICE)
    usual = run(case, block, law, overlap=True)
    for tiles in (2, 3, 8):
        for plan in ("JUDGE_EACH", "EMIT_EACH"):
            monkeypatch.setattr(rejection, plan, ((0, tiles),))
        got = run(case, block, law, overlap=True)
        assert same(got, usual)
        assert torch.equal(got.overlap.nan_to_num(), usual.overlap.nan_to_num())


def test_a_workspace_is_left_as_it_was_found_by_calls_of_any_size():
    workspace = Workspace(5, 4, 200, DEVICE)
    for name in ("dense", "one-hot", "eight-drafts", "all-greedy", "sparse"):
        case = replace(CASES[name], counts=CASES[name].counts[:2])
        case = replace(case, counts=tuple(min(n, 4) for n in case.counts))
        block, law = random_step(case, 1, DEVICE)
        assert same(run(case, block, law, workspace), run(case, block, law))
        assert (workspace.first == rejection.NO_REJECTION).all()
        assert not workspace.judge_arrived.any()
        assert not workspace.emit_arrived.any()


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter lets a test choose the order of thread blocks")
@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_thread_blocks_may_run_in_any_order(name, monkeypatch):
    """Backwards, the last slots are read although an earlier draft is rejected, and nothing else changes."""
    case = replace(CASES[name], counts=(3, 3))
    block, law = random_step(case, 5, DEVICE)
    forward = run(case, block, law)
    assert forward.num_accepted.min() < 3
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda *at: set_index(*(n - 1 - i for n, i in zip(builder.grid_dim, at, strict=True)))
    )
    assert same(run(case, block, law), forward)


def test_rows_after_the_first_rejection_and_logits_past_the_vocabulary_are_not_read():
    """NaN in rows that no decision needs, in the padding of wide rows, and in slots of the cache without a request."""
    case = Case((3, 3, 3, 3), temperatures=(1.0, 0.0))
    block, law = random_step(case, 8, DEVICE)
    want = run(case, block, law)
    assert want.num_accepted.min() < 2
    wide = torch.full((len(block.logits), 160), torch.nan, device=DEVICE)
    wide[:, :150] = block.logits
    values = torch.full((*law.values.shape[:2], 176), torch.nan, device=DEVICE)
    values[..., :150] = law.values
    for request, accepted in enumerate(want.num_accepted.tolist()):
        wide[int(block.row_starts[request]) + accepted + 1 : int(block.row_starts[request + 1])] = torch.nan
        values[law.slots[request], accepted + 1 :] = torch.nan
    cut = replace(block, logits=wide[:, :150])
    got = run(case, cut, replace(law, values=values[..., :150]))
    assert same(got, want)
    assert not got.status.any()


def test_request_state_by_slot_integer_widths_and_a_temperature_of_the_drafts():
    """Target logits divided by the temperature beforehand, as vLLM hands them over, with the draft's undivided."""
    case = Case((3, 2, 3), temperatures=(0.5, 0.0, 1.5))
    block, law = random_step(case, 2, DEVICE)
    want = verify_ref(block, law, 3)
    slots = torch.tensor([4, 0, 2], device=DEVICE)
    heat = block.temperature.masked_fill(block.temperature == 0, 1.0)
    rows = heat.repeat_interleave(block.row_starts.diff())
    by_slot = [
        torch.zeros(5, dtype=x.dtype, device=DEVICE) for x in (block.temperature, block.seeds, block.temperature)
    ]
    for state, values in zip(by_slot, (block.temperature > 0, block.seeds, block.temperature), strict=True):
        state[slots] = values.to(state.dtype)
    divided = replace(
        block,
        logits=block.logits / rows[:, None],
        tokens=block.tokens.int(),
        row_starts=block.row_starts.long(),
        temperature=by_slot[0],
        seeds=by_slot[1],
        slots=slots,
    )
    drafts = replace(law, temperature=by_slot[2], slots=law.slots.long())
    assert settled(block, law, 3).all()
    assert same(verify_ref(divided, drafts, 3), want)
    assert same(run(case, divided, drafts), want)


# Corner cases


def test_slices_of_one_entry_are_contiguous_whatever_their_stride():
    case = Case((1,), vocab_size=40, form="sparse", num_listed=1)
    block, law = random_step(case, 0, DEVICE)
    strided = {name: torch.stack([getattr(block, name)] * 3, 1)[:, 0] for name in ("seeds", "temperature")}
    wide = replace(law, **{name: torch.cat([getattr(law, name)] * 3, -1)[..., :1] for name in ("values", "ids")})
    got = verify(replace(block, **strided), wide, 1)
    assert torch.equal(got.tokens, verify_ref(block, law, 1).tokens)


def test_without_drafts_every_request_takes_a_plain_step():
    case = Case((0, 0), temperatures=(1.0, 0.0))
    block, law = random_step(case, 0, DEVICE)
    got = run(case, block, law, overlap=True)
    assert same(got, verify_ref(block, law, 0))
    assert got.overlap.shape == (2, 0)


def test_where_nothing_of_p_exceeds_q_the_replacement_comes_from_p():
    """q of mass 1.5, 1.5 times p: a third of the drafts is rejected, and no residual is left."""
    case = Case((1,) * 24, vocab_size=40, probs=True, temperatures=(1.0,))
    block, law = random_step(case, 4, DEVICE)
    first = block.logits[block.row_starts[:-1].long()]
    law = replace(law, values=law.values.index_put((law.slots.long(),), 1.5 * first.softmax(-1)[:, None]))
    want, got = verify_ref(block, law, 1), run(case, block, law)
    assert 2 <= int((got.num_accepted == 0).sum()) <= 20
    assert same(got, want)


def test_the_largest_position_and_seeds_of_either_sign():
    case = Case((2,) * 3, vocab_size=90)
    block, law = random_step(case, 0, DEVICE)
    last = torch.full_like(block.positions, 2**32 - 1)
    block = replace(block, positions=last, seeds=torch.tensor([-1, 2**63 - 1, -(2**63)], device=DEVICE))
    assert same(run(case, block, law), verify_ref(block, law, 2))


def test_ties_of_the_largest_logit_go_to_the_lowest_id_in_whatever_block():
    block, law = random_step(Case((2, 2), form="one-hot", temperatures=(0.0,)), 0, DEVICE)
    logits = block.logits.clone()
    logits[:, [140, 70, 71]] = 50.0
    tokens = torch.tensor([-1, 70, 71, -1, 71, 70], device=DEVICE)
    got = run(Case((2, 2)), replace(block, logits=logits, tokens=tokens), law)
    assert got.tokens.tolist() == [[70, 70, -1], [70, -1, -1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_unusable_target_rows_are_reported_and_give_ids_of_the_vocabulary(bad, temperature):
    """Row 0 of request 0 and the bonus row of request 1, which has no drafts; request 2 is well."""
    case = Case((2, 0, 2), vocab_size=90, temperatures=(temperature,))
    block, law = random_step(case, 6, DEVICE)
    logits = block.logits.clone()
    for row in (0, int(block.row_starts[1])):
        logits[row] = float("-inf")
        logits[row, 66] = bad
    block = replace(block, logits=logits)
    got = run(case, block, law)
    assert got.status.tolist() == [BAD_TARGET, BAD_TARGET, 0]
    assert ((got.tokens >= -1) & (got.tokens < 90)).all()
    assert torch.equal(got.status, verify_ref(block, law, 2).status)
    with pytest.raises(ValueError, match=r"request 0 \(2 of 3\): a row of target logits holds NaN or \+inf"):
        raise_for_status(got.status)


def test_drafts_that_q_cannot_give_and_ids_outside_the_vocabulary_are_reported():
    case = Case((2, 2, 2), vocab_size=90, draft_cut=True, cut=0.5, temperatures=(1.0,))
    block, law = random_step(case, 6, DEVICE)
    tokens = block.tokens.clone()
    tokens[1] = int((law.values[law.slots[0], 0] == -torch.inf).nonzero()[0, 0])
    tokens[4] = 90
    got = run(case, replace(block, tokens=tokens), law)
    assert got.status.tolist() == [UNDRAWN, FOREIGN, 0]
    assert same(got, verify_ref(replace(block, tokens=tokens), law, 2))
    assert got.num_accepted[1] == 0
    with pytest.raises(AssertionError, match=r"request 0 \(1 of 3\): an offered draft has q = 0"):
        raise_for_status(got.status)
    with pytest.raises(ValueError, match="outside the target's vocabulary"):
        raise_for_status(got.status[1:])


BLOCK, LAW = random_step(Case((2, 2)), 0)


@pytest.mark.parametrize(
    ("block", "law", "message"),
    [
        pytest.param({"positions": BLOCK.positions[1:]}, {}, r"positions: expected contiguous int64 \[6\]", id="rows"),
        pytest.param({"tokens": BLOCK.tokens.float()}, {}, "tokens: expected contiguous int32 or int64", id="dtype"),
        pytest.param({"seeds": BLOCK.seeds[:1]}, {}, r"seeds: expected contiguous int64 \[2\]", id="seeds"),
        pytest.param({"logits": BLOCK.logits.double()}, {}, "logits: expected 2 dimensions", id="float64"),
        pytest.param({"logits": BLOCK.logits.T.contiguous().T}, {}, "the last contiguous", id="strides"),
        pytest.param({}, {"values": LAW.values[..., 1:]}, "values .* cover 149 tokens, the target 150", id="width"),
        pytest.param({}, {"values": LAW.values[:, :1]}, "1 positions a request, fewer than the 2 drafts", id="short"),
        pytest.param({}, {"values": None, "ids": LAW.slots}, "ids or logsumexp without values", id="ids-alone"),
        pytest.param({}, {"ids": LAW.values.long()[..., 1:]}, "ids: expected int32 or int64", id="ids"),
        pytest.param({}, {"probs": True, "logsumexp": LAW.values[..., 0]}, "needs none", id="stored-probs"),
        pytest.param({}, {"logsumexp": LAW.values[:, :1, 0]}, r"logsumexp: expected float32 \[3, 2\]", id="stored"),
        pytest.param({}, {"slots": LAW.slots[:1]}, "slots of the drafts: expected", id="slots"),
    ],
)
def test_what_a_kernel_would_misread_is_refused(block, law, message):
    with pytest.raises(ValueError, match=message):
        verify(replace(BLOCK, **block), replace(LAW, **law), 2)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_step_follows_its_inputs():
    case = Case((3, 3, 2), vocab_size=5000, noise=0.4)
    steps = [random_step(case, seed, DEVICE) for seed in range(4)]
    block, law = steps[0]
    workspace, out = Workspace(3, 3, 5000, DEVICE), Verified.empty(3, 3, DEVICE)
    verify(block, law, 3, workspace=workspace, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify(block, law, 3, workspace=workspace, out=out)
    for other, other_law in (*steps[1:], steps[1]):
        for into, of in ((block, other), (law, other_law)):
            for name, value in vars(into).items():
                if isinstance(value, torch.Tensor):
                    value.copy_(getattr(of, name))
        graph.replay()
        assert same(out, verify(other, other_law, 3))
