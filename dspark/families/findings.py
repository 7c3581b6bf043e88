"""What reading a checkpoint brings to light: problems that refuse it, and notes on choices it left open.

Checks raise `CheckpointError` at their first problem. `Findings.attempt` runs one group of checks and keeps its
problem, so that one pass over a checkpoint reports every group that fails instead of only the first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class CheckpointError(ValueError):
    """A drafter checkpoint that would not do what it was trained for, with the field, its value, and what to do."""


def refusal(found: str, expected: str, *advice: str) -> CheckpointError:
    """One problem in the order a reader needs it.

    Args:
        found: the field or tensor and its value, as the checkpoint has it.
        expected: what the value should have been.
        advice: sentences, what would have gone wrong had it been loaded, and what to do.
    """
    return CheckpointError(f"{found}; expected {expected}. {' '.join(advice)}")


@dataclass
class Findings:
    """Problems and notes, collected while a checkpoint is read.

    `assumptions` are those notes where the checkpoint does not say what was chosen; they deserve a warning.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)

    def attempt(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Result of `check(*args, **kwargs)`, or None when it refused; its problem is then recorded."""
        try:
            return check(*args, **kwargs)
        except CheckpointError as error:
            self._record(error)
            return None

    def refuse(self, found: str, expected: str, *advice: str) -> None:
        """Record a problem and go on; arguments as for `refusal`."""
        self._record(refusal(found, expected, *advice))

    def _record(self, error: CheckpointError) -> None:
        if str(error) not in self.problems:  # two groups may need the same field
            self.problems.append(str(error))

    def gather(self, **readers: Callable[[], Any]) -> dict[str, Any] | None:
        """What each reader gives under its name, None where one refused; the problems of all are recorded."""
        values: dict[str, Any] = {}
        for name, reader in readers.items():
            self.attempt(lambda name=name, reader=reader: values.update({name: reader()}))  # type: ignore[misc]
        return values if len(values) == len(readers) else None

    def note(self, text: str) -> None:
        """Record a choice that the checkpoint states, or that changes nothing."""
        self.notes.append(text)

    def assume(self, text: str) -> None:
        """Record a choice that the checkpoint leaves open."""
        self.notes.append(text)
        self.assumptions.append(text)

    def raise_problems(self, path: str) -> None:
        """Raise everything found as one `CheckpointError` whose message starts with the path; return if nothing was."""
        if not self.problems:
            return
        if len(self.problems) == 1:
            raise CheckpointError(f"{path}: {self.problems[0]}")
        listed = "\n".join(f"  {index}. {problem}" for index, problem in enumerate(self.problems, 1))
        raise CheckpointError(f"{path}: {len(self.problems)} problems\n{listed}")
