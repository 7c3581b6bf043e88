"""Typed reading of config.json: one quantity may stand under several names and in several sections.

The first value that is not null wins, but two values that differ are refused: public engines resolve such a conflict in
different orders, so the checkpoint would mean different things to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from dspark.families.findings import refusal


@dataclass(frozen=True)
class Found:
    """A value and the dotted key it was read from."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}"


@dataclass(frozen=True)
class Fields:
    """Sections of one config in order of precedence, each with its dotted prefix ("" for the top level)."""

    sections: tuple[tuple[str, Mapping[str, Any]], ...]

    @classmethod
    def of(cls, raw: Mapping[str, Any], *nested: str) -> "Fields":
        """The `nested` sections that `raw` has, in that order, then `raw` itself.

        Raises:
            CheckpointError: a section is not an object.
        """
        sections = [(name, section(raw, name)) for name in nested if raw.get(name) is not None]
        return cls((*sections, ("", raw)))

    def all(self, *names: str) -> list[Found]:
        """Every value that is not null, sections in order and names in order within a section."""
        return [
            Found(f"{prefix}.{name}" if prefix else name, values[name])
            for prefix, values in self.sections
            for name in names
            if values.get(name) is not None
        ]

    def find(self, *names: str) -> Found | None:
        """The one value of a quantity that has several `names`, or None.

        Raises:
            CheckpointError: two places disagree.
        """
        found = self.all(*names)
        for other in found[1:]:
            if other.value != found[0].value:
                raise refusal(
                    f"{found[0]} contradicts {other}",
                    "one value",
                    "Engines read these keys in different orders, so the drafter would run unlike it was trained.",
                    "Remove the wrong key from config.json.",
                )
        return found[0] if found else None

    def require(self, *names: str, consequence: str) -> Found:
        """Like `find`, but a missing value is refused; `consequence` says why no default is safe."""
        found = self.find(*names)
        if found is None:
            places = " or ".join(f"{prefix}.{names[0]}" if prefix else names[0] for prefix, _ in self.sections)
            aliases = f" (also looked for {', '.join(names[1:])})" if names[1:] else ""
            raise refusal(
                f"{names[0]} is missing{aliases}", f"a value at {places}", consequence, "Add it to config.json."
            )
        return found

    def integer(self, *names: str, minimum: int, consequence: str) -> int:
        """Required integer of at least `minimum`."""
        return integer(self.require(*names, consequence=consequence), minimum, consequence)

    def optional_integer(self, *names: str, minimum: int, consequence: str) -> int | None:
        """Integer of at least `minimum`, or None where the config has none."""
        found = self.find(*names)
        return None if found is None else integer(found, minimum, consequence)

    def flag(self, *names: str) -> Found | None:
        """Boolean, or None where the config has none."""
        found = self.find(*names)
        if found is not None and not isinstance(found.value, bool):
            raise refusal(str(found), "true or false", "Any other value would count as true.", "Write a JSON boolean.")
        return found


def section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """`raw[name]` as an object; a missing or null one is empty.

    Raises:
        CheckpointError: it is something else.
    """
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refusal(
            f"{name}={value!r}", "an object", "The fields inside it could not be read.", "Repair config.json."
        )
    return value


def integer(found: Found, minimum: int, consequence: str) -> int:
    """The value as an integer of at least `minimum` (booleans and floats are refused)."""
    if isinstance(found.value, bool) or not isinstance(found.value, int) or found.value < minimum:
        raise refusal(str(found), f"an integer >= {minimum}", consequence, "Correct it in config.json.")
    return found.value


def positive_number(found: Found, consequence: str) -> float:
    """The value as a finite float above zero."""
    value = found.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise refusal(str(found), "a finite number > 0", consequence, "Correct it in config.json.")
    return float(value)


def integers(found: Found, consequence: str) -> tuple[int, ...]:
    """The value as a non-empty list of integers."""
    value = found.value
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if not is_list or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
        raise refusal(str(found), "a non-empty list of integers", consequence, "Correct it in config.json.")
    return tuple(value)
