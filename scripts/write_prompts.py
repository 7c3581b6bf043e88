"""Write a prompt set of filled-in requests, in the form that `dspark eval --dataset` reads.

    python scripts/write_prompts.py --out /tmp/fit.jsonl --count 480
    dspark eval --dataset /tmp/fit.jsonl --temperature 1 --batch-size 120 --out /tmp/fit
    dspark calibrate /tmp/fit --force

The requests come from the templates of the training data (`prompts.py`) with another seed, so they are like what the
drafter was trained on and none is from an evaluation set: what is fitted on them can be measured on those sets.
"""

import argparse
import json
import random
from pathlib import Path

from prompts import request

MAX_REPEATS = 1000  # draws in a row that give nothing new, before the templates count as exhausted


def distinct_requests(count: int, seed: int) -> list[str]:
    """Different requests, in the order drawn.

    Raises:
        ValueError: the templates do not have so many.
    """
    rng = random.Random(seed)
    found: dict[str, None] = {}
    repeats = 0
    while len(found) < count:
        text = request(rng)
        repeats = repeats + 1 if text in found else 0
        if repeats > MAX_REPEATS:
            raise ValueError(f"--count {count}: the templates gave only {len(found)} different requests")
        found[text] = None
    return list(found)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=480, metavar="N")
    parser.add_argument("--seed", type=int, default=2_000_003, help="not a seed of the training data")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Write the file."""
    args = parse_args(argv)
    lines = [json.dumps({"prompt": text}) for text in distinct_requests(args.count, args.seed)]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(lines)} prompts")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
