"""What `dspark generate` shows: text as it is committed, accepted drafts marked, and the figures after it."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from dspark.evals import Acceptance

ACCEPTED_ON = "\x1b[4;32m"  # underlined and green: the underline stays readable without colours
ACCEPTED_ON_PLAIN = "\x1b[4m"
MARK_OFF = "\x1b[0m"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Token ids in, text out, as soon as it is certain.

    A token can end inside a character, and tokenizers may join words differently at the start of a text; so each piece
    is the difference of two decodings that start at the same earlier token, and a trailing unfinished character waits.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self.token_ids: list[int] = []
        self.window_start = 0
        self.num_shown = 0

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is unfinished."""
        self.token_ids.append(token_id)
        shown = self.decode(self.token_ids[self.window_start : self.num_shown])
        text = self.decode(self.token_ids[self.window_start :])
        if text.endswith(UNFINISHED):
            return ""
        self.window_start, self.num_shown = self.num_shown, len(self.token_ids)
        return text[len(shown) :]

    def flush(self) -> str:
        """What is left at the end, unfinished characters included."""
        shown = self.decode(self.token_ids[self.window_start : self.num_shown])
        return self.decode(self.token_ids[self.window_start :])[len(shown) :]


class MarkedWriter:
    """Writes the text of tokens to a stream; on a terminal accepted drafts are underlined."""

    def __init__(self, decode: Callable[[Sequence[int]], str], out: TextIO) -> None:
        self.text, self.out = TextStream(decode), out
        self.mark_on = marks_for(out)

    def write(self, token_ids: Sequence[int], num_accepted: int) -> None:
        """Show newly committed tokens, the first `num_accepted` of which were drafted."""
        for i, token_id in enumerate(token_ids):
            piece = self.text.push(token_id)
            marked = self.mark_on and i < num_accepted and piece
            self.out.write(f"{self.mark_on}{piece}{MARK_OFF}" if marked else piece)
        self.out.flush()

    def finish(self) -> None:
        """End the line."""
        self.out.write(self.text.flush() + "\n")
        self.out.flush()


def marks_for(out: TextIO) -> str:
    """Escape sequence that marks accepted drafts on `out`; empty where it is no terminal that understands one."""
    if not out.isatty() or os.environ.get("TERM") == "dumb":
        return ""
    return ACCEPTED_ON_PLAIN if os.environ.get("NO_COLOR") else ACCEPTED_ON


def say(line: str) -> None:
    """A line for the reader, on stderr: stdout carries results only."""
    print(line, file=sys.stderr, flush=True)


def count(number: int, noun: str) -> str:
    """A number of things, as in "1 step" and "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def align(rows: Sequence[Sequence[str]], indent: str = "", right: bool = False) -> str:
    """Rows of cells as a table, columns two blanks apart and flush left, or flush right for numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if right else str.ljust
    lines = ("  ".join(pad(cell, width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def acceptance_lines(figures: "Acceptance") -> list[str]:
    """Tokens per step, acceptance rate, and one column per draft position."""
    if not figures.num_steps:
        return ["no step: the first token, which prefill gives, ended the text"]
    per_step = _figure(figures.tokens_per_step.value)
    lines = [f"{count(figures.num_committed, 'token')} in {count(figures.num_steps, 'step')}: {per_step} per step"]
    if figures.num_offered:
        share = figures.num_accepted / figures.num_offered
        lines[0] += f"; {figures.num_accepted} of {count(figures.num_offered, 'draft')} accepted ({share:.0%})"
    table = [
        ("draft position", [str(rates.position + 1) for rates in figures.positions]),
        ("steps that reached it", [str(rates.num_reached) for rates in figures.positions]),
        ("accepted of those", [_figure(rates.conditional.value) for rates in figures.positions]),
        ("expected from p and q", [_figure(rates.expected.value) for rates in figures.positions]),
    ]
    if figures.positions:
        lines += [f"  {label:<22}" + "".join(f"{cell:>6}" for cell in cells) for label, cells in table]
    return lines


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
