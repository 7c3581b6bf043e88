"""Flags that several commands of `dspark.cli` share. One that is not given is absent: defaults live in dataclasses."""

import argparse
from typing import Any

REPEATABLE = "; repeatable, a run each"


def add_pair_flags(parser: argparse.ArgumentParser, repeatable: bool = False) -> None:
    """Both models by name, with layout, dtype and device."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target", metavar="TARGET", help="folder, GGUF file or Hub id of the target; default: embedded"
    )
    group.add_argument(
        "--drafter",
        action="append" if repeatable else "store",
        metavar="DRAFTER",
        help="folder or Hub id of the drafter, or the word embedded, the default" + REPEATABLE * repeatable,
    )
    add_layout_flag(group)
    add_precision_flags(group)


def add_models_argument(parser: argparse.ArgumentParser, synopsis: str) -> None:
    """Models by position; `synopsis` says which."""
    parser.add_argument(
        "models",
        nargs="*",
        default=[],
        metavar="MODEL",
        help=f"{synopsis}: folders or Hub ids, or the word embedded; one model is a drafter for the embedded target; "
        "default: the embedded pair",
    )


def add_precision_flags(group: Any) -> None:
    """dtype and device."""
    group.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="of both models; default: bfloat16 on a GPU, float32 on a CPU",
    )
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ...; default: a GPU if there is one")


def add_layout_flag(group: Any) -> None:
    """The block layout."""
    group.add_argument(
        "--layout",
        choices=("anchor", "fill"),
        help="block layout, for checkpoints that do not state it: the anchor's row drafts, or only the rows after it",
    )


def add_sampling_flags(parser: argparse.ArgumentParser, repeatable: bool = False) -> None:
    """Draft length, schedule and sampling, and --json."""
    group = parser.add_argument_group("drafting and sampling")
    group.add_argument(
        "--num-draft-tokens",
        action="append" if repeatable else "store",
        type=int,
        metavar="K",
        help="drafts a step; default: all it was trained for" + REPEATABLE * repeatable,
    )
    group.add_argument(
        "--schedule",
        metavar="FILE|threshold:P",
        help="choose in each step how many drafts to verify: by a cost table of `dspark profile`, or while the chance "
        "that they survive is at least P; default: all of them",
    )
    add_distribution_flags(group)
    add_json_flag(parser)


def add_distribution_flags(group: Any) -> None:
    """What drafts and tokens are drawn from."""
    group.add_argument(
        "--drafting",
        choices=("probabilistic", "greedy"),
        help="draw drafts from the drafter's distribution (default), or take its most likely tokens; lossless both",
    )
    group.add_argument("--top-k", type=int, metavar="N", help="keep the N most likely tokens; 0 keeps all")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the most likely tokens up to this mass")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="keep tokens above this share of the largest probability"
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the random numbers")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="length limit")


def add_json_flag(parser: Any) -> None:
    """One line of JSON in place of tables."""
    parser.add_argument("--json", action="store_true", default=False, help="one line of JSON on stdout")
