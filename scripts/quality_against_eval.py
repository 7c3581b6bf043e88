"""What `dspark quality` expects against what `dspark eval` counted, per draft position, from their results.json.

The two runs use different texts of the same prompts and their own random numbers, so their difference is measured in
standard errors, read off both 95% intervals (half of the width over 1.96). At temperature 0 the texts are the same but
for near-ties, and the intervals, which are over requests, are far wider than the difference. Figures of a draft
position that eval reached in fewer than `--min-steps` steps are left out: the interval of 5 acceptances in 5 steps has
no width. Status 1 if a figure differs by more than `--limit` standard errors.

    dspark quality --dataset gsm8k.jsonl --limit 80 --temperature 0 0.6 1 --out quality/
    dspark eval --dataset gsm8k.jsonl --limit 80 --temperature 0 --temperature 0.6 --temperature 1 --out eval/
    python scripts/quality_against_eval.py quality/ eval/
    python scripts/quality_against_eval.py quality/ eval/ --limit 3 --json
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAIRS = (("unconditional", "unconditional"), ("conditional", "conditional"), ("one_minus_tv", "expected"))
WHOLE = ("tokens_per_step", "tokens_per_step_macro", "acceptance_rate")
SCORES = ("ece", "auroc", "brier")
CERTAIN = 1e-9  # a standard error below this is none


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison; 1 if a figure is out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("quality", type=Path, help="folder that dspark quality --out wrote")
    parser.add_argument("eval", type=Path, help="folder that dspark eval --out wrote, with the same K")
    parser.add_argument("--limit", type=float, default=4.0, help="standard errors that a figure may differ by")
    parser.add_argument("--min-steps", type=int, default=50, help="steps that have to reach a draft position")
    parser.add_argument("--json", action="store_true", help="one line of JSON, nothing else")
    options = parser.parse_args(arguments)
    lines = list(compare(_rows(options.quality), _rows(options.eval), options.min_steps))
    if not lines:
        sys.exit("no row of the two has the same data set, temperature and number of draft positions")
    if options.json:
        print(json.dumps(lines))
    else:
        print(f"{'':28}{'figure':>22}{'expected':>10}{'counted':>10}{'standard errors':>18}")
        for line in lines:
            print(
                f"{line['row']:28}{line['figure']:>22}{line['expected']:>10.4f}{line['counted']:>10.4f}"
                f"{line['standard_errors']:>18.2f}"
            )
    worst = max(lines, key=lambda line: abs(line["standard_errors"]))
    print(
        f"{len(lines)} figures; largest difference {worst['standard_errors']:+.2f} standard errors "
        f"({worst['row']}, {worst['figure']})",
        file=sys.stderr,
    )
    return int(abs(worst["standard_errors"]) > options.limit)


def compare(expected: list[dict[str, Any]], counted: list[dict[str, Any]], min_steps: int) -> Iterator[dict[str, Any]]:
    """One line per figure of every row that both have."""
    realised = {(row["dataset"], row["temperature"], len(row["acceptance"]["positions"])): row for row in counted}
    for row in expected:
        figures = row["quality"]
        key = row["dataset"], row["temperature"], len(figures["positions"])
        if row["variant"] or key not in realised:
            continue
        acceptance = realised[key]["acceptance"]
        pairs = [(name, figures[name], acceptance[name]) for name in WHOLE]
        for first, second in zip(figures["positions"], acceptance["positions"], strict=True):
            if second["num_reached"] < min_steps:
                break
            number = first["position"] + 1
            pairs += [(f"{name}[{number}]", first[name], second[other]) for name, other in PAIRS]
        if figures["calibration"] and acceptance["calibration"]:
            pairs += [(name, figures["calibration"][name], acceptance["calibration"][name]) for name in SCORES]
        for name, first, second in pairs:
            if None not in (first["low"], second["low"]):
                yield {
                    "row": f"{row['dataset']} T={row['temperature']:g} K={key[2]}",
                    "figure": name,
                    "expected": first["value"],
                    "counted": second["value"],
                    "standard_errors": _difference(first, second),
                }


def _difference(first: dict[str, float], second: dict[str, float]) -> float:
    error = math.hypot(first["high"] - first["low"], second["high"] - second["low"]) / (2 * 1.96)
    difference = second["value"] - first["value"]
    if error < CERTAIN:
        return 0.0 if abs(difference) < CERTAIN else math.copysign(math.inf, difference)
    return difference / error


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["rows"]
    return rows


if __name__ == "__main__":
    sys.exit(main())
