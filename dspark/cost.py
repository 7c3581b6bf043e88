"""What a step costs on one machine, by requests and by rows that the target verifies: what `dspark profile` writes.

A step of the generation loop was timed for several numbers of requests R and, for each, several numbers of target rows
per request (1 + drafts verified), in two ways: steps that choose how many drafts to verify, which propose all and wait
for their confidences, and steps settled beforehand, which propose what they verify and don't wait. Between the points
time is interpolated linearly in both. Measured times scatter, and a dip would look like rows that are cheaper than
none, so along the rows each curve is first replaced by the closest one that never falls (least squares, pool adjacent
violators). And since a step that chooses does all that one settled at the same number does, and more, none that is
settled counts as dearer.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dspark.terminal import count

FORMAT = "dspark step cost 1"
T = TypeVar("T", float, np.ndarray)


@dataclass(frozen=True)
class CostPoint:
    """Time of one kind of step.

    Attributes:
        num_requests: R.
        num_rows: target rows per request, 1 + drafts verified.
        drafted: whether the drafter ran; without it, `num_rows` is 1.
        seconds: median.
        low: lower quartile.
        high: upper quartile.
        repeats: steps timed.
        chosen: whether the drafts to verify were chosen by the confidences of all drafts; if not, no more were proposed
            than verified. Of no account where not drafted.
    """

    num_requests: int
    num_rows: int
    drafted: bool
    seconds: float
    low: float
    high: float
    repeats: int
    chosen: bool = True


@dataclass(frozen=True)
class CostTable:
    """Timed steps, and how they were timed.

    Raises:
        ValueError: a number of requests lacks plain or choosing steps, has a number of rows twice or one below 1, or a
            time is not positive; or some numbers of requests have settled steps and others don't.
    """

    points: tuple[CostPoint, ...]
    settings: Mapping[str, Any]
    _curves: dict[int, tuple[np.ndarray, np.ndarray]] = field(init=False, repr=False, compare=False)
    _settled: dict[int, tuple[np.ndarray, np.ndarray]] = field(init=False, repr=False, compare=False)
    _plain: dict[int, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        curves, settled, plain = {}, {}, {}
        for size in sorted({point.num_requests for point in self.points}):
            here = [point for point in self.points if point.num_requests == size]
            choosing = [point for point in here if point.drafted and point.chosen]
            undrafted = [point.seconds for point in here if not point.drafted]
            if not choosing or len(undrafted) != 1:
                raise ValueError(
                    f"the cost table has {len(choosing)} drafted and {len(undrafted)} plain points for {size} "
                    "requests; expected some and one: whether drafting pays could not be told. Profile again"
                )
            curves[size], plain[size] = _curve(choosing), undrafted[0]
            if others := [point for point in here if point.drafted and not point.chosen]:
                settled[size] = _curve(others)
            if not all(np.isfinite(point.seconds) and point.seconds > 0 for point in here):
                raise ValueError(f"the cost table has times that are not positive for {size} requests: profile again")
        if not curves:
            raise ValueError("the cost table has no points: profile again")
        if settled and settled.keys() != curves.keys():
            lacking = sorted(curves.keys() - settled.keys())
            raise ValueError(
                f"the cost table has no settled points for {', '.join(map(str, lacking))} requests, but for others; "
                "expected all or none: times between them could not be told. Profile again"
            )
        object.__setattr__(self, "_curves", curves)
        object.__setattr__(self, "_settled", settled)
        object.__setattr__(self, "_plain", plain)

    @property
    def num_requests(self) -> tuple[int, ...]:
        """The numbers of requests that were timed, ascending."""
        return tuple(self._curves)

    def describe_gap(self, num_requests: int, num_drafts: int) -> str | None:
        """What a run of up to R requests, with up to K drafts each, needs beyond the points; None if nothing."""
        fewest, most = self.num_requests[0], self.num_requests[-1]
        drafts = int(min(rows[-1] for rows, _ in self._curves.values())) - 1
        if fewest <= num_requests <= most and num_drafts <= drafts:
            return None
        return (
            f"the cost table covers {fewest}..{most} requests with 0..{drafts} drafts each, and the run has up to "
            f"{count(num_requests, 'request')} with up to {count(num_drafts, 'draft')}. Times beyond it are "
            f"extrapolated: in proportion above {most} requests, as for {fewest} below, by the last slope in drafts. "
            f"To have them measured, profile with --batch-size up to {num_requests} and --num-draft-tokens {num_drafts}"
        )

    def step_seconds(self, num_requests: int, num_rows: np.ndarray) -> np.ndarray:
        """Times of steps that choose how much to verify.

        Args:
            num_requests: R >= 1.
            num_rows: [...] rows of the target's pass over all requests, R and more.

        Returns:
            [...] seconds.
        """
        per_request = num_rows / num_requests
        return self._between(num_requests, lambda size: along(per_request, *self._curves[size]))

    def settled_seconds(self, num_requests: int, num_drafts: int) -> np.ndarray:
        """Times of steps in which every request has k drafts, settled before they were drafted.

        Args:
            num_requests: R >= 1.
            num_drafts: K.

        Returns:
            [n] seconds for k = 1..n, with n = K or as many as were timed; [0] of a table without such steps.
        """
        if not self._settled:
            return np.zeros(0)
        rows = np.arange(2.0, min(num_drafts + 1, *(timed[-1] for timed, _ in self._settled.values())) + 1)

        def seconds(size: int) -> np.ndarray:
            return np.minimum(along(rows, *self._settled[size]), along(rows, *self._curves[size]))

        return self._between(num_requests, seconds)

    def plain_seconds(self, num_requests: int) -> float:
        """Time of a step without a drafter's pass."""
        return self._between(num_requests, self._plain.__getitem__)

    def _between(self, num_requests: int, seconds: Callable[[int], T]) -> T:
        """Linear between the sizes that were timed; as the smallest below them, in proportion above."""
        sizes = self.num_requests
        if num_requests > sizes[-1]:
            return seconds(sizes[-1]) * (num_requests / sizes[-1])
        place = bisect_left(sizes, num_requests)
        if place == 0 or sizes[place] == num_requests:
            return seconds(sizes[place])
        low, high = sizes[place - 1], sizes[place]
        share = (num_requests - low) / (high - low)
        return seconds(low) * (1 - share) + seconds(high) * share

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        content = {"format": FORMAT, "settings": dict(self.settings), "points": [asdict(p) for p in self.points]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "CostTable":
        """Read what `save` wrote.

        Raises:
            ValueError: the file is something else.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a cost table: no JSON ({error})") from error
        stated = content.get("format") if isinstance(content, dict) else None
        if stated != FORMAT:
            raise ValueError(
                f"{path} is not a cost table: format={stated!r}, expected {FORMAT!r}. Make one with `dspark profile`"
            )
        try:
            points = tuple(CostPoint(**point) for point in content["points"])
            return cls(points, content["settings"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is a damaged cost table ({error!r}): profile again") from error


def _curve(points: Sequence[CostPoint]) -> tuple[np.ndarray, np.ndarray]:
    """Rows per request, ascending, and their seconds, never falling, of points with one number of requests."""
    size, ordered = points[0].num_requests, sorted(points, key=lambda point: point.num_rows)
    rows = [point.num_rows for point in ordered]
    if size < 1 or rows[0] < 1 or len(set(rows)) < len(rows):
        raise ValueError(
            f"the cost table has {size} requests with {', '.join(map(str, rows))} rows each; expected at least "
            "1 and every number once: no time could be told between or beyond them. Profile again"
        )
    return np.array(rows, dtype=float), never_falling([point.seconds for point in ordered])


def along(rows: np.ndarray, timed_rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """A curve at `rows` [...]: linear between its points, on with its last slope beyond them."""
    within = np.interp(rows, timed_rows, seconds)
    if len(timed_rows) == 1:
        return within
    slope = (seconds[-1] - seconds[-2]) / (timed_rows[-1] - timed_rows[-2])
    return within + slope * np.maximum(rows - timed_rows[-1], 0.0)


def never_falling(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The non-decreasing sequence closest to `values` [n] in least squares.

    Source: Ayer et al. 1955, pool adjacent violators.
    """
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        means.append(float(value))
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            count = counts[-2] + counts[-1]
            means[-2:] = [(means[-2] * counts[-2] + means[-1] * counts[-1]) / count]
            counts[-2:] = [count]
    return np.repeat(means, counts)
