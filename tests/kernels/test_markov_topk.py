"""The Markov chain over candidates: exact selection, and a sparse proposal that is what the tokens were drawn from."""

from dataclasses import replace

import pytest
import torch
from markov_cases import BF16, TIE, Case, Inputs, forced_logits, make

from dspark.kernels.markov_candidates import (
    CandidatesWorkspace,
    Selection,
    SparseOutput,
    bias_lists,
    candidates_chain,
    candidates_chain_ref,
    candidates_ref,
    select_candidates,
)
from dspark.sampling import Purpose, SamplingParams, SamplingTensors, SparseProposal, Streams, sample, to_distribution

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

CASES = [
    pytest.param(Case(temperature=(1.0, 0.0)), 16, id="vanilla"),
    pytest.param(
        Case(batch=2, dtype=BF16, cache=BF16, columns=1001, rank=64, confidence="hidden+markov"), 128, id="128"
    ),
    pytest.param(Case(batch=1, columns=601, rank=128, confidence="hidden"), 256, id="256-in-parts"),
    pytest.param(Case(kind="none", batch=1), 32, id="no-head"),
    pytest.param(Case(reduced=True, padding=(1,), logit_scale=0.5), 64, id="reduced-and-padding"),
    pytest.param(Case(masked=0.97, dtype=BF16), 16, id="fewer-finite-than-k"),
]
CURVED = [
    pytest.param(Case(kind="gated", confidence="hidden+markov", rank=20), 16, id="gated"),
    pytest.param(Case(kind="rnn", state=True, steps=3), 16, id="rnn"),
    pytest.param(Case(fp8=True, dtype=BF16), 16, id="fp8"),
]
LIMITS = [
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1, "top_p": 0.9, "top_k": 40},
    {},
    {"top_k": 1},
]


def poisoned(inputs: Inputs, k: int) -> SparseOutput:
    out = SparseOutput.allocate(inputs.weights, inputs.base, k)
    out.tokens.fill_(-7)
    out.ids.fill_(-7)
    return out


def run(
    inputs: Inputs, k: int, truncation: SamplingTensors | None = None, lists: torch.Tensor | None = None
) -> SparseOutput:
    out = poisoned(inputs, k)
    workspace = CandidatesWorkspace(inputs.weights, inputs.base, k, lists)
    candidates_chain(inputs.weights, inputs.base, inputs.hidden, inputs.requests, out, workspace, truncation)
    return out


def proposal_of(out: SparseOutput, temperature: torch.Tensor) -> SparseProposal:
    """What verification takes, for temperatures [B]: q = exp(logits / T - lse), one-hot for greedy rows."""
    greedy = (temperature == 0)[:, None, None]
    probs = torch.exp(out.logits.float() / temperature.clamp_min(1e-30)[:, None, None] - out.lse[..., None])
    one_hot = (out.ids == out.tokens[..., None]).float()
    return SparseProposal(out.tokens, out.ids, torch.where(greedy, one_hot, probs))


def limits(batch: int, device: str) -> SamplingTensors:
    return SamplingTensors.stack([SamplingParams(**LIMITS[b % len(LIMITS)]) for b in range(batch)], device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a.float(), nan=1e9), torch.nan_to_num(b.float(), nan=1e9))


@pytest.mark.parametrize("k", [16, 64, 256])
@pytest.mark.parametrize(
    ("columns", "spread"),
    [
        pytest.param(257, 1000, id="few-ties"),
        pytest.param(3000, 3, id="thousands-of-ties"),
        pytest.param(1000, 0, id="all-equal"),
    ],
)
def test_selection_is_exact_with_the_lower_column_among_equals(k, columns, spread, device):
    g = torch.Generator().manual_seed(k + columns)
    base = torch.randint(-spread, spread + 1, (2, 2, columns), generator=g).float() / 4
    base[0, 0] *= -0.0  # both zeros are one value
    base[0, 1, ::3] = float("-inf")
    base[1, 1] *= 1e30
    for dtype in (torch.float32, BF16):
        values = base.to(device, dtype)
        selection = Selection(values, k)
        select_candidates(values, selection)
        expected, chosen = candidates_ref(values, k)
        assert torch.equal(selection.columns.long(), expected)
        assert torch.equal(selection.values, chosen)
        least, last = selection.edges.view(2, 2, 2).unbind(-1)
        assert torch.equal(least, chosen.amin(-1))
        assert torch.equal(last.long(), expected.where(chosen == least[..., None], -1).amax(-1))


def test_fine_differences_of_float32_are_told_apart(device):
    base = (1 + torch.randperm(900, generator=torch.Generator().manual_seed(0)) * 2.0**-23).view(1, 1, 900).to(device)
    selection = Selection(base, 64)
    select_candidates(base, selection)
    assert torch.equal(selection.columns.long(), candidates_ref(base, 64)[0])


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("case", "k"), CASES)
def test_everything_equals_the_reference_for_equal_noise(case, k, listed, device):
    inputs = make(case, device)
    lists = bias_lists(inputs.weights, k) if listed else None
    expected = poisoned(inputs, k)
    lead = candidates_chain_ref(inputs.weights, inputs.base, inputs.hidden, inputs.requests, expected, lists=lists)
    noisy = inputs.live & (inputs.requests.temperature > 0)
    assert lead[noisy].min() > TIE, "a draw of this case is nearly tied: take another seed"
    out = run(inputs, k, lists=lists)
    for name in ("tokens", "ids", "logits"):
        assert same(getattr(out, name), getattr(expected, name)), name
    assert torch.allclose(out.lse[inputs.live], expected.lse[inputs.live], rtol=0, atol=1e-5)
    assert out.lse[~inputs.live].isnan().all()
    if out.confidence is not None:
        assert torch.allclose(out.confidence, expected.confidence, rtol=0, atol=1e-5)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("case", "k"), [*CASES[:2], *CURVED])
def test_the_proposal_is_what_the_tokens_were_drawn_from(case, k, listed, device):
    """Losslessness: logits of the drafted tokens, and the race of the written logits, recomputed in float64."""
    inputs = make(case, device)
    out = run(inputs, k, lists=bias_lists(inputs.weights, k) if listed else None)
    exact = forced_logits(inputs, out.tokens).gather(-1, out.ids)
    possible = out.logits > float("-inf")
    assert possible.all() or case.kind == "vanilla"
    error = (out.logits - exact)[possible].abs().max()
    assert error < (2**-6 if case.dtype == BF16 and case.kind != "vanilla" else 1e-4)
    settings = [SamplingParams(temperature=t) for t in inputs.requests.temperature.tolist()]
    probs = to_distribution(out.logits.double(), SamplingTensors.stack(settings, device))
    positions = inputs.requests.positions[:, None] + torch.arange(case.steps, device=device)
    drawn = sample(probs, Streams(inputs.requests.seeds), positions, Purpose.DRAFT, out.ids)
    assert torch.equal(out.tokens, drawn)
    proposal = proposal_of(out, inputs.requests.temperature)
    assert torch.allclose(proposal.probs.double(), probs, rtol=0, atol=2e-6)


def test_all_columns_as_candidates_are_drawn_as_sample_draws(device):
    """The same token as in the race over a dense row: noise belongs to target ids."""
    case = Case(columns=64, batch=5, temperature=(1.0, 0.5, 0.0), steps=3)
    inputs = make(case, device)
    out = run(inputs, 64)
    dense = forced_logits(inputs, out.tokens)
    settings = [SamplingParams(temperature=t) for t in inputs.requests.temperature.tolist()]
    probs = to_distribution(dense.double(), SamplingTensors.stack(settings, device))
    positions = inputs.requests.positions[:, None] + torch.arange(case.steps, device=device)
    assert torch.equal(out.tokens, sample(probs, Streams(inputs.requests.seeds), positions, Purpose.DRAFT))


def test_listed_tokens_are_those_of_largest_bias_and_count_once(device):
    """Equal biases and base logits abound in these numbers, so that any rule about who is among the largest shows."""
    inputs = make(Case(batch=6, columns=300, temperature=(1.0, 0.0), rank=8), device)
    out = run(inputs, 64, lists=bias_lists(inputs.weights, 64))
    columns = candidates_ref(inputs.base, 32)[0]
    largest, listed = out.ids[..., ::2], out.ids[..., 1::2]
    assert torch.equal(largest, columns)
    assert out.logits[..., ::2].isfinite().all()
    previous = torch.cat([inputs.requests.anchors[:, None], out.tokens[:, :-1]], 1)
    bias = inputs.weights.w1[previous].float() @ inputs.weights.w2.float().T
    assert torch.equal(bias.gather(-1, listed).sort(-1).values, bias.topk(32).values.flip(-1))
    twice = (listed[..., None] == columns[..., None, :]).any(-1)
    assert twice.any()
    assert torch.equal(out.logits[..., 1::2] == float("-inf"), twice)


@pytest.mark.parametrize("kind", ["gated", "rnn", "none"])
def test_only_the_vanilla_head_has_lists(kind):
    assert bias_lists(make(Case(kind=kind), "cpu").weights, 32) is None


@pytest.mark.parametrize("k", [32, 64])
def test_truncation_is_that_of_the_sampling_package(k, device):
    case = Case(batch=6, temperature=(1.0, 2.0, 1.5), steps=2, reduced=True)
    inputs = make(case, device)
    truncation = limits(case.batch, device)
    out = run(inputs, k, truncation)
    columns = candidates_ref(inputs.base, k)[0]
    exact = forced_logits(inputs, out.tokens).gather(-1, columns).double()
    order = out.ids.argsort(-1)  # of tied candidates the lower target id is kept
    expected = to_distribution(
        exact.gather(-1, order), replace(truncation, temperature=inputs.requests.temperature.double())
    )
    assert torch.equal(out.logits.gather(-1, order).isfinite(), expected > 0)
    probs = proposal_of(out, inputs.requests.temperature).probs.gather(-1, order)
    assert torch.allclose(probs.double(), expected, rtol=0, atol=2e-6)
    positions = inputs.requests.positions[:, None] + torch.arange(case.steps, device=device)
    ids = out.ids.gather(-1, order)
    assert torch.equal(out.tokens, sample(expected, Streams(inputs.requests.seeds), positions, Purpose.DRAFT, ids))


@pytest.mark.parametrize("listed", [False, True])
def test_truncation_equals_its_reference(listed, device):
    case = Case(batch=5, temperature=(1.0, 0.0, 2.0), padding=(3,))
    inputs = make(case, device)
    truncation, lists = limits(case.batch, device), bias_lists(inputs.weights, 32) if listed else None
    expected = poisoned(inputs, 32)
    candidates_chain_ref(inputs.weights, inputs.base, inputs.hidden, inputs.requests, expected, truncation, lists)
    out = run(inputs, 32, truncation, lists)
    for name in ("tokens", "ids", "logits"):
        assert same(getattr(out, name), getattr(expected, name)), name


def test_a_request_does_not_depend_on_its_batch(device):
    case = Case(batch=4, temperature=(1.0, 0.0, 0.6), kind="rnn")
    inputs = make(case, device)
    together = run(inputs, 16)
    for index in ([2], [3, 0]):
        alone = run(inputs.rows(index), 16)
        for name in ("tokens", "ids", "logits", "lse"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[index]), name


@pytest.mark.parametrize(
    ("k", "message"),
    [
        pytest.param(17, r"k must be one of \(16, 32, 64, 128, 256\)", id="not-a-power"),
        pytest.param(256, "at most 100", id="more-than-columns"),
    ],
)
def test_bad_numbers_of_candidates_are_named(k, message):
    with pytest.raises(ValueError, match=message):
        CandidatesWorkspace(make(Case(kind="none"), "cpu").weights, torch.zeros(1, 1, 100), k)


def test_lists_of_another_number_of_candidates_are_refused():
    weights = make(Case(columns=100), "cpu").weights
    with pytest.raises(ValueError, match=r"lists must be those of k=64 candidates of this head, got \(100, 16\)"):
        CandidatesWorkspace(weights, torch.zeros(1, 1, 100), 64, bias_lists(weights, 32))


def test_a_graph_replays_with_new_inputs(device):
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    case = Case(batch=3, dtype=BF16, cache=BF16, columns=4096, rank=64, steps=4)
    inputs = make(case, device)
    out, workspace = poisoned(inputs, 32), CandidatesWorkspace(inputs.weights, inputs.base, 32)
    arguments = (inputs.weights, inputs.base, inputs.hidden, inputs.requests, out, workspace)
    candidates_chain(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        candidates_chain(*arguments)
    inputs.requests.seeds.add_(1)
    graph.replay()
    replayed = out.tokens.clone()
    candidates_chain(*arguments)
    assert torch.equal(replayed, out.tokens)
