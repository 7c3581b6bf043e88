"""The dense Markov chain: its tokens, the logits it was drawn from, and what a padding row leaves alone."""

import math
from dataclasses import replace

import pytest
import torch
from markov_cases import BF16, TIE, Case, Inputs, forced_logits, make, poisoned_output, unit_of

from dspark.kernels import markov_device, tl, triton
from dspark.kernels.markov import (
    GROUP,
    ChainOutput,
    ChainRequests,
    MarkovWeights,
    chain_ref,
    draft_noise,
    draw_noise,
    draw_ref,
    lse_ref,
    quantize_w2,
)
from dspark.kernels.markov_chain import DenseWorkspace, dense_chain
from dspark.kernels.markov_plan import DensePlan
from dspark.sampling import Purpose, SamplingParams, SamplingTensors, Streams, sample_in_groups, to_distribution

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

ONE_BY_ONE = "the interpreter runs programs one after another: one that waits for another never ends"

# up to 16 requests take narrow products, up to 64 and 128 those of a warpgroup and of two
CASES = [
    pytest.param(Case(batch=1, steps=3), id="one-request"),
    pytest.param(Case(batch=1, steps=1, columns=17, rank=5), id="less-than-a-tile"),
    pytest.param(Case(batch=17, rank=64, columns=1030), id="padded-to-64-rows"),
    pytest.param(Case(batch=66, columns=132, dtype=BF16, cache=BF16, padding=(3, 65), seed=2), id="padded-to-128-rows"),
    pytest.param(Case(batch=3, dtype=BF16, cache=BF16, columns=516), id="bfloat16-in-words-of-four"),
    pytest.param(Case(batch=6, dtype=BF16, cache=BF16, columns=515), id="bfloat16-odd-rows"),
    pytest.param(Case(batch=5, dtype=BF16, cache=BF16, columns=516, rank=20), id="odd-rank"),
    pytest.param(Case(temperature=(0.0,), cache=BF16), id="greedy"),
    pytest.param(Case(batch=5, temperature=(1.0, 0.0, 0.3, 2.0)), id="mixed-temperatures"),
    pytest.param(Case(batch=5, padding=(0, 3)), id="padding"),
    pytest.param(Case(kind="none", rank=1), id="no-head"),
    pytest.param(Case(reduced=True), id="reduced-vocabulary"),
    pytest.param(Case(reduced=True, scattered=True, cache=BF16, padding=(1,)), id="scattered-to-target-columns"),
    pytest.param(Case(masked=0.97, batch=5), id="mostly-minus-infinity"),
    pytest.param(Case(fp8=True), id="fp8"),
    pytest.param(Case(fp8=True, batch=6, dtype=BF16, cache=BF16, rank=32), id="fp8-tiles"),
    pytest.param(Case(logit_scale=0.5, confidence="hidden"), id="logit-scale"),
    pytest.param(Case(confidence="hidden+markov", dtype=BF16, padding=(2,)), id="confidence"),
]
CURVED = [
    pytest.param(Case(kind="gated", confidence="hidden+markov"), id="gated"),
    pytest.param(Case(kind="gated", dtype=BF16, cache=BF16, batch=5, rank=20), id="gated-bfloat16"),
    pytest.param(Case(kind="rnn", steps=3, rank=40), id="rnn"),
    pytest.param(Case(kind="rnn", state=True, dtype=BF16, cache=BF16, batch=5, padding=(1,)), id="rnn-with-state"),
]


def run(inputs: Inputs, out: ChainOutput, **options) -> ChainOutput:
    workspace = DenseWorkspace(inputs.weights, inputs.base, **options)
    dense_chain(inputs.weights, inputs.base, inputs.hidden, inputs.requests, out, workspace)
    return out


def stored_logits(inputs: Inputs, out: ChainOutput) -> torch.Tensor:
    """Cached logits [B, K, columns of the cache] of the requests; live ones only are meaningful."""
    rows = inputs.requests.cache_rows
    return out.cache[: len(inputs.base)] if rows is None else out.cache[rows]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a.float(), nan=1e9), torch.nan_to_num(b.float(), nan=1e9))


@pytest.mark.parametrize("case", CASES)
def test_everything_equals_the_reference_for_equal_noise(case, device):
    inputs = make(case, device)
    expected, out = poisoned_output(case, inputs), poisoned_output(case, inputs)
    lead = chain_ref(inputs.weights, inputs.base, inputs.hidden, inputs.requests, expected)
    noisy = inputs.live & (inputs.requests.temperature > 0)
    assert not noisy.any() or lead[noisy].min() > TIE, "a draw of this case is nearly tied: take another seed"
    run(inputs, out)
    assert torch.equal(out.tokens, expected.tokens)  # padding rows keep their poison in both
    if case.fp8:  # the scale is no power of two
        close = unit_of(expected.cache.float().nan_to_num(1.0), case.cache) + 1e-5
        assert ((out.cache.float() - expected.cache.float()).abs() <= close)[expected.cache.isfinite()].all()
    else:
        assert same(out.cache, expected.cache)
    assert torch.equal(out.lse.isnan(), expected.lse.isnan())
    assert torch.allclose(out.lse[inputs.live], expected.lse[inputs.live], rtol=0, atol=1e-5)
    if out.confidence is not None:
        assert torch.allclose(out.confidence[inputs.live], expected.confidence[inputs.live], rtol=0, atol=1e-5)
        assert out.confidence[~inputs.live].isnan().all()


@pytest.mark.parametrize("case", [*CASES[3:8], *CURVED])
def test_tokens_are_winners_of_the_stored_logits(case, device):
    """Losslessness: recomputed in float64 by the sampling package, from nothing but the cache."""
    inputs = make(case, device)
    out = run(inputs, poisoned_output(case, inputs))
    live = inputs.live.nonzero()[:, 0]
    stored = stored_logits(inputs, out)[live].double()
    temperature = inputs.requests.temperature[live].double()
    settings = [SamplingParams(temperature=t) for t in temperature.tolist()]
    probs = to_distribution(stored, SamplingTensors.stack(settings, device))
    positions = inputs.requests.positions[live][:, None] + torch.arange(case.steps, device=device)
    drawn = sample_in_groups(probs, Streams(inputs.requests.seeds[live]), positions, Purpose.DRAFT)
    assert torch.equal(out.tokens[live], drawn)
    scaled = stored / temperature.clamp_min(1e-30)[:, None, None]
    exact = torch.where(temperature[:, None] > 0, scaled.logsumexp(-1), stored.amax(-1))
    assert (out.lse[live].double() - exact).abs().max() < 1e-5


@pytest.mark.parametrize("case", CURVED)
def test_curved_heads_store_the_logits_of_their_own_tokens(case, device):
    """Within one unit of the cache's dtype: a sigmoid's last bit may round a feature or a logit the other way."""
    inputs = make(case, device)
    out = run(inputs, poisoned_output(case, inputs))
    exact = forced_logits(inputs, out.tokens)[inputs.live]
    error = (stored_logits(inputs, out)[inputs.live].float() - exact).abs()
    features = 2**-7 if case.dtype == BF16 else 1e-5
    assert (error <= unit_of(exact, case.cache) + features).all()


@pytest.mark.parametrize("confidence", ["hidden", "hidden+markov"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_confidence_sees_the_previous_token(kind, confidence, device):
    case = Case(kind=kind, confidence=confidence, steps=3)
    inputs = make(case, device)
    out = run(inputs, poisoned_output(case, inputs))
    previous = torch.cat([inputs.requests.anchors[:, None], out.tokens[:, :-1]], 1)
    parts = [inputs.hidden.float()]
    if confidence == "hidden+markov":
        parts.append(inputs.weights.w1[previous].float())
    expected = torch.cat(parts, -1) @ inputs.weights.confidence_weight.float() + 0.25
    assert torch.allclose(out.confidence, expected, rtol=0, atol=1e-5)


def test_a_request_does_not_depend_on_its_batch(device):
    case = Case(batch=7, temperature=(1.0, 0.0, 0.6))
    inputs = make(case, device)
    together = run(inputs, poisoned_output(case, inputs))
    for index in ([2], [5, 0], [6, 1, 3, 4, 2]):
        some = inputs.rows(index)
        alone = run(some, poisoned_output(case, some))
        assert torch.equal(alone.tokens, together.tokens[index])
        assert torch.equal(stored_logits(some, alone), stored_logits(inputs, together)[index])


def test_without_a_cache_the_same_tokens_are_drawn(device):
    case = Case(batch=3, temperature=(1.0, 0.0), dtype=BF16, cache=BF16)
    inputs = make(case, device)
    with_cache = run(inputs, poisoned_output(case, inputs))
    for each in (run(inputs, replace(poisoned_output(case, inputs), cache=None)), poisoned_output(case, inputs)):
        out = replace(each, cache=None)
        if (out.tokens < 0).all():
            chain_ref(inputs.weights, inputs.base, inputs.hidden, inputs.requests, out)
        assert torch.equal(out.tokens, with_cache.tokens)
        assert torch.allclose(out.lse, with_cache.lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("programs", [1, 5, 64])
def test_the_number_of_programs_changes_nothing(programs, device):
    if device == "cpu":
        pytest.skip(ONE_BY_ONE)
    case = Case(batch=2, columns=1030, temperature=(1.0, 0.0))
    inputs = make(case, device)
    expected = run(inputs, poisoned_output(case, inputs))
    out = run(inputs, poisoned_output(case, inputs), num_programs=programs)
    assert torch.equal(out.tokens, expected.tokens)
    assert torch.allclose(out.lse, expected.lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("reduced", [False, True])
def test_of_equal_logits_the_lowest_column_is_taken(batch, reduced, device):
    case = Case(batch=batch, temperature=(0.0,), reduced=reduced, kind="none", columns=700)
    inputs = make(case, device)
    inputs.base.fill_(-1.0)
    for column in (650, 300, 131, 130, 129):
        inputs.base[..., column] = 2.0
    out = run(inputs, poisoned_output(case, inputs))
    ids = inputs.weights.target_ids
    lowest = 129 if ids is None else int(ids[129])
    assert (out.tokens == lowest).all()
    assert (out.lse == 2.0).all()


def test_numbers_belong_to_draft_columns(device):
    """A reduced vocabulary draws the columns that a whole one of its size would, and names them by target ids."""
    case = Case(reduced=True, kind="none", batch=5, columns=120)
    inputs = make(case, device)
    whole = replace(inputs, weights=MarkovWeights(kind="none"))
    reduced, columns = (run(each, poisoned_output(case, each)).tokens for each in (inputs, whole))
    assert torch.equal(reduced, inputs.weights.target_ids[columns])


def test_cache_in_target_columns_leaves_the_others_alone(device):
    case = Case(reduced=True, scattered=True)
    inputs = make(case, device)
    out = poisoned_output(case, inputs)
    out.cache.fill_(float("-inf"))
    run(inputs, out)
    rows = stored_logits(inputs, out)
    others = torch.ones(case.vocabulary, dtype=torch.bool, device=device)
    others[inputs.weights.target_ids] = False
    assert rows[..., inputs.weights.target_ids].isfinite().all()
    assert rows[..., others].isneginf().all()


def test_draft_noise_is_that_of_the_streams(device):
    """Bit for bit: a verifier that works with the sampling package may race the same candidates again."""
    g = torch.Generator().manual_seed(0)
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 12345], device=device)
    positions = torch.tensor([0, 1, 2**20, 2**32 - 1, 77], device=device)
    ids = torch.randint(0, 2**24 - 1, (5, 3000), generator=g).to(device)
    streams = Streams(seeds).exponential_at(positions[:, None], Purpose.DRAFT, ids[:, None])[:, 0]
    assert torch.equal(draft_noise(seeds, positions, ids), streams)
    noise, u = draw_noise(seeds, positions, 1001)
    streams = Streams(seeds)
    assert torch.equal(noise, streams.exponential_of_groups(positions[:, None], Purpose.DRAFT, 1001)[:, 0])
    exact = streams.uniform(positions[:, None], Purpose.DRAFT)[:, 0]
    assert (u.double() - exact).abs().max() < 2**-24


@triton.jit
def _log2_exponential_kernel(word_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    words = tl.load(word_ptr + at, mask=at < count, other=0).to(tl.uint32)
    tl.store(out_ptr + at, markov_device.log2_exponential(words), mask=at < count)


def test_log2_exponential_is_that_of_the_streams(device):
    """Random words of every magnitude, and both ends of the series."""
    edges = torch.cat([2 ** torch.arange(32), 2 ** torch.arange(1, 33) - 1, 2**30 + torch.arange(-200, 200)])
    words = torch.cat([edges, torch.arange(0, 2**32, 2**32 // 3000)]).to(device)
    out = torch.empty(len(words), device=device)
    _log2_exponential_kernel[(1,)](words, out, len(words), BLOCK=4096)
    u = ((words.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24).double()  # float32, as the streams have it
    exact = torch.log2(-torch.log1p(-u) / math.log(2))
    assert (out.double() - exact).abs().max() < 4e-6  # log2 E reaches -33 there; near a draw's E of about 1 it is 1e-6
    ordinary = exact > -4
    assert (out.double() - exact)[ordinary].abs().max() < 2e-6


@pytest.mark.parametrize(("batch", "steps"), [(2, 40), (30, 4)])
def test_drafted_pairs_have_the_law_of_the_stored_logits(batch, steps, device):
    """Chi-square of next tokens given previous ones; by its threshold it would fail by chance once in 10^6 runs."""
    columns = 3
    case = Case(batch=batch, steps=steps, columns=columns, rank=4, temperature=(4.0,), seed=3)
    inputs = make(case, device)
    inputs.base.copy_(inputs.base[:1, :1].clone())
    inputs.requests.anchors.zero_()
    tokens = run(inputs, poisoned_output(case, inputs)).tokens
    previous = torch.cat([inputs.requests.anchors[:, None], tokens[:, :-1]], 1)
    pairs = torch.bincount((previous * columns + tokens).flatten(), minlength=columns**2)
    counts = pairs.view(columns, columns).double().cpu()
    bias = inputs.weights.w1.double() @ inputs.weights.w2.double().T
    law = torch.softmax((inputs.base[0, 0].double() + bias).cpu() / 4.0, -1)
    expected = law * counts.sum(-1, keepdim=True)
    assert expected.min() > 5, "too few draws for a chi-square"
    assert float(((counts - expected) ** 2 / expected).sum()) < 38.5  # 6 degrees of freedom


@pytest.mark.parametrize(("batch", "steps"), [(16, 50), (64, 16), (100, 12)])
def test_tokens_have_the_law_of_the_logits_within_groups_and_across(batch, steps, device):
    """Chi-square of the tokens of one distribution over three groups, one of them of 6 columns; 69 degrees of freedom,
    so that its threshold would be passed by chance once in 10^6 runs."""
    columns = 2 * GROUP + 6
    case = Case(kind="none", batch=batch, steps=steps, columns=columns, temperature=(8.0,), seed=5)
    inputs = make(case, device)
    inputs.base.copy_(inputs.base[:1, :1].clone())
    tokens = run(inputs, poisoned_output(case, inputs)).tokens
    counts = torch.bincount(tokens.flatten(), minlength=columns).double().cpu()
    expected = torch.softmax(inputs.base[0, 0].double().cpu() / 8.0, -1) * tokens.numel()
    assert expected.min() > 5, "too few draws for a chi-square"
    assert float(((counts - expected) ** 2 / expected).sum()) < 133


def test_quantized_rows_are_near_and_zero_rows_stay_zero():
    w2 = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None]
    w2[7] = 0.0
    values, scale = quantize_w2(w2)
    error = (values.float() * scale[:, None] - w2).abs()
    largest = w2.abs().amax(-1, keepdim=True)
    assert (error <= largest / 16 + 1e-30).all()  # half a unit of a 3-bit fraction
    assert values[7].float().eq(0).all()
    assert scale.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"base": torch.zeros(3, 2, 299)}, "the workspace was made for base", id="workspace"),
        pytest.param({"hidden": None}, r"reads the hidden states \[B, K, H\], got None", id="hidden"),
        pytest.param({"base": torch.zeros(3, 300, 2).mT}, "last dimension of base must be contiguous", id="strides"),
    ],
)
def test_bad_inputs_are_named(change, message):
    case = Case(confidence="hidden")
    inputs = make(case, "cpu")
    workspace = DenseWorkspace(inputs.weights, inputs.base)
    changed = replace(inputs, **change)
    with pytest.raises(ValueError, match=message):
        dense_chain(
            inputs.weights, changed.base, changed.hidden, inputs.requests, poisoned_output(case, inputs), workspace
        )


def test_bad_weights_and_requests_are_named():
    w1, w2 = torch.zeros(9, 4), torch.zeros(9, 4)
    with pytest.raises(ValueError, match="needs w1"):
        MarkovWeights("vanilla", w1=w1)
    with pytest.raises(ValueError, match="needs w2_scale"):
        MarkovWeights("vanilla", w1=w1, w2=w2.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"joint_weight of a rnn head must be \(12, 8\), got None"):
        MarkovWeights("rnn", w1=w1, w2=w2)
    zeros = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"temperature must be torch.float32 \(2,\), got torch.float64"):
        ChainRequests(zeros, zeros, zeros, torch.ones(2, dtype=torch.float64))
    base = torch.zeros(300, 1, 9)
    with pytest.raises(ValueError, match="300 requests are 3 blocks of 128, and 2 programs run at once"):
        DensePlan.choose(MarkovWeights("none"), base, 2)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(batch=1, steps=3), id="held-one"),
        pytest.param(
            Case(batch=3, dtype=BF16, cache=BF16, padding=(1,), confidence="hidden+markov"), id="held-padding"
        ),
        pytest.param(Case(batch=17, confidence="hidden", temperature=(1.0, 0.0)), id="streamed"),
        pytest.param(Case(kind="rnn", batch=3), id="a-launch-a-step"),
    ],
)
def test_a_workspace_is_used_again(case, device):
    """Every launch meets the words of the one before; 300 of them are past the point where step numbers wrap."""
    inputs = make(case, device)
    workspace = DenseWorkspace(inputs.weights, inputs.base)
    first = poisoned_output(case, inputs)
    dense_chain(inputs.weights, inputs.base, inputs.hidden, inputs.requests, first, workspace)
    for _ in range(3 if device == "cpu" else 300):
        out = poisoned_output(case, inputs)
        dense_chain(inputs.weights, inputs.base, inputs.hidden, inputs.requests, out, workspace)
    for name in ("tokens", "cache", "lse", "confidence"):
        if getattr(first, name) is not None:
            assert same(getattr(out, name), getattr(first, name)), name


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(batch=1, dtype=BF16, cache=BF16, columns=4096, rank=64, steps=5), id="held"),
        pytest.param(Case(batch=3, columns=4099, rank=20, steps=5, temperature=(1.0, 0.0)), id="odd"),
        pytest.param(Case(batch=5, dtype=BF16, cache=BF16, columns=40000, rank=64, steps=3), id="tiles"),
        pytest.param(Case(batch=16, dtype=BF16, cache=BF16, columns=40000, rank=256, steps=3), id="one-loop"),
        pytest.param(
            Case(batch=130, dtype=BF16, cache=BF16, columns=9000, rank=256, padding=(7,), confidence="hidden+markov"),
            id="blocks-of-requests",
        ),
        pytest.param(Case(batch=64, dtype=BF16, cache=BF16, columns=40000, rank=256, steps=4), id="64-rows"),
        pytest.param(Case(batch=40, dtype=BF16, cache=BF16, columns=9000, rank=64, fp8=True), id="fp8"),
        pytest.param(Case(batch=5, columns=3000, reduced=True, scattered=True), id="reduced"),
        pytest.param(Case(batch=5, columns=3000, kind="none"), id="no-head"),
        pytest.param(Case(batch=70, columns=3000, kind="none", dtype=BF16, cache=BF16), id="no-head-128-rows"),
        pytest.param(Case(batch=20, columns=3000, kind="gated", dtype=BF16, rank=64), id="gated"),
    ],
)
def test_many_programs_agree(case, device):
    """Every token is the draw from the logits that were stored, and they are those of the tokens before."""
    if device == "cpu":
        pytest.skip(ONE_BY_ONE)
    inputs = make(case, device)
    workspace = DenseWorkspace(inputs.weights, inputs.base)
    assert workspace.plan.num_parts > 1
    for _ in range(20):
        out = poisoned_output(case, inputs)
        dense_chain(inputs.weights, inputs.base, inputs.hidden, inputs.requests, out, workspace)
    live = inputs.live.nonzero()[:, 0]
    stored = stored_logits(inputs, out)[live]
    if case.scattered:
        stored = stored[..., inputs.weights.target_ids]
    exact = forced_logits(inputs, out.tokens)[live]
    features = 2**-7 if case.kind == "gated" and case.dtype == BF16 else 1e-5
    assert ((stored.float() - exact).abs() <= 0.51 * unit_of(exact, case.cache) + features).all()
    requests = inputs.rows(live.tolist()).requests
    for i in range(case.steps):
        columns, lead = draw_ref(stored[:, i], requests, i)
        expected = columns if inputs.weights.target_ids is None else inputs.weights.target_ids[columns]
        assert ((out.tokens[live, i] == expected) | (lead < TIE)).all()
        assert torch.allclose(out.lse[live, i], lse_ref(stored[:, i], requests.temperature), rtol=0, atol=1e-5)


def test_a_graph_replays_with_new_inputs(device):
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    case = Case(batch=3, dtype=BF16, cache=BF16, columns=4096, rank=64, steps=4)
    inputs = make(case, device)
    out = poisoned_output(case, inputs)
    workspace = DenseWorkspace(inputs.weights, inputs.base)
    arguments = (inputs.weights, inputs.base, inputs.hidden, inputs.requests, out, workspace)
    dense_chain(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense_chain(*arguments)
    inputs.requests.seeds.add_(1)
    graph.replay()
    replayed = out.tokens.clone()
    dense_chain(*arguments)
    assert torch.equal(replayed, out.tokens)
