"""Sampling parameters, and the distribution they make of logits.

The same `to_distribution` serves the target and the drafter, so that the p and the q of rejection sampling always
mean the distribution a token is really drawn from. The order is that of vLLM's V1 sampler: temperature, min-p, top-k,
top-p, each on the distribution that the one before it left.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

import numpy as np
import torch

SEED_RANGE = range(-(2**63), 2**63)

# Largest probabilities looked at before a top-p row is sorted whole. Taking these costs a seventh of the sort at
# 49152 tokens, and they hold the nucleus of all but very flat distributions.
NUCLEUS_WIDTH = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        temperature: 0 takes the largest logit, the lowest id among equals, and leaves the other fields without effect.
        top_k: keep the logits that are at least the k-th largest, so that ties with it stay; 0 keeps all.
        top_p: keep the smallest prefix of the tokens in falling order of probability whose mass reaches this, at
            least one; the lower id comes first among equals.
        min_p: keep the tokens with at least this share of the largest probability.
        seed: key of the request's random streams; None draws one from the operating system.
        max_new_tokens: length limit, end-of-text included.
        stop_token_ids: tokens that end the request, besides the model's own end-of-text.
        ignore_eos: go on after the model's end-of-text tokens.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(
            _is_real(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number >= 0; 0 takes the most likely token",
        )
        _require(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer >= 0; 0 keeps all tokens")
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]; 1 keeps all tokens")
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]; 0 keeps all tokens")
        _require(
            self.seed is None or (_is_int(self.seed) and self.seed in SEED_RANGE),
            "seed",
            self.seed,
            "a 64-bit signed integer, or None to draw one",
        )
        _require(
            _is_int(self.max_new_tokens) and self.max_new_tokens >= 1,
            "max_new_tokens",
            self.max_new_tokens,
            "an integer >= 1",
        )
        _require(
            all(_is_int(token) and token >= 0 for token in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids >= 0; text is not accepted here",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}; got {value!r}")


@dataclass(frozen=True)
class SamplingTensors:
    """The fields of a batch of `SamplingParams` that shape its distributions; row b belongs to request b.

    Attributes:
        temperature: [B] float64.
        top_k: [B] int64.
        top_p: [B] float64.
        min_p: [B] float64.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def stack(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> "SamplingTensors":
        """Collect a batch; one row per element of `params`."""

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([getattr(each, name) for each in params], dtype=dtype, device=device)

        return cls(
            temperature=column("temperature", torch.float64),
            top_k=column("top_k", torch.int64),
            top_p=column("top_p", torch.float64),
            min_p=column("min_p", torch.float64),
        )

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def greedy(self) -> torch.Tensor:
        """[B] bool: the rows that take the most likely token."""
        return self.temperature == 0

    @cached_property
    def host(self) -> np.ndarray:
        """[4, B] float64, the fields on the host. Read from the device once, though every position decides by them."""
        return torch.stack([getattr(self, f.name).double() for f in fields(self)]).cpu().numpy()

    @property
    def all_greedy(self) -> bool:
        """Whether no row needs random numbers."""
        return not self.host[0].any()

    def rows(self, index: torch.Tensor) -> "SamplingTensors":
        """The requests that `index` selects: [n] int64 or a [B] bool mask."""
        return SamplingTensors(*(getattr(self, f.name)[index] for f in fields(self)))

    def concat(self, other: "SamplingTensors") -> "SamplingTensors":
        """These requests, then those of `other`."""
        return SamplingTensors(*(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))

    def without_truncation(self) -> "SamplingTensors":
        """The same temperatures with top-k, top-p and min-p off."""
        return replace(
            self,
            top_k=torch.zeros_like(self.top_k),
            top_p=torch.ones_like(self.top_p),
            min_p=torch.zeros_like(self.min_p),
        )


def to_distribution(logits: torch.Tensor, params: SamplingTensors | SamplingParams) -> torch.Tensor:
    """Turn logits into the distribution that a request's tokens are drawn from.

    Args:
        logits: [B, ..., V] floating point; finite or -inf, at least one finite entry in each row.
        params: one row per request, or one `SamplingParams` for all of them.

    Returns:
        [B, ..., V]; float64 for float64 logits, float32 otherwise. Each row sums to 1 and depends on its own logits
        and parameters only. With temperature 0 it is 1 at the largest logit, at the lowest id among equals, and 0
        elsewhere.

    Raises:
        ValueError: a row holds NaN or +inf, or nothing finite; or `params` has another number of rows than `logits`.

    Source: order of vLLM 0.33, v1/sample/sampler.py; its top-k also keeps ties with the k-th largest logit.
    """
    num_requests, vocab_size = logits.shape[0], logits.shape[-1]
    if isinstance(params, SamplingParams):
        params = SamplingTensors.stack([params] * num_requests, logits.device)
    rows = widened(logits).reshape(-1, vocab_size)
    soften = Softening(params, vocab_size, rows.dtype, num_requests, len(rows) // max(num_requests, 1))
    if not len(rows):
        return rows.view(logits.shape)
    probs = soften(rows)
    soften.check()
    return probs.view(logits.shape)


def widened(logits: torch.Tensor) -> torch.Tensor:
    """Logits in the dtype of their distribution."""
    return logits if logits.dtype == torch.float64 else logits.float()


class Softening:
    """`to_distribution` for one batch, vocabulary and dtype, any number of times. Whatever the host has to know of the
    parameters is decided here, once, and but for top-p it reads nothing of logits before `check`.
    """

    def __init__(
        self, params: SamplingTensors, vocab_size: int, dtype: torch.dtype, num_requests: int, repeats: int = 1
    ) -> None:
        """`repeats`: rows of each request, one behind the other. ValueError: `params` has other requests."""
        if len(params) != num_requests:
            raise ValueError(f"logits has {num_requests} requests, but the sampling parameters have {len(params)} rows")

        def column(values: torch.Tensor) -> torch.Tensor:
            return (values if repeats == 1 else values.repeat_interleave(repeats))[:, None]

        temperature, top_k, top_p, min_p = params.host
        warm, limits = temperature > 0, torch.finfo(dtype)
        self.peaks: list[torch.Tensor] = []
        self.all_greedy = params.all_greedy
        self.greedy = None if warm.all() else column(params.greedy)
        # Above 0 and finite in the logits' dtype: 0 / 0 and -inf / inf would be NaN.
        self.temperature = column(params.temperature.to(dtype).clamp(limits.tiny, limits.max))
        self.cuts: list[tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor | None]] = []
        few = warm & (top_k > 0) & (top_k < vocab_size)
        for keep, values, active in (
            (_keep_min_p, params.min_p, warm & (min_p > 0)),
            (partial(_keep_top_k, largest=int((top_k * few).max(initial=0))), params.top_k, few),
            (_keep_top_p, params.top_p, warm & (top_p < 1)),
        ):
            if active.all():
                self.cuts.append((keep, column(values), None))
            elif active.any():
                mask = torch.from_numpy(active).to(values.device, non_blocking=True)
                self.cuts.append((keep, column(values.masked_fill(~mask, 0)), column(mask)))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Distributions [R, V] of rows [R, V]; of those that `check` refuses, anything."""
        peak = rows.amax(-1, keepdim=True)
        self.peaks.append(peak)
        if self.all_greedy:
            return _most_likely(rows)
        probs = (rows - peak).div_(self.temperature).softmax(-1)
        for keep, values, mask in self.cuts:
            kept = _renormalise(probs, keep(probs, values))
            probs = kept if mask is None else torch.where(mask, kept, probs)
        return probs if self.greedy is None else torch.where(self.greedy, _most_likely(rows), probs)

    def check(self) -> None:
        """Refuse logits of which no distribution can be made (ValueError); waits for the device."""
        peaks = torch.cat(self.peaks, 1).flatten()
        finite = peaks.isfinite()
        if not finite.all():
            bad = int((~finite).nonzero()[0, 0])
            raise ValueError(
                f"logits row {bad} (of {len(peaks)}, requests times positions) has the maximum {peaks[bad].item()},"
                " expected a finite one: NaN or +inf means that the model's forward pass overflowed, -inf that a mask"
                " removed every token"
            )


def _most_likely(rows: torch.Tensor) -> torch.Tensor:
    """One-hot at the first maximum of each row [R, V]."""
    return torch.zeros_like(rows).scatter_(-1, rows.argmax(-1, keepdim=True), 1.0)


def _renormalise(probs: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Rows [R, V] cut to the mask [R, V], each summing to 1 again."""
    kept = probs.masked_fill(~keep, 0.0)
    return kept.div_(kept.sum(-1, keepdim=True))


def _keep_min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Mask [R, V] of rows [R, V], min_p [R, 1]."""
    return probs >= probs.amax(-1, keepdim=True) * min_p.to(probs.dtype)


def _keep_top_k(probs: torch.Tensor, top_k: torch.Tensor, largest: int) -> torch.Tensor:
    """Mask [R, V] of rows [R, V], top_k [R, 1] up to `largest`, those below 1 as 1; ties with the k-th stay."""
    return probs >= probs.topk(largest, dim=-1).values.gather(-1, (top_k - 1).clamp(0, largest - 1))


def _keep_top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask of the nucleus, probs [R, V] and top_p [R, 1]; from sorted values only, so that no permutation is built."""
    cutoff, kept_at_cutoff = _nucleus_cutoff(probs.topk(min(NUCLEUS_WIDTH, probs.shape[-1]), dim=-1).values, top_p)
    wider = cutoff.isnan()[:, 0]  # the largest probabilities did not reach top_p
    if wider.any():
        cutoff[wider], kept_at_cutoff[wider] = _nucleus_cutoff(_falling(probs[wider]), top_p[wider], whole=True)
    tied = probs == cutoff
    # Where more tokens tie at the cutoff than fit, the lower ids stay.
    return (probs > cutoff) | (tied & (tied.cumsum(-1) <= kept_at_cutoff))


def _falling(probs: torch.Tensor) -> torch.Tensor:
    """Rows [R, V] in falling order. On a CPU numpy does it four times as fast: torch also builds the permutation."""
    if probs.device.type == "cpu":
        return torch.from_numpy(np.sort(probs.detach().numpy(), axis=-1)).flip(-1)
    return probs.sort(dim=-1, descending=True).values


def _nucleus_cutoff(
    ordered: torch.Tensor, top_p: torch.Tensor, *, whole: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest probability kept, and how many tokens of exactly that probability are.

    Args:
        ordered: [R, n], the n largest probabilities in falling order.
        top_p: [R, 1] float64.
        whole: whether `ordered` is all of the row; rounding may then leave its sum short of top_p, and all of it is
            kept.

    Returns:
        cutoff [R, 1], NaN where n values do not reach top_p; count [R, 1] int64.
    """
    mass = ordered.cumsum(-1, dtype=torch.float64)
    size = (mass < top_p).sum(-1, keepdim=True) + 1
    short = size > ordered.shape[-1]
    size = size.clamp_max(ordered.shape[-1])
    cutoff = ordered.gather(-1, size - 1)
    count = size - (ordered > cutoff).sum(-1, keepdim=True)
    return cutoff if whole else cutoff.masked_fill(short, float("nan")), count
