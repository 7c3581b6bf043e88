"""to_distribution against a definition in plain Python, and the isolation of its rows."""

import math

import pytest
import torch
from exact_law import P, vector
from hypothesis import given
from hypothesis import strategies as st

from dspark.sampling import SamplingParams, SamplingTensors, params, to_distribution

# Logits on a coarse grid make ties common; no top_p is a fraction of small integers, where rounding would decide.
logits_rows = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0, -math.inf]), min_size=1, max_size=7).filter(
    lambda row: max(row) > -math.inf
)
settings_ = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([1.0, 0.1234, 0.377, 0.611, 0.9137]),
    min_p=st.sampled_from([0.0, 0.0321, 0.41, 1.0]),
)


def by_definition(logits: list[float], settings: SamplingParams) -> list[float]:
    """The docstring of SamplingParams, one sentence after the other."""
    ids = range(len(logits))
    if settings.temperature == 0:
        best = max(ids, key=lambda token: (logits[token], -token))
        return [float(token == best) for token in ids]

    def normalised(weights: list[float]) -> list[float]:
        return [weight / math.fsum(weights) for weight in weights]

    peak = max(logits)
    probs = normalised([math.exp((logit - peak) / settings.temperature) for logit in logits])
    if settings.min_p:
        probs = normalised([p if p >= settings.min_p * max(probs) else 0.0 for p in probs])
    if 0 < settings.top_k < len(probs):
        kth = sorted(probs, reverse=True)[settings.top_k - 1]
        probs = normalised([p if p >= kth else 0.0 for p in probs])
    if settings.top_p < 1:
        kept: set[int] = set()
        for token in sorted(ids, key=lambda token: (-probs[token], token)):
            if math.fsum(probs[other] for other in kept) < settings.top_p:
                kept.add(token)
        probs = normalised([p if token in kept else 0.0 for token, p in enumerate(probs)])
    return probs


@given(logits_rows, settings_)
def test_the_definition(logits, settings):
    out = to_distribution(torch.tensor([logits], dtype=torch.float64), settings)[0]
    torch.testing.assert_close(out, torch.tensor(by_definition(logits, settings), dtype=out.dtype), rtol=0, atol=1e-14)


@given(logits_rows, settings_, st.sampled_from([1, 2, 3]))
def test_the_short_list_of_top_p_changes_nothing(logits, settings, width):
    rows = torch.tensor([logits, logits[::-1]])
    expected = to_distribution(rows, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(params, "NUCLEUS_WIDTH", width)
        assert torch.equal(to_distribution(rows, settings), expected)


KEPT = [
    pytest.param({"min_p": 0.5}, (0.6, 0.4, 0, 0, 0), id="min-p-half-of-the-peak"),
    pytest.param({"top_k": 2}, (0.6, 0.4, 0, 0, 0), id="top-k-2"),
    pytest.param({"top_k": 1}, (1, 0, 0, 0, 0), id="top-k-1"),
    pytest.param({"top_k": 5}, P, id="top-k-whole-vocabulary"),
    pytest.param({"top_k": 9}, P, id="top-k-beyond-the-vocabulary"),
    pytest.param({"top_p": 0.7}, (0.6, 0.4, 0, 0, 0), id="top-p-crossed-by-the-second"),
    pytest.param({"top_p": 0.01}, (1, 0, 0, 0, 0), id="top-p-keeps-at-least-one"),
    pytest.param({"top_k": 3, "top_p": 0.8}, (0.6, 0.4, 0, 0, 0), id="top-p-after-top-k-renormalised"),
    pytest.param({"min_p": 0.3, "top_p": 0.8}, (0.6, 0.4, 0, 0, 0), id="top-p-after-min-p-renormalised"),
    pytest.param({"temperature": 0.0, "top_k": 3}, (1, 0, 0, 0, 0), id="greedy-ignores-the-rest"),
]


@pytest.mark.parametrize(("fields", "expected"), KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_known_rows(fields, expected, dtype):
    out = to_distribution(vector(*P).log().to(dtype)[None], SamplingParams(**fields))[0]
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.tensor(expected, dtype=dtype), rtol=1e-6, atol=0)


def test_top_k_keeps_ties_with_the_kth_logit():
    out = to_distribution(torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]]), SamplingParams(top_k=2))[0]
    assert (out > 0).tolist() == [True, True, True, True, False]


def test_top_p_keeps_the_lower_ids_of_a_tie():
    out = to_distribution(torch.zeros(1, 4), SamplingParams(top_p=0.5))[0]
    assert out.tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-60, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_temperatures_neither_overflow_nor_divide_by_zero(temperature, dtype):
    out = to_distribution(torch.tensor([[9.0, 7.0, 9.0, -torch.inf]], dtype=dtype), SamplingParams(temperature))
    assert out.tolist() == [[0.5, 0, 0.5, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_become_float32(dtype):
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = to_distribution(logits, SamplingParams(top_p=0.9))
    assert torch.equal(out, to_distribution(logits.float(), SamplingParams(top_p=0.9)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_do_not_see_their_neighbours(dtype):
    """Temperature 0, sampled and truncated rows in one batch, with ties in the greedy one; each as if it were alone."""
    batch = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0, top_p=0.5),
        SamplingParams(top_k=5, top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(top_p=0.99),
        SamplingParams(top_k=3),
    ]
    logits = torch.randn(len(batch), 3, 2000, generator=torch.Generator().manual_seed(1), dtype=dtype)
    logits[0, :, [7, 3, 1999]] = 50.0
    together = to_distribution(logits, SamplingTensors.stack(batch))
    for row, settings in enumerate(batch):
        assert torch.equal(to_distribution(logits[row : row + 1], settings), together[row : row + 1])
        for position in range(3):
            alone = to_distribution(logits[row, position][None], settings)
            assert torch.equal(alone[0], together[row, position])
    assert (together[0].argmax(-1) == 3).all()
    assert (together[0].max(-1).values == 1).all()


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)])
def test_empty_batches_give_empty_distributions(shape):
    assert to_distribution(torch.zeros(shape), SamplingParams()).shape == shape


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e308])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_temperatures_are_uniform_over_what_is_not_masked(temperature, dtype):
    out = to_distribution(torch.tensor([[9.0, 7.0, -torch.inf]], dtype=dtype), SamplingParams(temperature))
    assert out.tolist() == [[0.5, 0.5, 0.0]]


def test_without_truncation_keeps_the_temperatures_only():
    tensors = SamplingTensors.stack([SamplingParams(0.5, top_k=2, top_p=0.4, min_p=0.2), SamplingParams(0.0)])
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(2))
    plain = SamplingTensors.stack([SamplingParams(0.5), SamplingParams(0.0)])
    assert torch.equal(to_distribution(logits, tensors.without_truncation()), to_distribution(logits, plain))


def test_rows_and_concat_move_all_fields_together():
    batch = [SamplingParams(0.1 + i, top_k=i, top_p=1 - i / 10, min_p=i / 20) for i in range(4)]
    tensors = SamplingTensors.stack(batch)
    moved = tensors.rows(torch.tensor([3, 1])).concat(tensors.rows(torch.tensor([True, False, False, True])))
    expected = SamplingTensors.stack([batch[3], batch[1], batch[0], batch[3]])
    for name in ("temperature", "top_k", "top_p", "min_p"):
        assert torch.equal(getattr(moved, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"temperature": -0.1}, "temperature must be a finite number >= 0.*got -0.1", id="cold"),
        pytest.param({"temperature": math.nan}, "temperature must be a finite number", id="nan"),
        pytest.param({"temperature": math.inf}, "temperature must be a finite number", id="infinite"),
        pytest.param({"top_k": -1}, "top_k must be an integer >= 0; 0 keeps all tokens; got -1", id="top-k-minus-one"),
        pytest.param({"top_k": 2.0}, "top_k must be an integer", id="top-k-float"),
        pytest.param({"top_p": 0.0}, r"top_p must be in \(0, 1\]", id="top-p-zero"),
        pytest.param({"top_p": 1.1}, "top_p must be in .*got 1.1", id="top-p-above-one"),
        pytest.param({"min_p": 1.5}, r"min_p must be in \[0, 1\]", id="min-p"),
        pytest.param({"seed": 2**63}, "seed must be a 64-bit signed integer", id="seed-too-wide"),
        pytest.param({"seed": True}, "seed must be", id="seed-flag"),
        pytest.param({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1; got 0", id="no-tokens"),
        pytest.param({"stop_token_ids": ("</s>",)}, "stop_token_ids must be token ids.*'</s>'", id="stop-text"),
    ],
)
def test_bad_parameters_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_stop_ids_may_come_as_a_list():
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param([0.0, math.nan], "row 1 .*maximum nan.*overflowed", id="nan"),
        pytest.param([0.0, math.inf], "row 1 .*maximum inf", id="infinite"),
        pytest.param([-math.inf, -math.inf], "row 1 .*maximum -inf.*mask removed every token", id="all-masked"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_named(row, message, temperature):
    with pytest.raises(ValueError, match=message):
        to_distribution(torch.tensor([[0.0, 1.0], row]), SamplingParams(temperature))


def test_a_batch_of_another_size_is_refused():
    with pytest.raises(ValueError, match="logits has 3 requests, but the sampling parameters have 1 rows"):
        to_distribution(torch.zeros(3, 2), SamplingTensors.stack([SamplingParams()]))
