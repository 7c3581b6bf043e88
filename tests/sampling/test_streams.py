"""Random streams: who shares numbers with whom, their distribution, and the draw made from them.

Statistical tests use fixed seeds, so that they pass or fail always; the rate stated beside each is that of a false
alarm over seeds.
"""

from dataclasses import dataclass

import pytest
import torch
from exact_law import P6, vector
from scipy import stats

from dspark.kernels.markov import GROUP
from dspark.sampling import Purpose, SamplingParams, Streams, sample, sample_in_groups, streams

FALSE_ALARM = 1e-3


def seeded(*seeds: int) -> Streams:
    return Streams(torch.tensor(seeds, dtype=torch.int64))


def positions(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + shape[-1]).expand(shape)


def random_probs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2).softmax(-1)


@dataclass(frozen=True)
class ConstantNoise(Streams):
    """Every exponential is 1, so that equal probabilities tie."""

    def exponential(self, positions, purpose, vocab_size, dtype=torch.float32):
        return torch.ones(*positions.shape, vocab_size, dtype=dtype)

    def exponential_at(self, positions, purpose, ids, dtype=torch.float32):
        return torch.ones(ids.shape, dtype=dtype)


# Sharing


def test_no_purpose_position_or_seed_shares_a_uniform():
    """53-bit numbers: 40 thousand of them hold an equal pair by chance once in ten million seeds."""
    assert len(Purpose) == len(Purpose.__members__) == 4  # equal values would make one purpose an alias of another
    request = seeded(0, 1, 2, -1, 2**32, 2**33, 2**62, -(2**63), 2**63 - 1, 12345)
    drawn = torch.stack([request.uniform(positions(10, 1000), purpose) for purpose in Purpose])
    assert drawn.unique().numel() == drawn.numel()


def test_no_purpose_position_or_seed_shares_token_noise():
    """Pairs of neighbouring numbers have 64 bits; in float64 all of them are seen."""
    request = seeded(0, 1, -1, 2**32)
    drawn = torch.stack(
        [request.exponential(positions(4, 50), purpose, 64, torch.float64) for purpose in Purpose]
    ).view(-1, 2)
    assert len(drawn.unique(dim=0)) == len(drawn)


def test_uniforms_and_token_noise_of_one_purpose_differ():
    request = seeded(3)
    uniform = request.uniform(positions(1, 100), Purpose.DRAFT)
    noise = request.exponential(positions(1, 100), Purpose.DRAFT, 2, torch.float64)
    as_uniform = -torch.expm1(-noise)  # both words of the 53 bits, had the counters been the same
    assert ((as_uniform - uniform[..., None]).abs() > 2**-32).all()


def test_groups_share_no_number_with_tokens_or_other_groups():
    """Pairs of neighbouring numbers have 64 bits; a token's, a group's, and the two words of a uniform number."""
    request, where = seeded(0, 1, -1, 2**32), positions(4, 50)
    drawn = [request.exponential_of_groups(where, purpose, 64, torch.float64).view(-1, 2) for purpose in Purpose]
    drawn += [request.exponential(where, purpose, 64, torch.float64).view(-1, 2) for purpose in Purpose]
    key, counter = request._philox_rows(where, Purpose.DRAFT, 1)
    drawn.append(streams._to_exponential(streams.philox_rows(key, counter, 2), torch.float64))
    together = torch.cat(drawn)
    assert len(together.unique(dim=0)) == len(together)
    few = request.exponential_of_groups(where, Purpose.DRAFT, 5, torch.float64)
    assert torch.equal(few, drawn[Purpose.DRAFT].view(4, 50, 64)[..., :5])


def test_a_request_has_the_same_numbers_in_any_batch():
    request, others = seeded(5, 9, -7), positions(3, 6, start=100)
    for purpose in Purpose:
        uniform = request.uniform(others, purpose)
        noise = request.exponential(others, purpose, 37)
        for order in ([2, 0, 1], [1], [0, 0, 2]):
            rows = torch.tensor(order)
            assert torch.equal(request.rows(rows).uniform(others[rows], purpose), uniform[rows])
            assert torch.equal(request.rows(rows).exponential(others[rows], purpose, 37), noise[rows])
        for column in range(6):
            here = others[:, column : column + 1]
            assert torch.equal(request.uniform(here, purpose), uniform[:, column : column + 1])
            assert torch.equal(request.exponential(here, purpose, 37), noise[:, column : column + 1])
        padded = torch.cat([others, torch.zeros_like(others)], dim=1)
        assert torch.equal(request.uniform(padded, purpose)[:, :6], uniform)


def test_a_padded_vocabulary_keeps_the_numbers_of_its_tokens():
    wide = seeded(1).exponential(positions(1, 2), Purpose.DRAFT, 1001)
    for vocab_size in (1, 4, 5, 1000):
        narrow = seeded(1).exponential(positions(1, 2), Purpose.DRAFT, vocab_size)
        assert torch.equal(narrow, wide[..., :vocab_size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chosen_ids_have_their_own_noise(dtype):
    request, where = seeded(4, 8), positions(2, 3)
    ids = torch.randint(0, 5000, (2, 3, 41), generator=torch.Generator().manual_seed(0))
    everything = request.exponential(where, Purpose.RECOVERY, 5000, dtype)
    assert torch.equal(request.exponential_at(where, Purpose.RECOVERY, ids, dtype), everything.gather(-1, ids))


def test_unseeded_requests_differ_and_seeded_ones_do_not():
    batch = [SamplingParams(), SamplingParams(seed=6), SamplingParams(), SamplingParams(seed=6), SamplingParams(seed=7)]
    seeds = Streams.for_params(batch).seeds.tolist()
    assert seeds[1] == seeds[3] == 6
    assert len(set(seeds)) == 4
    assert Streams.for_params(batch).seeds[0] != seeds[0]


def test_concat_is_the_batch_of_both():
    both = seeded(1, 2).concat(seeded(3))
    assert torch.equal(
        both.uniform(positions(3, 2), Purpose.ACCEPT), seeded(1, 2, 3).uniform(positions(3, 2), Purpose.ACCEPT)
    )


# Distribution


@pytest.mark.parametrize("purpose", Purpose)
def test_uniforms_are_uniform(purpose):
    """Kolmogorov-Smirnov along positions and along seeds, false alarm 0.001 each."""
    along_positions = seeded(11).uniform(positions(1, 20_000), purpose).flatten()
    along_seeds = Streams(torch.arange(20_000)).uniform(torch.full((20_000, 1), 17), purpose).flatten()
    for drawn in (along_positions, along_seeds):
        assert drawn.dtype == torch.float64
        assert stats.kstest(drawn.numpy(), "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("purpose", Purpose)
def test_token_noise_is_exponential_along_ids_and_positions(purpose):
    """Kolmogorov-Smirnov, false alarm 0.001 each."""
    noise = seeded(12).exponential(positions(1, 300), purpose, 300)[0]
    for drawn in (noise[:60].flatten(), noise[:, :60].flatten()):
        assert stats.kstest(drawn.numpy(), "expon").pvalue > FALSE_ALARM


@pytest.mark.parametrize("other", [Purpose.ACCEPT, Purpose.RECOVERY, Purpose.TARGET])
def test_purposes_are_independent(other):
    """Chi-square of 8 x 8 cells of (draft, other) noise at one position and id; 63 dof, false alarm 0.001."""
    cells = []
    for purpose in (Purpose.DRAFT, other):
        noise = seeded(13).exponential(positions(1, 100), purpose, 400)
        cells.append((-torch.expm1(-noise) * 8).long().clamp_max(7).flatten())
    counts = torch.bincount(cells[0] * 8 + cells[1], minlength=64)
    assert stats.chisquare(counts.numpy()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_words_give_finite_positive_noise(dtype):
    """Word 0 must not give 0, which would win every race; the top word must not give inf, which never wins one."""
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]).to(torch.uint32)
    noise = streams._to_exponential(words, dtype)
    assert (noise > 0).all()
    assert noise.isfinite().all()
    assert (noise.diff() >= 0).all()
    torch.testing.assert_close(noise[:2], torch.tensor([0.5, 1.5], dtype=dtype) * 2**-32)


# Drawing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("small_support", [0.0, 1.0], ids=["whole-row", "support-only"])
def test_draws_follow_the_probabilities(dtype, small_support, monkeypatch):
    """Chi-square over 20000 positions, 5 degrees of freedom: 20.5 has the false-alarm rate 0.001."""
    monkeypatch.setattr(streams, "SMALL_SUPPORT", small_support)
    p = vector(*P6).to(dtype)
    drawn = sample(p.expand(1, 20_000, 6), seeded(21), positions(1, 20_000), Purpose.TARGET)
    counts = torch.bincount(drawn.flatten(), minlength=6)
    assert stats.chisquare(counts.numpy(), vector(*P6).numpy() * 20_000).statistic < 20.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [5, GROUP, 2 * GROUP + 6])
def test_draws_in_groups_follow_the_probabilities(columns, dtype):
    """Chi-square over 20000 positions, false alarm 0.001; of neighbouring positions too, which must be independent."""
    probs = random_probs(1, 1, columns, seed=columns, dtype=dtype)
    drawn = sample_in_groups(probs.expand(1, 20_000, columns), seeded(22), positions(1, 20_000), Purpose.DRAFT)[0]
    p = probs.flatten().double()
    assert (
        stats.chisquare(torch.bincount(drawn, minlength=columns).numpy(), (p / p.sum() * 20_000).numpy()).pvalue
        > FALSE_ALARM
    )
    halves = drawn >= columns // 2
    assert (
        stats.chi2_contingency(torch.bincount(2 * halves[:-1] + halves[1:].int(), minlength=4).view(2, 2)).pvalue
        > FALSE_ALARM
    )


def test_draws_in_groups_have_positive_probability():
    """Rows of one token, of the first and the last, and with zeros at the ends of a group."""
    probs = torch.zeros(3, 500, 3 * GROUP)
    probs[0, :, 2 * GROUP] = 1.0
    probs[1, :, [0, 3 * GROUP - 1]] = torch.tensor([0.25, 0.75])
    probs[2, :, GROUP + 1 : 2 * GROUP - 1] = 1 / (GROUP - 2)
    drawn = sample_in_groups(probs, seeded(1, 2, 3), positions(3, 500), Purpose.DRAFT)
    assert (probs.gather(-1, drawn[..., None]) > 0).all()
    assert (drawn[0] == 2 * GROUP).all()
    assert set(drawn[1].tolist()) == {0, 3 * GROUP - 1}
    tiny = torch.full((1, 1, 2 * GROUP), 1e-45)
    tiny[..., GROUP + 4] = 1.0
    assert sample_in_groups(tiny, seeded(1), positions(1, 1), Purpose.DRAFT).item() == GROUP + 4
    with pytest.raises(AssertionError, match="no positive entry"):
        sample_in_groups(torch.zeros(1, 1, 5), seeded(1), positions(1, 1), Purpose.DRAFT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("support", [1, 2, 9, 40, 299, 300])
def test_whole_row_support_only_and_sparse_draw_the_same_token(support, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(support)
    ids = torch.rand(4, 25, 300, generator=generator).argsort(-1)[..., :support]
    probs = random_probs(4, 25, support, seed=support, dtype=dtype)
    dense = torch.zeros(4, 25, 300, dtype=dtype).scatter(-1, ids, probs)
    drawn = []
    for small_support in (0.0, 1 / 8, 1.0):
        monkeypatch.setattr(streams, "SMALL_SUPPORT", small_support)
        drawn.append(sample(dense, seeded(1, 2, 3, 4), positions(4, 25), Purpose.DRAFT))
        drawn.append(sample(probs, seeded(1, 2, 3, 4), positions(4, 25), Purpose.DRAFT, ids))
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    assert (dense.gather(-1, drawn[0][..., None]) > 0).all()


def test_a_row_draws_the_same_token_alone_and_among_others():
    """One-hot, truncated and full rows go different ways; none may see the others."""
    probs = random_probs(5, 4, 203, seed=3)
    probs[0] = torch.nn.functional.one_hot(torch.tensor([7, 0, 202, 7]), 203)
    probs[1, :, 5:] = 0
    together = sample(probs, seeded(1, 2, 3, 4, 5), positions(5, 4), Purpose.TARGET)
    for row in range(5):
        for column in range(4):
            where = torch.tensor([[column]])
            alone = sample(probs[row, column][None, None], seeded(row + 1), where, Purpose.TARGET)
            assert alone.item() == together[row, column]
    assert together[0].tolist() == [7, 0, 202, 7]


def test_a_greedy_batch_computes_no_noise(monkeypatch):
    def forbidden(*args):
        raise AssertionError("noise for a row that needs none")

    monkeypatch.setattr(streams, "philox_rows", forbidden)
    monkeypatch.setattr(streams, "philox_at", forbidden)
    one_hot = torch.nn.functional.one_hot(torch.tensor([[3, 0], [9, 9]]), 10).float()
    assert sample(one_hot, seeded(1, 2), positions(2, 2), Purpose.TARGET).tolist() == [[3, 0], [9, 9]]
    ids = torch.arange(10).flip(0).expand(2, 2, 10)
    assert sample(one_hot, seeded(1, 2), positions(2, 2), Purpose.TARGET, ids).tolist() == [[6, 9], [0, 0]]


@pytest.mark.parametrize("small_support", [0.0, 1.0])
def test_of_equal_times_the_lowest_id_wins_in_every_form(small_support, monkeypatch):
    monkeypatch.setattr(streams, "SMALL_SUPPORT", small_support)
    constant = ConstantNoise(torch.tensor([0]))
    dense = torch.tensor([[[0.0, 0.2, 0.4, 0.4]]])
    assert sample(dense, constant, positions(1, 1), Purpose.DRAFT).tolist() == [[2]]
    ids = torch.tensor([[[3, 1, 2]]])
    assert sample(torch.tensor([[[0.4, 0.2, 0.4]]]), constant, positions(1, 1), Purpose.DRAFT, ids).tolist() == [[2]]


def test_tiny_probabilities_do_not_break_the_race():
    probs = torch.full((1, 1, 6), 1e-45)  # E / p overflows
    probs[..., 4] = 1.0
    assert sample(probs, seeded(1), positions(1, 1), Purpose.TARGET).item() == 4


def test_no_requests_draw_no_tokens():
    empty = Streams(torch.zeros(0, dtype=torch.int64))
    assert sample(torch.zeros(0, 3, 5), empty, torch.zeros(0, 3).long(), Purpose.DRAFT).shape == (0, 3)


# Misuse


def test_a_row_without_probability_is_refused():
    with pytest.raises(AssertionError, match="row 1 of probs has no positive entry"):
        sample(torch.tensor([[[0.5, 0.5], [0.0, 0.0]]]), seeded(1), positions(1, 2), Purpose.TARGET)


def test_bad_seeds_and_positions_are_named():
    with pytest.raises(ValueError, match=r"seeds must be int64 \[B\], got torch.float32 \(2,\)"):
        Streams(torch.zeros(2))
    with pytest.raises(ValueError, match=r"positions must be int64 \[2, N\].*got torch.int64 \(3, 1\)"):
        seeded(1, 2).uniform(torch.zeros(3, 1).long(), Purpose.ACCEPT)
    with pytest.raises(ValueError, match=r"got torch\.float32"):
        seeded(1).uniform(torch.zeros(1, 1), Purpose.ACCEPT)
