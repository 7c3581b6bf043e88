"""The law that the rejection kernels emit, their random numbers, and wrong rules that these tests must notice."""

import math

import pytest
import torch
from exact_law import one_step_law
from rejection_cases import CASES, Case, random_step, settled
from scipy import stats

from dspark.kernels import rejection, rejection_device, rejection_emit, rejection_judge, tl, triton
from dspark.kernels.rejection import Block, DraftLaw, Verified, Workspace, launch_verify, verify_ref
from dspark.kernels.rejection_ref import acceptance_ref, noise_ref
from dspark.sampling import (
    DenseProposal,
    OneHotProposal,
    Proposal,
    Purpose,
    SamplingParams,
    SamplingTensors,
    SparseProposal,
    Streams,
    rejection_sample,
    to_distribution,
    verify_logits,
)
from dspark.sampling.rejection import kernel_inputs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Chance that a correct kernel fails one of the chi-square tests below; their seeds are fixed.
FALSE_ALARM = 1e-5
DRAWS = 30 if DEVICE == "cpu" else 200_000  # a draft


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    # On a GPU those of test_rejection.py, which are then compiled already.
    judge, emit = ((16, 1), (16, 1)) if DEVICE == "cpu" else ((64, 4), (128, 4))
    monkeypatch.setattr(rejection, "JUDGE_TILE", rejection.Tile(*judge))
    monkeypatch.setattr(rejection, "EMIT_TILE", rejection.Tile(*emit))


def run(block: Block, law: DraftLaw, num_draft_tokens: int) -> Verified:
    batch = len(block.row_starts) - 1
    workspace = Workspace(batch, num_draft_tokens, block.logits.shape[1], DEVICE)
    return launch_verify(block, law, workspace, Verified.empty(batch, num_draft_tokens, DEVICE))


# Random numbers


def test_purposes_are_those_of_the_streams():
    ours = (rejection_device.ACCEPT, rejection_device.RECOVERY, rejection_device.TARGET)
    assert ours == (Purpose.ACCEPT, Purpose.RECOVERY, Purpose.TARGET)


def test_reference_noise_is_that_of_the_streams():
    seeds = torch.tensor([3, -5, 2**62])
    streams, positions = Streams(seeds), torch.tensor([[0, 9], [2**31, 5], [2**32 - 1, 7]])
    assert torch.equal(acceptance_ref(seeds, positions), streams.uniform(positions, Purpose.ACCEPT))
    for purpose in (Purpose.RECOVERY, Purpose.TARGET):
        theirs = streams.exponential(positions[:, :1], purpose, 500)[:, 0]
        torch.testing.assert_close(noise_ref(seeds, positions[:, 0], purpose, 500).float(), theirs, rtol=3e-7, atol=0)


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, position_ptr, part, purpose, BLOCK: tl.constexpr):
    noise = rejection_device.token_noise(
        part, tl.load(seed_ptr), tl.load(position_ptr), purpose + tl.zeros((), tl.int32), BLOCK
    )
    tl.store(out_ptr + rejection_device.columns_of(0, BLOCK), noise)


@pytest.mark.parametrize("part", [0, 1])
def test_device_noise_is_that_of_the_streams(part):
    """To the 1e-6 that the device function promises, and some for its own rounding."""
    seed, position = torch.tensor([-77], device=DEVICE), torch.tensor([2**32 - 3], device=DEVICE)
    for purpose in (Purpose.RECOVERY, Purpose.TARGET):
        out = torch.empty(8192, device=DEVICE)
        _noise_kernel[(1,)](out, seed, position, part, int(purpose), BLOCK=8192)
        want = noise_ref(seed, position, purpose, (part + 1) * 8192)[0, part * 8192 :]
        torch.testing.assert_close(out.double() * math.log(2), want, rtol=1.3e-6, atol=0)


# Law


# A draft that is mostly rejected and one that is always kept; residuals leave some tokens impossible.
P = torch.tensor([0.10, 0.35, 0.10, 0.25, 0.10, 0.10])
Q = torch.tensor([0.55, 0.05, 0.15, 0.05, 0.05, 0.15])
LISTED = torch.tensor([5, 0, 1])
DRAFTS = torch.tensor([0, 1])


def one_position(form: str) -> tuple[Block, DraftLaw, Proposal, torch.Tensor]:
    """Two drafts, DRAWS times each with seeds of their own; one draft a request, vocabulary 6, temperature 0.8."""
    temperature, batch = 0.8, 2 * DRAWS
    target, draft = temperature * torch.stack([P, P.flip(0)]).log(), temperature * Q.log()
    slots = torch.zeros(batch, dtype=torch.int32)
    law, proposal = DraftLaw(), OneHotProposal(DRAFTS[:, None])
    if form == "dense":
        proposal = DenseProposal(DRAFTS[:, None], Q.expand(2, 1, 6))
        law = DraftLaw(draft[None, None], slots=slots)
    elif form == "sparse":
        of_list = Q[LISTED] / Q[LISTED].sum()
        proposal = SparseProposal(DRAFTS[:, None], LISTED.expand(2, 1, 3), of_list.expand(2, 1, 3))
        law = DraftLaw(draft[None, None, LISTED], LISTED[None, None], slots)
    tokens = torch.stack([torch.full((batch,), -1), DRAFTS.repeat_interleave(DRAWS)], 1).flatten()
    block = Block(
        target.repeat(batch, 1),
        tokens,
        torch.arange(batch + 1, dtype=torch.int32) * 2,
        torch.arange(2).repeat(batch) + 40,
        torch.full((batch,), temperature),
        torch.arange(batch),
    )
    return block, law, proposal, torch.stack([P, P.flip(0)])


def to_device(inputs):
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in vars(inputs).items()}
    return type(inputs)(**moved)


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square of counts [n] against probabilities [n]; 0 if an impossible token came out."""
    if counts[law == 0].any():
        return 0.0
    kept = law > 0
    expected = law[kept].double() / law[kept].double().sum() * counts.sum()
    return float(stats.chisquare(counts[kept].numpy(), expected.numpy()).pvalue) if kept.sum() > 1 else 1.0


def emitted_p_values(form: str) -> list[float]:
    """First emitted token against the enumerated law of each draft; the token after an accepted one against p."""
    block, law, proposal, p = one_position(form)
    out = run(to_device(block), to_device(law), 1)
    tokens = out.tokens.view(2, DRAWS, 2).cpu()
    laws = one_step_law(proposal, p[None, :1].expand(2, 1, 6))
    values = [
        p_value(drawn[:, 0].bincount(minlength=6), expected) for drawn, expected in zip(tokens, laws, strict=True)
    ]
    after = tokens[..., 1][tokens[..., 1] >= 0]
    return [*values, p_value(after.bincount(minlength=6), p[1])]


@pytest.mark.parametrize("form", ["dense", "sparse", "one-hot"])
def test_emitted_tokens_follow_the_enumerated_law_of_each_draft(form):
    """Three laws, each of which rejects a correct kernel with a third of FALSE_ALARM."""
    assert min(emitted_p_values(form)) > FALSE_ALARM / 3


# Wrong rules


def with_constants(kernel, **wrong):
    """The kernel, compiled for something else than the host asked for."""

    class Patched:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: kernel[grid](*args, **(kwargs | wrong))

    return Patched()


def one_hot_residual(monkeypatch):
    """Accept with the full q, recover as if it were one-hot."""
    monkeypatch.setattr(rejection, "emit_kernel", with_constants(rejection.emit_kernel, HAS_Q=False, DENSE=False))


def one_hot_acceptance(monkeypatch):
    """Accept with probability p, recover from p - q."""
    monkeypatch.setattr(rejection, "judge_kernel", with_constants(rejection.judge_kernel, HAS_Q=False, DENSE=False))


def recovery_from_the_target(monkeypatch):
    """A rejected draft is replaced by a draw from p."""
    monkeypatch.setattr(rejection_emit, "less_dense", rejection_emit_plain)


@triton.jit
def rejection_emit_plain(weight, value, scale, peak, inverse, PROBS: tl.constexpr):
    return weight


def test_a_wrong_law_is_noticed(monkeypatch):
    one_hot_residual(monkeypatch)
    assert min(emitted_p_values("dense")) < 1e-7


def swapped_purposes(monkeypatch):
    monkeypatch.setattr(rejection_emit, "_RECOVERY", tl.constexpr(rejection_device.TARGET))
    monkeypatch.setattr(rejection_emit, "_TARGET", tl.constexpr(rejection_device.RECOVERY))


def acceptance_with_the_noise_of_another_purpose(monkeypatch):
    monkeypatch.setattr(rejection_device, "_ACCEPT", tl.constexpr(rejection_device.RECOVERY))


def no_temperature(monkeypatch):
    monkeypatch.setattr(rejection_judge, "exponent_scale", unit_scale)


@triton.jit
def unit_scale(temperature):
    return temperature * 0.0 + 1.4426950408889634


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels do not follow a patch of what they call")
@pytest.mark.parametrize(
    "plant",
    [
        one_hot_acceptance,
        recovery_from_the_target,
        swapped_purposes,
        acceptance_with_the_noise_of_another_purpose,
        no_temperature,
    ],
)
def test_a_wrong_rule_or_stream_is_noticed_by_comparison_with_the_reference(plant, monkeypatch):
    plant(monkeypatch)
    assert not agrees_with_the_reference()


def test_the_right_rule_passes_that_comparison():
    assert agrees_with_the_reference()


def agrees_with_the_reference() -> bool:
    block, law = random_step(Case((1,) * 12, vocab_size=16, temperatures=(0.4,), noise=2.0), 0, DEVICE)
    clear = settled(block, law, 1)
    return torch.equal(run(block, law, 1).tokens[clear], verify_ref(block, law, 1).tokens[clear])


# Against dspark.sampling


def proposal_of(block: Block, law: DraftLaw, case: Case) -> tuple[Proposal, torch.Tensor, SamplingTensors, Streams]:
    """The arguments of `rejection_sample` for a step whose requests all have K drafts."""
    batch, k = len(block.seeds), case.num_draft_tokens
    drafts = block.tokens.view(batch, k + 1)[:, 1:]
    params = SamplingTensors.stack([SamplingParams(t) for t in block.temperature.tolist()], DEVICE)
    logits = block.logits.view(batch, k + 1, -1)
    if law.values is None:
        return OneHotProposal(drafts), logits, params, Streams(block.seeds)
    slots = law.slots.long()
    q = to_distribution(law.values[slots], params)
    if law.ids is None:
        return DenseProposal(drafts, q), logits, params, Streams(block.seeds)
    return SparseProposal(drafts, law.ids[slots].long(), q), logits, params, Streams(block.seeds)


@pytest.mark.parametrize("form", ["one-hot", "dense", "sparse"])
def test_the_reference_emits_what_rejection_sample_does(form):
    # With a q of logits a greedy request has a one-hot q, at the drafter's own choice.
    case = Case((3,) * 40, vocab_size=90, form=form, temperatures=(1.0, 0.0) if form == "one-hot" else (1.0, 0.4))
    block, law = random_step(case, 1, DEVICE)
    proposal, logits, params, streams = proposal_of(block, law, case)
    positions = torch.arange(40, device=DEVICE) * 9
    offered = torch.arange(40, device=DEVICE) % 4
    want = rejection_sample(proposal, to_distribution(logits, params), streams, positions, offered)
    inputs = kernel_inputs(proposal, logits, params, streams, positions, offered)
    clear = settled(*inputs, 3)
    assert clear.sum() >= 38
    got = verify_ref(*inputs, 3, overlap=True)
    assert torch.equal(got.tokens[clear], want.tokens[clear])
    assert torch.equal(got.num_accepted[clear].long(), want.num_accepted[clear])
    torch.testing.assert_close(got.overlap, want.accept_probs, equal_nan=True, atol=1e-6, rtol=1e-5)
    by_logits = verify_logits(proposal, logits, params, streams, positions, offered)
    assert torch.equal(by_logits.tokens[clear], want.tokens[clear])
    assert torch.equal(by_logits.num_emitted, by_logits.num_accepted + 1)


def test_truncation_is_applied_before_the_kernels_on_a_gpu():
    case = Case((2,) * 20, vocab_size=90, temperatures=(1.0,))
    block, law = random_step(case, 2, DEVICE)
    proposal, logits, _, streams = proposal_of(block, law, case)
    kinds = [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {}]
    params = SamplingTensors.stack([SamplingParams(0.8, **kinds[b % 4]) for b in range(20)], DEVICE)
    positions = torch.arange(20, device=DEVICE)
    probs = to_distribution(logits, params)
    want = rejection_sample(proposal, probs, streams, positions)
    got = verify_logits(proposal, logits, params, streams, positions)
    clear = settled(*kernel_inputs(proposal, logits.masked_fill(probs == 0, -torch.inf), params, streams, positions), 2)
    assert clear.sum() >= 18
    assert torch.equal(got.tokens[clear], want.tokens[clear])


def test_a_long_list_of_ids_is_spread_over_the_vocabulary():
    generator = torch.Generator(DEVICE).manual_seed(1)
    ids = torch.randperm(3000, generator=generator, device=DEVICE)[:1500].expand(2, 1, 1500)
    q = torch.rand(2, 1, 1500, generator=generator, device=DEVICE).softmax(-1)
    proposal = SparseProposal(ids[..., 0].clone(), ids, q)
    logits = torch.zeros(2, 2, 3000, device=DEVICE)
    params, streams = SamplingTensors.stack([SamplingParams()] * 2, DEVICE), Streams(torch.arange(2, device=DEVICE))
    _, law = kernel_inputs(proposal, logits, params, streams, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert law.ids is None
    assert torch.equal(law.values, proposal.dense(3000))


def test_logits_of_another_shape_are_refused():
    proposal = OneHotProposal(torch.tensor([[1]]))
    params, streams = SamplingTensors.stack([SamplingParams()]), Streams(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"logits must be \[1, 2, V\], .*got \(1, 1, 4\)"):
        kernel_inputs(proposal, torch.zeros(1, 1, 4), params, streams, torch.tensor([0]))


def test_the_case_table_covers_every_form():
    """The comparison with the reference is only as good as its cases."""
    seen = {(case.form, case.probs, case.stored, case.dtype) for case in CASES.values()}
    assert {form for form, *_ in seen} == {"one-hot", "dense", "sparse"}
    assert ("dense", False, True, torch.bfloat16) in seen
