"""How many drafts of each request to verify: confidence-scheduled verification.

Verifying a draft that will be rejected costs time that other tokens could have had. A schedule looks at the drafter's
confidences c[r, k], each the chance that draft k is accepted given that all before it were, and at what a step costs
on this machine, and cuts every block to a length. With survivals a[r, k] = c[r, 1] * ... * c[r, k] a step of R requests
that verifies l[r] drafts of each is expected to yield

    tau = sum over r of (1 + a[r, 1] + ... + a[r, l_r])   tokens in   T(rows)   seconds,   throughput Theta = tau / T.

`admit_by_survival` is the DSpark paper's Algorithm 1: rows in order of survival, until Theta would fall.
`ThroughputSchedule` is the same rule for a target that computes a rectangle, R requests times the longest block, as the
in-process one does: whole columns are admitted, since the other rows of a column cost nothing extra.

Choosing has a price: all drafts are proposed, and the host waits for their confidences before it can launch the
target's pass. Where a step costs about the same whatever it verifies, that is all it would bring. A step can therefore
be settled before it is drafted (`Plan`): so many drafts of every request, all of them verified, or none.

What keeps this lossless
------------------------
Rejection sampling emits the target's law only if {draft k of a request is verified} does not depend on draft k itself.
Were it to, an unwelcome draft could be waved away and the position drawn afresh: with p = (0.7, 0.3), q = (0.5, 0.5)
and "verify only if the draft is token 0", token 0 is emitted with 0.5 + 0.5 * 0.7 = 0.85. Confidence k + 1 is computed
*from* draft k, so a rule that compares all lengths and takes the best one is of this kind. The rules here are not:

    An exploration starts with the first confidences, which depend on anchors alone. One decision admits one draft (or
    a column of them) and only then reads the confidences that follow. A decision therefore sees tokens that are
    admitted already, and none of the drafts it decides on. Given everything revealed so far, the next admitted draft is
    still a draw from q; accepting or replacing it yields p, and a position that is not admitted is drawn from p. By
    induction over the exploration all requests together emit the product of their target laws. Stopping at the first
    decision against admission is what makes this true, and sorting by survival keeps it true: within a request
    survivals never increase, ties go to the earlier position, so the next row in order is always one whose confidence
    has been revealed.

Between steps the same must hold: what was learnt from drafts that never became output must not meet their randomness
again. Drafts are drawn from noise of their absolute position; a position rejected in one step and drafted again in the
next would see the same noise, and a rule that remembers (or another request whose length it changed) carries knowledge
of it. `step_positions` therefore gives every step of a scheduled run draft noise of its own. What is settled before a
step is settled by earlier steps alone, and needs nothing more.

Source: DSpark, arXiv:2607.05147, Algorithm 1, section 5.2 and appendix A.
"""

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dspark.cost import CostTable

# Settled steps are broken by one that chooses after so many of them, at first and at most, and each time there are so
# many times the last; at most after more where choosing is so dear that a larger share of the time would go into it.
FIRST_PAUSE, LONGEST_PAUSE, LENGTHENING, SHARE_OF_LOOKS = 4, 64, 4, 0.015
# So many requests' steps have to choose before one is settled that drafts.
FIRST_LOOKS = 8
# Choosing has to yield so many times what settled steps do: the profile lacks the time of the rule itself.
LEAST_GAIN = 1.01
# Running means are over some 16 requests' steps. Steps in which nothing was seen count too, so that one that breaks a
# pause is believed, but by no more than half if it is of few requests. (Behind a settled number drafts are not seen
# either, but their confidence, given that they are reached, changes little, and its mean stays one over 16.)
MEAN_OVER, MOST_SHARE = 16, 0.5
# Accepted against expected drafts, from earlier steps: drafts that count as seen with a ratio of 1 at first, share of
# the past that is kept from step to step, and how far the ratio is believed.
PRIOR_DRAFTS, KEPT_SHARE, LARGEST_RATIO = 4.0, 0.95, 3.0
# Drafts of a step have noise of so many positions; a request may reach position 2**24.
STEP_STRIDE = 256


@dataclass(frozen=True)
class Plan:
    """What is settled about a step before anything of it is drafted.

    Attributes:
        num_drafts: proposed for each request, no more than the largest limit; 0 makes it a plain step, which runs no
            drafter.
        choose: whether the schedule is asked how many of them to verify. If not, all are, and nothing waits for their
            confidences.
    """

    num_drafts: int
    choose: bool = True


class Schedule(ABC):
    """Chooses lengths. What it may read is bound by the module docstring; a schedule of your own has to keep to it."""

    def plan(self, limits: Sequence[int]) -> Plan:
        """The coming step. By default all that may be verified is drafted, and `__call__` is asked.

        Args:
            limits: per request, the most that may be verified.

        Returns:
            0..max(limits) drafts.
        """
        return Plan(max(limits, default=0))

    @abstractmethod
    def __call__(self, confidence: np.ndarray, limits: Sequence[int]) -> list[int]:
        """Drafts to verify.

        Args:
            confidence: [B, K] float64 in [0, 1]; entry k is the chance that draft k is accepted given that all drafts
                before it were.
            limits: [B], the most that may be verified of each request, 0..K.

        Returns:
            [B] lengths, 0..limits.
        """

    def observe(self, accepted: Sequence[int], confidence: np.ndarray) -> None:  # noqa: B027 (most keep no record)
        """What became of a step that drafted. Nothing needs to be done with it.

        Args:
            accepted: [B] drafts that were kept.
            confidence: [B, K] float64, of all that were proposed.
        """


@dataclass(frozen=True)
class StaticThreshold(Schedule):
    """Verify a draft while its survival is at least `min_survival`; 0 verifies everything.

    Draft k's survival depends on the drafts before it only, so the rule is lossless.

    Raises:
        ValueError: `min_survival` is outside 0..1.
    """

    min_survival: float

    def __post_init__(self) -> None:
        if not 0 <= self.min_survival <= 1:
            raise ValueError(
                f"min_survival={self.min_survival} is no probability; expected 0 (verify everything) to 1 (nothing "
                "that is not certain)"
            )

    def __call__(self, confidence: np.ndarray, limits: Sequence[int]) -> list[int]:
        kept = (survivals(confidence) >= self.min_survival).sum(1)
        return [int(min(length, limit)) for length, limit in zip(kept, limits, strict=True)]


class ThroughputSchedule(Schedule):
    """Verify as many drafts as raises expected tokens per second on the profiled machine.

    Columns are admitted one after another (a target that computes a rectangle), or single rows with `ragged`. With
    `adaptive` the survivals of *earlier* steps are averaged, for two uses: a column that does not pay by itself is
    admitted where it is expected to with those behind it (a profiled curve has steps, on which the plain rule would
    stop too early); and while the best number of drafts for every request, with 0 among them, yields more than choosing
    did in the steps that chose, steps are settled at that number, except for one now and then to see whether that has
    changed. Survivals are then also corrected by the ratio of accepted to expected drafts, so that a drafter without
    calibration is not trusted for long. Without it this is Algorithm 1, and keeps no state.

    An object holds the averages of one run: use a new one for each.
    """

    def __init__(self, cost: CostTable, *, ragged: bool = False, adaptive: bool = True) -> None:
        self.cost, self.ragged, self.adaptive = cost, ragged, adaptive
        # Of every step's own work little is done in numpy: on a few numbers its calls take far longer than the sums.
        self._survival: list[float] = []  # [K] running mean by position; empty before the first step
        self._settled_times: dict[tuple[int, int], list[float]] = {}
        self._since_seen = self._since_look = 0  # steps: confidences were seen, a step chose
        # Running means over steps that chose, of tokens and seconds per request: as it was, and settled beforehand.
        self._compared, self._looks = np.zeros(4), 0
        self._until_look, self._pause = 0, FIRST_PAUSE
        self._plan, self._verified = Plan(0), [0]  # of the step
        self._limits: Sequence[int] = [0]  # of the last step that chose
        self._accepted = self._predicted = 0.0  # drafts, over earlier steps

    def plan(self, limits: Sequence[int]) -> Plan:
        longest = max(limits, default=0)
        self._since_seen, self._since_look = self._since_seen + 1, self._since_look + 1
        self._plan = Plan(longest)
        if self._until_look and longest:
            self._until_look -= 1
            settled, _ = self._settled(limits, longest)
            if self._may_settle(settled):
                self._plan = settled
        self._verified = [min(self._plan.num_drafts, limit) for limit in limits]
        return self._plan

    def __call__(self, confidence: np.ndarray, limits: Sequence[int]) -> list[int]:
        survival = np.minimum(survivals(confidence) * self.ratio, 1.0)
        num_requests, self._limits = len(limits), limits
        if self.ragged:
            rows = np.arange(num_requests, num_requests + sum(limits) + 1)
            self._verified = admit_by_survival(survival, limits, self.cost.step_seconds(num_requests, rows))
        else:
            offered = _first(limits, survival.shape[1])
            rows = num_requests * np.arange(1, survival.shape[1] + 2)
            seconds = self.cost.step_seconds(num_requests, rows)
            width = admit_columns((survival * offered).sum(0), seconds, num_requests, self._expected())
            self._verified = [min(width, limit) for limit in limits]
        return self._verified

    def observe(self, accepted: Sequence[int], confidence: np.ndarray) -> None:
        if not self.adaptive:
            return
        survival = survivals(confidence)
        num_requests, proposed = survival.shape
        seen = (survival.sum(0) / num_requests).tolist()
        self._survival = self._survival or seen  # the first step is compared with what it says itself
        if self._plan.choose:
            self._compare(np.minimum(survival * self.ratio, 1.0), _first(self._verified, proposed))
        self._remember(seen, num_requests)
        all_verified = min(self._verified) == proposed
        expected = num_requests * sum(seen) if all_verified else survival[_first(self._verified, proposed)].sum()
        self._accepted = KEPT_SHARE * self._accepted + sum(accepted)
        self._predicted = KEPT_SHARE * self._predicted + float(expected)

    @property
    def ratio(self) -> float:
        """Accepted drafts to expected ones, from earlier steps."""
        found = (self._accepted + PRIOR_DRAFTS) / (self._predicted + PRIOR_DRAFTS)
        return min(max(found, 1 / LARGEST_RATIO), LARGEST_RATIO)

    def _settled(self, limits: Sequence[int], longest: int) -> tuple[Plan, float]:
        """The best of the plans that choose nothing, by earlier steps, and its seconds."""
        seconds = self._times(len(limits), min(longest, len(self._survival)))
        ratio, fewest = self.ratio, min(limits)
        tokens, best = 1.0, 0
        best_rate = tokens / seconds[0]
        for k, survival in enumerate(self._survival[: len(seconds) - 1], start=1):
            share = 1.0 if k <= fewest else sum(limit >= k for limit in limits) / len(limits)
            tokens += share * min(survival * ratio, 1.0)
            if tokens / seconds[k] > best_rate:
                best, best_rate = k, tokens / seconds[k]
        return Plan(best, choose=False), seconds[best]

    def _times(self, num_requests: int, num_drafts: int) -> list[float]:
        """Seconds of a plain step, and of those settled at 1, 2, ... drafts."""
        key = num_requests, num_drafts
        if key not in self._settled_times:
            settled = self.cost.settled_seconds(num_requests, num_drafts)
            self._settled_times[key] = [self.cost.plain_seconds(num_requests), *settled.tolist()]
        return self._settled_times[key]

    def _may_settle(self, plan: Plan) -> bool:
        return self._looks >= FIRST_LOOKS or plan.num_drafts == 0

    def _compare(self, survival: np.ndarray, verified: np.ndarray) -> None:
        """Whether choosing pays: this step, as it was chosen, with the same step settled beforehand."""
        num_requests, longest = survival.shape
        settled, seconds = self._settled(self._limits, longest)
        rows = num_requests + (verified.sum() if self.ragged else num_requests * verified.sum(1).max())
        kept = _first(np.minimum(self._limits, settled.num_drafts), longest)
        tokens = num_requests + np.array([survival[verified].sum(), survival[kept].sum()])
        took = float(self.cost.step_seconds(num_requests, np.asarray(rows))), seconds
        self._looks += num_requests
        share = max(_share(num_requests, self._since_look), num_requests / self._looks)
        self._since_look = 0
        self._compared += share * (np.array([*tokens, *took]) / num_requests - self._compared)
        of_choice, of_settled = self._compared[:2] / self._compared[2:]
        if of_choice >= LEAST_GAIN * of_settled:
            self._until_look, self._pause = 0, FIRST_PAUSE
        elif self._may_settle(settled):
            longest_pause = max(LONGEST_PAUSE, int((took[0] / seconds - 1) / SHARE_OF_LOOKS))
            self._until_look, self._pause = self._pause, min(LENGTHENING * self._pause, longest_pause)

    def _expected(self) -> np.ndarray | None:
        """[K]: the confidence by position that earlier steps had, where it was reached."""
        if not self._survival:
            return None
        survival = np.array(self._survival)
        reached = np.concatenate([[1.0], survival[:-1]])
        return survival / np.maximum(reached, np.finfo(np.float64).tiny)

    def _remember(self, seen: list[float], num_requests: int) -> None:
        known, behind = self._survival[: len(seen)], self._survival[len(seen) :]
        if len(known) < len(seen):
            self._survival = seen
        else:
            share = _share(num_requests, self._since_seen)
            new = [old + share * (now - old) for old, now in zip(known, seen, strict=True)]
            # Drafts that were not proposed are as likely as before once they are reached.
            change = new[-1] / max(known[-1], sys.float_info.min)
            self._survival = new + [each * change for each in behind]
        self._since_seen = 0


def _share(num_requests: int, steps: int) -> float:
    """Of what is seen of so many requests in a running mean that was last brought up to date `steps` steps ago."""
    share = num_requests / (num_requests + MEAN_OVER)
    return max(share, min(1 - (1 - share) ** max(steps, 1), MOST_SHARE))


def _first(lengths: Sequence[int] | np.ndarray, width: int) -> np.ndarray:
    """[B, width] bool: the first `lengths` [B] entries of each row."""
    return np.arange(width) < np.asarray(lengths)[:, None]


def survivals(confidence: np.ndarray) -> np.ndarray:
    """[B, K] conditional confidences -> [B, K] chances that the draft and all before it are accepted."""
    return np.cumprod(confidence.astype(np.float64), axis=1)


def admit_by_survival(survival: np.ndarray, limits: Sequence[int], seconds: np.ndarray) -> list[int]:
    """The paper's Algorithm 1: admit single drafts, the likeliest to survive first, until throughput would fall.

    Args:
        survival: [B, K], not increasing along a row.
        limits: [B], the most that may be verified of each request.
        seconds: [sum(limits) + 1], step time with 0, 1, ... drafts admitted.

    Returns:
        [B] lengths.
    """
    num_requests = len(limits)
    request, k = np.nonzero(_first(limits, survival.shape[1]))
    order = np.lexsort((request, k, -survival[request, k]))
    tokens = num_requests + np.concatenate([[0.0], np.cumsum(survival[request, k][order])])
    rates = tokens / seconds
    # The first that does not raise the rate ends it. What stands behind it was computed too, and decides nothing.
    admitted = int(np.argmax(np.append(rates[1:] <= rates[:-1], True)))
    return np.bincount(request[order[:admitted]], minlength=num_requests).tolist()


def admit_columns(
    columns: np.ndarray, seconds: np.ndarray, num_requests: int, expected: np.ndarray | None = None
) -> int:
    """The same for whole columns, draft k of every request at once.

    Args:
        columns: [K], survivals of draft k summed over the requests that may verify it. Entry k is read only after
            the drafts before k were admitted.
        seconds: [K + 1], step time with 0..K drafts of every request.
        num_requests: R.
        expected: [>= K] confidences by position from earlier steps, or None. With them a column is also admitted where
            it pays together with columns behind it, whose survival is the known one times these.

    Returns:
        Drafts to verify of every request, 0..K.
    """
    tokens = float(num_requests)
    for k in range(len(columns)):
        rate = tokens / seconds[k]
        ahead = [columns[k]]
        if expected is not None:
            ahead = list(columns[k] * np.cumprod([1.0, *expected[k + 1 : len(columns)]]))
        rates = (tokens + np.cumsum(ahead)) / seconds[k + 1 : k + 1 + len(ahead)]
        if rates.max() <= rate:
            return k
        tokens += float(columns[k])
    return len(columns)


def step_positions(anchor_positions: torch.Tensor, num_draft_tokens: int) -> torch.Tensor:
    """The positions by which the drafts of one step look up their noise, shared with no other step of the request.

    Args:
        anchor_positions: [B] int64, 0..2**32 / STEP_STRIDE - 1; every step has another.
        num_draft_tokens: K.

    Returns:
        [B, K] int64: anchor position * STEP_STRIDE + draft, for `Purpose.DRAFT` alone. A run that looks drafts up so
        must do it in every step, since these numbers are also absolute positions further on.
    """
    assert num_draft_tokens <= STEP_STRIDE, f"{num_draft_tokens} drafts would meet the noise of the next step"
    return anchor_positions[:, None] * STEP_STRIDE + torch.arange(num_draft_tokens, device=anchor_positions.device)


def parse_schedule(text: str | None) -> Schedule | None:
    """A schedule from the command line: "threshold:0.3", or the cost table that `dspark profile` wrote. None is none.

    Raises:
        ValueError: neither, or the file is no cost table.
    """
    if text is None:
        return None
    kind, _, value = text.partition(":")
    if kind == "threshold":
        try:
            return StaticThreshold(float(value))
        except ValueError:
            raise ValueError(
                f"--schedule {text}: {value!r} is no probability; expected threshold:P with P from 0 (verify every "
                "draft) to 1 (none that is not certain)"
            ) from None
    if not Path(text).is_file():
        raise ValueError(
            f"--schedule {text!r} is neither threshold:P nor a file; `dspark profile --out FILE` makes a cost table"
        )
    return ThroughputSchedule(CostTable.load(text))


def describe_schedule(text: str | None) -> str | None:
    """`text` for a report; of a file its name, which is the same in every folder, and the start of its SHA-256."""
    if text is None or not Path(text).is_file():
        return text
    return f"{Path(text).name} (sha256 {hashlib.sha256(Path(text).read_bytes()).hexdigest()[:12]})"
