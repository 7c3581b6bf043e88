"""Random numbers that belong to a request, and the draw that uses them.

A number is a function of (request seed, absolute position, purpose, index), computed by Philox. Nothing advances, so
a request's numbers do not depend on the batch around it, on the block length, on padding, or on how often it was
preempted. No two purposes share a number: had the draw of a draft and the draw that recovers from its rejection the
same noise, the emitted token would lean towards the drafter.

`sample` draws by the exponential race: with E_v independent unit exponentials, argmin E_v / p_v is distributed as p.
E_v is tied to the *target* token id v, so that a distribution over a subset of ids draws the same token as its dense
form. Whatever is emitted is drawn so, and so are drafts from a list of candidates.

`sample_in_groups` draws drafts from a whole draft vocabulary. The race is between groups of GROUP consecutive columns,
with one exponential a group; inside the winner one uniform number is looked up in the cumulative distribution. That
is the same law for a fraction of the noise, which is what a drafter's kernel spends most of its time on otherwise. The
token is not the one that `sample` would draw, and depends on which columns share a group.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, unique
from functools import cached_property

import torch

from dspark.kernels.markov import GROUP
from dspark.kernels.philox import PER_GROUP, PER_TOKEN, SINGLE, WORD, philox_at, philox_rows
from dspark.sampling.params import SamplingParams

# A row whose support is at most this share of the vocabulary computes noise for its support only. One id costs a
# whole counter there and a quarter of one in a dense row, and gathering costs about as much again.
SMALL_SUPPORT = 1 / 8


@unique
class Purpose(IntEnum):
    """What a random number decides; a word of the Philox counter."""

    DRAFT = 0
    ACCEPT = 1
    RECOVERY = 2
    TARGET = 3


@dataclass(frozen=True)
class Streams:
    """The random numbers of a batch of requests.

    Attributes:
        seeds: [B] int64, one per request; equal seeds give equal numbers.

    Raises:
        ValueError: `seeds` is not int64 [B].
    """

    seeds: torch.Tensor

    def __post_init__(self) -> None:
        if self.seeds.ndim != 1 or self.seeds.dtype != torch.int64:
            raise ValueError(f"seeds must be int64 [B], got {self.seeds.dtype} {tuple(self.seeds.shape)}")

    @classmethod
    def for_params(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> "Streams":
        """One stream per element of `params`; a seed of None is drawn from the operating system."""
        seeds = [secrets.randbits(64) - 2**63 if each.seed is None else each.seed for each in params]
        return cls(torch.tensor(seeds, dtype=torch.int64, device=device))

    def __len__(self) -> int:
        return len(self.seeds)

    def rows(self, index: torch.Tensor) -> "Streams":
        """The requests that `index` selects: [n] int64 or a [B] bool mask."""
        return replace(self, seeds=self.seeds[index])

    def concat(self, other: "Streams") -> "Streams":
        """These requests, then those of `other`."""
        return replace(self, seeds=torch.cat([self.seeds, other.seeds]))

    def uniform(self, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        """One uniform number per position.

        Args:
            positions: [B, N] int64; absolute positions, 0..2**32-1.
            purpose: what the numbers decide.

        Returns:
            [B, N] float64 in [0, 1), multiples of 2**-53.

        Raises:
            ValueError: `positions` has another number of rows than `seeds`.
        """
        key, counter = self._philox_rows(positions, purpose, SINGLE)
        high, low = philox_rows(key, counter, 2).to(torch.float64).unbind(-1)
        bits = (high / 2**5).floor_() * 2**26 + (low / 2**6).floor_()
        return (bits / 2**53).view(positions.shape)

    def exponential(
        self, positions: torch.Tensor, purpose: Purpose, vocab_size: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Unit exponentials of every token id at every position.

        Args:
            positions: [B, N] int64; absolute positions, 0..2**32-1.
            purpose: what the numbers decide.
            vocab_size: number of token ids; the first V numbers do not depend on V.
            dtype: float32 or float64. Both come from the same 32 random bits.

        Returns:
            [B, N, V], > 0 and finite. The smallest value is near 2**-33, so that a draw is off by at most about
            2**-33 per token of smaller probability.

        Raises:
            ValueError: `positions` has another number of rows than `seeds`.
        """
        key, counter = self._philox_rows(positions, purpose, PER_TOKEN)
        return _to_exponential(philox_rows(key, counter, vocab_size), dtype).view(*positions.shape, vocab_size)

    def exponential_at(
        self, positions: torch.Tensor, purpose: Purpose, ids: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The numbers of `exponential` for chosen token ids only, bit for bit.

        Args:
            positions: [B, N] int64; absolute positions, 0..2**32-1.
            purpose: what the numbers decide.
            ids: [B, N, k] int64, token ids of the target.
            dtype: float32 or float64.

        Returns:
            [B, N, k].

        Raises:
            ValueError: `positions` has another number of rows than `seeds`, or `ids` than `positions`.
        """
        key, counter = self._philox_rows(positions, purpose, PER_TOKEN)
        return _to_exponential(philox_at(key, counter, ids.flatten(0, 1)), dtype).view(ids.shape)

    def exponential_of_groups(
        self, positions: torch.Tensor, purpose: Purpose, num_groups: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Unit exponentials of groups of columns; none of them is a number of `exponential`.

        Args:
            positions: [B, N] int64; absolute positions, 0..2**32-1.
            purpose: what the numbers decide.
            num_groups: how many; the first G numbers do not depend on G.
            dtype: float32 or float64.

        Returns:
            [B, N, num_groups], > 0 and finite.

        Raises:
            ValueError: `positions` has another number of rows than `seeds`.
        """
        key, counter = self._philox_rows(positions, purpose, PER_GROUP)
        return _to_exponential(philox_rows(key, counter, num_groups), dtype).view(*positions.shape, num_groups)

    def _philox_rows(self, positions: torch.Tensor, purpose: Purpose, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B*N, 2] and counter words [B*N, 3] of all positions."""
        if positions.ndim != 2 or len(positions) != len(self.seeds) or positions.dtype != torch.int64:
            raise ValueError(
                f"positions must be int64 [{len(self.seeds)}, N], one row per request,"
                f" got {positions.dtype} {tuple(positions.shape)}"
            )
        position = positions.flatten()
        # Filled on the device: a copy from the host could not be captured in a CUDA graph.
        tail = (torch.full_like(position, word) for word in (int(purpose), kind))
        key = self._keys[:, None].expand(*positions.shape, 2).reshape(-1, 2)
        return key, torch.stack([position, *tail], -1)

    @cached_property
    def _keys(self) -> torch.Tensor:
        """[B, 2]: the words of the seeds."""
        return torch.stack([self.seeds & WORD, self.seeds >> 32 & WORD], -1)


def _to_exponential(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unit exponentials -log1p(-u) of uint32 words, u in the middle of the word's cell: small values stay resolved."""
    negative_u = words.to(dtype).add_(0.5).mul_(-(2.0**-32))
    # In float32 the top cells round to u = 1, whose logarithm is infinite.
    return negative_u.clamp_min_(-1 + torch.finfo(dtype).eps / 2).log1p_().neg_()


def sample(
    probs: torch.Tensor,
    streams: Streams,
    positions: torch.Tensor,
    purpose: Purpose,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per position.

    Args:
        probs: [B, N, V] float32 or float64, >= 0; rows sum to 1. With `ids`, [B, N, k].
        streams: the requests' random numbers.
        positions: [B, N] int64; absolute position of the token drawn.
        purpose: what the draw is for.
        ids: [B, N, k] int64, target token id of each column, distinct within a row; None if column v is token v.

    Returns:
        [B, N] int64 target token ids of positive probability, the same with `ids` as from the dense form. A row with
        a single such token needs no noise.

    Raises:
        ValueError: `positions` and `streams` disagree in the number of requests.
        AssertionError: a row has no positive probability.

    Source: the exponential race; vLLM 0.33 draws the same way, v1/sample/ops/topk_topp_sampler.py `random_sample`.
    """
    batch, num_positions, width = probs.shape
    rows, flat_ids = probs.reshape(-1, width), None if ids is None else ids.reshape(-1, width)
    if num_positions != 1:
        streams = streams.rows(torch.arange(batch, device=probs.device).repeat_interleave(num_positions))
        positions = positions.reshape(-1, 1)
    support = (rows > 0).sum(-1).tolist()  # decides which way each row goes
    assert all(support), f"row {support.index(0)} of probs has no positive entry: nothing can be drawn"

    small = [count == 1 or count <= width * SMALL_SUPPORT for count in support]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=probs.device)
    for is_small, race in ((True, _race_on_support), (False, _race)):
        chosen = [row for row, found in enumerate(small) if found == is_small]
        if len(chosen) == len(rows):  # the common case needs no copy
            tokens = race(rows, streams, positions, purpose, flat_ids)
        elif chosen:
            some = torch.tensor(chosen).to(probs.device, non_blocking=True)
            some_ids = None if flat_ids is None else flat_ids[some]
            tokens[some] = race(rows[some], streams.rows(some), positions[some], purpose, some_ids)
    return tokens.view(batch, num_positions)


def sample_in_groups(probs: torch.Tensor, streams: Streams, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Draw one column per position: its group by an exponential race, the column within by inversion.

        group     argmin_g E_g / S_g, S_g the sum of the group's probabilities; the lowest among equals
        column    the first of the group at which the sum of its probabilities exceeds u S_group

    E are `exponential_of_groups` and u is `uniform`, of the position and the purpose.

    Args:
        probs: [B, N, D] float32 or float64, >= 0; rows sum to 1.
        streams: the requests' random numbers.
        positions: [B, N] int64; absolute position of the token drawn.
        purpose: what the draw is for.

    Returns:
        [B, N] int64 columns of positive probability, distributed as `probs`.

    Raises:
        ValueError: `positions` disagrees with `probs`, or with `streams` in the number of requests.
        AssertionError: a row has no positive probability.
    """
    assert (probs > 0).any(-1).all(), "a row of probs has no positive entry: nothing can be drawn"
    noise = streams.exponential_of_groups(positions, purpose, -(-probs.shape[-1] // GROUP), probs.dtype)
    return draw_in_groups(probs, noise, streams.uniform(positions, purpose))


def draw_in_groups(probs: torch.Tensor, noise: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The draws [...] of `sample_in_groups` from probs [..., D] with the noise [..., G] and u [...] of their positions.
    Rows are not looked at: one of zeros or NaN gives some column or other. ValueError: there are more or fewer of them
    than positions."""
    if not probs.shape[:-1] == noise.shape[:-1] == u.shape:
        raise ValueError(f"{tuple(u.shape)} positions for {tuple(probs.shape[:-1])} draws: some would share numbers")
    if missing := -probs.shape[-1] % GROUP:
        probs = torch.nn.functional.pad(probs, (0, missing))
    grouped = probs.unflatten(-1, (-1, GROUP))
    group = (noise / grouped.sum(-1)).argmin(-1)
    chosen = grouped.gather(-2, group[..., None, None].expand(*group.shape, 1, GROUP))[..., 0, :]
    # Scans of some devices round sums apart that nothing was added to: columns without probability have no part in it.
    reached = chosen.cumsum(-1).double().masked_fill(chosen <= 0, 0.0)
    goal = u * reached.amax(-1)  # u < 1, so that the largest sum always exceeds it
    within = (reached > goal[..., None]).int().argmax(-1)
    return group * GROUP + within


def _race(
    probs: torch.Tensor, streams: Streams, positions: torch.Tensor, purpose: Purpose, ids: torch.Tensor | None
) -> torch.Tensor:
    """Winners [R] of rows [R, V] with noise for every column."""
    if ids is None:
        return streams.exponential(positions, purpose, probs.shape[-1], probs.dtype)[:, 0].div_(probs).argmin(-1)
    times = streams.exponential_at(positions, purpose, ids[:, None], probs.dtype)[:, 0].div_(probs)
    # Of equal times the lowest id wins, as in the dense form, in whatever order the ids come.
    return ids.masked_fill(times > times.amin(-1, keepdim=True), torch.iinfo(ids.dtype).max).amin(-1)


def _race_on_support(
    probs: torch.Tensor, streams: Streams, positions: torch.Tensor, purpose: Purpose, ids: torch.Tensor | None
) -> torch.Tensor:
    """Winners [R] of rows [R, V], with noise only where probs > 0; the tokens of `_race`, bit for bit."""
    row, column = probs.nonzero(as_tuple=True)
    token = column if ids is None else ids[row, column]
    if len(row) == len(probs):
        return token
    times = streams.rows(row).exponential_at(positions[row], purpose, token[:, None, None], probs.dtype)[:, 0, 0]
    times /= probs[row, column]
    best = times.new_full((len(probs),), float("inf")).scatter_reduce_(0, row, times, "amin")
    winners = times == best[row]
    none = torch.iinfo(torch.int64).max
    tokens = torch.full((len(probs),), none, device=probs.device)
    return tokens.scatter_reduce_(0, row, token.masked_fill(~winners, none), "amin")
