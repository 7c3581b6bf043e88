"""What a drafter's acceptance loses when it draws from k candidates instead of its whole vocabulary.

    python scripts/candidate_loss.py --requests 36 --temperature 1          the packaged prompts
    ... --dataset gsm8k.jsonl

Decodes the prompts with drafting over the whole vocabulary and looks at every draft position that verification
reached: p is the target's distribution there, q the drafter's after the token before. With q cut to some candidates and
normalised, sum(min(p, q)) falls; the share that is lost is printed for candidates that are all of largest base logit
("base"), half of them of largest bias after the previous token ("lists", what `dspark_draft_topk` does), and of largest
corrected logit ("best", which needs the whole vocabulary; no k candidates do better by much). One standard error in
brackets. Vanilla heads only.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dspark.commands import load_pair
from dspark.evals import format_prompt, load_dataset
from dspark.loop import generate
from dspark.records import StepRecord
from dspark.sampling import SamplingParams, to_distribution

SIZES = (16, 32, 64, 128, 256)


def reached(pair: Any, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[tuple[torch.Tensor, ...]]:
    """Base logits [n, V], target logits [n, V] and previous tokens [n] of the n positions reached in each step."""
    drafter, target, seen = pair.drafter, pair.target, {}
    base_logits, verify = drafter.base_logits, target.verify

    def keep_base(hidden: torch.Tensor) -> torch.Tensor:
        seen["base"] = base_logits(hidden)
        return seen["base"]

    def keep_target(cache: Any, tokens: torch.Tensor) -> Any:
        output = verify(cache, tokens)
        seen["target"], seen["tokens"] = output.logits[0].clone(), tokens[0]
        return output

    steps: list[tuple[torch.Tensor, ...]] = []

    def keep_step(_: int, __: list[int], step: StepRecord | None) -> None:
        if step is not None and step.num_offered:
            n = min(step.num_accepted + 1, step.num_offered)
            steps.append((seen["base"][0, :n].clone(), seen["target"][:n], seen["tokens"][:n]))

    drafter.base_logits, target.verify = keep_base, keep_target
    for prompt in prompts:
        generate(target, drafter, [prompt], params, on_tokens=keep_step)
        yield from steps
        steps.clear()


def overlaps(
    base: torch.Tensor, bias: torch.Tensor, p: torch.Tensor, params: SamplingParams
) -> dict[str, torch.Tensor]:
    """sum(min(p, q)) [n] for q over the whole vocabulary and over each kind of candidates."""
    logits = base + bias

    def overlap(*candidates: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(logits, float("-inf"))
        for columns in candidates:
            kept.scatter_(-1, columns, logits.gather(-1, columns))
        return torch.minimum(p, to_distribution(kept, params)).sum(-1)

    largest, listed, best = (x.topk(max(SIZES), dim=-1).indices for x in (base, bias, logits))
    found = {"all": torch.minimum(p, to_distribution(logits, params)).sum(-1)}
    for k in SIZES:
        found[f"base {k}"] = overlap(largest[:, :k])
        found[f"lists {k}"] = overlap(largest[:, : k // 2], listed[:, : k // 2])
        found[f"best {k}"] = overlap(best[:, :k])
    return found


def main(args: argparse.Namespace) -> None:
    """Print the table."""
    pair = load_pair(args)
    prompts = [format_prompt(pair.target, p.text) for p in load_dataset(args.dataset, args.requests).prompts]
    params = SamplingParams(temperature=args.temperature, seed=5, max_new_tokens=args.max_new_tokens)
    head, rows = pair.drafter.markov_head, []
    for base, target, previous in reached(pair, prompts, params):
        bias = head.markov_w2(head.markov_w1(previous)).float()
        p = to_distribution(target.float(), params)
        rows.append(overlaps(base.float(), bias, p, params))
    columns = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    whole = columns.pop("all")
    print(f"{len(whole)} positions at temperature {args.temperature}, acceptance {whole.mean():.4f}; lost of it, %")
    for k in SIZES:
        losses = {kind: (whole - columns[f"{kind} {k}"]) / whole.mean() * 100 for kind in ("base", "lists", "best")}
        cells = [f"{kind} {x.mean():5.2f} ({x.std() / len(x) ** 0.5:.2f})" for kind, x in losses.items()]
        print(f"k = {k:3d}   " + "   ".join(cells))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--dataset", default="default", help="packaged prompt set or a JSON Lines file")
    parser.add_argument("--requests", type=int, default=10, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=1.0)
    for flag in ("--target", "--drafter", "--dtype", "--device"):
        parser.add_argument(flag, help="as for `dspark eval`")
    return parser.parse_args()


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(parse_args()))
