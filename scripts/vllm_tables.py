"""Tables of `bench_vllm_gpu.py`: rates and what they are made of, texts compared, adaptive modes against fixed ones."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from ratios import format_ratio, gain


def done_equal(done: Sequence[dict[str, Any]], run: dict[str, Any]) -> bool:
    """Whether an earlier repeat gave the same tokens; they are then not written again.

    Sampled ones never are: every repeat has seeds of its own, so that acceptance is averaged over more texts.
    """
    return any(key_of(other)[:3] == key_of(run)[:3] and other["tokens"] == run["tokens"] for other in done)


def tokens_of(runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> list[list[int]] | None:
    """The run's tokens, which stand in the first repeat that gave them; None of sampled and of warming runs."""
    return next((other["tokens"] for other in runs if key_of(other)[:3] == key_of(run)[:3] and other["tokens"]), None)


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a run of the matrix one of a kind."""
    return run["mode"], run["concurrency"], run["temperature"], run["repeat"]


def first_differences(tokens: Sequence[list[int]], reference: Sequence[list[int]]) -> list[int]:
    """Position of the first difference of every request that differs."""
    places = []
    for ours, theirs in zip(tokens, reference, strict=True):
        if ours != theirs:
            places.append(next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1))
    return places


def distinct(runs: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """Values of a field in the order of their first run."""
    return list(dict.fromkeys(run[name] for run in runs))


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each temperature, concurrency and mode."""
    lines = [
        "| T | concurrency | mode | tokens/s, median (lowest to highest) | vs plain | tokens a step | ms a step "
        "| equal to plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for temperature, concurrency in cells(runs):
        plain_rate, plain_tokens = None, None
        for mode in distinct(runs, "mode"):
            chosen = [r for r in runs if key_of(r)[:3] == (mode, concurrency, temperature) and r["repeat"]]
            if not chosen:
                continue
            rates = [run["rate"] for run in chosen]
            rate, tokens = statistics.median(rates), tokens_of(runs, chosen[0])
            if mode == "plain":
                plain_rate, plain_tokens = rate, tokens
            equal = ""
            if temperature == 0 and mode != "plain" and plain_tokens and tokens:
                places = first_differences(tokens, plain_tokens)
                equal = f"{len(tokens) - len(places)} of {len(tokens)}"
                equal += f", first differences at {sorted(places)[:4]}" if places else ""
            ratio = f"{rate / plain_rate:.2f}" if plain_rate else ""
            steps = statistics.mean(run["tokens_per_step"] for run in chosen)
            lines.append(
                f"| {temperature:g} | {concurrency} | {mode} | {rate:.0f} ({min(rates):.0f} to {max(rates):.0f}) |"
                f" {ratio} | {steps:.2f} | {statistics.median(r['ms_a_step'] for r in chosen):.2f} | {equal} |"
            )
    return "\n".join(lines)


def gains(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each temperature, concurrency and adaptive mode: its rate over the best fixed number of drafts.

    The fixed ones are the mode without "-adaptive", at any K. Ratios are those within a repeat, since machines drift,
    to the fixed one that was best in the other half of the repeats (`ratios.gain`); with fewer than two there are none.
    """
    lines = []
    for temperature, concurrency in cells(runs):
        here = [r for r in runs if key_of(r)[1:3] == (concurrency, temperature) and r["repeat"]]
        modes = distinct(here, "mode")
        logs = {mode: {r["repeat"]: math.log(r["rate"]) for r in here if r["mode"] == mode} for mode in modes}
        for adaptive in (mode for mode in logs if "-adaptive" in mode):
            family = adaptive.partition("-")[0]
            fixed = [mode for mode in logs if mode.partition("@")[0] == family]
            common = sorted(set.intersection(*(set(logs[mode]) for mode in (adaptive, *fixed))))
            if not fixed or len(common) < 2:
                continue
            mine, *others = ([logs[mode][repeat] for repeat in common] for mode in (adaptive, *fixed))
            best = max(fixed, key=lambda mode: statistics.median(logs[mode].values()))
            lines.append(
                f"T={temperature:g}, concurrency {concurrency}: {adaptive} over the best fixed ({best})"
                f" {format_ratio(gain(mine, others))}"
            )
    return "\n".join(lines)


def cells(runs: Sequence[dict[str, Any]]) -> list[tuple[float, int]]:
    """(temperature, concurrency) that were run."""
    every = itertools.product(distinct(runs, "temperature"), distinct(runs, "concurrency"))
    return [cell for cell in every if any((r["temperature"], r["concurrency"]) == cell for r in runs)]
