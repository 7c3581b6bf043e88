"""Flags that several commands of `dspark.cli` share, and which of them go together."""

import argparse
from typing import Any

SEVERAL: dict[str, Any] = {"action": "extend", "nargs": "+"}  # `--flag A B`, or the flag again
# Flags that mean nothing where vLLM runs the models, each with its reason.
WITH_ENDPOINT = dict.fromkeys(
    ("drafter", "plain", "layout", "dtype", "device", "num_draft_tokens", "drafting", "schedule"),
    "the server was started with its own",
)
WITH_PLAIN = {"schedule": "it chooses how many drafts to verify, and without a drafter there are none"}
WITH_ENGINE = {
    "layout": "inside vLLM a checkpoint has to state its layout",
    "device": "vLLM runs on the device that it was built for",
    "schedule": "vLLM decides by its own adaptive verification how much it verifies",
}


def add_switch(parser: Any, name: str, text: str) -> None:
    """A flag without a value, False where it is not given."""
    parser.add_argument(name, action="store_true", default=False, help=text)


def add_json_flag(parser: Any) -> None:
    """One line of JSON in place of tables."""
    add_switch(parser, "--json", "one line of JSON on stdout")


def add_evaluation_flags(parser: argparse.ArgumentParser, batch_size: str) -> None:
    """Prompts, and what makes rows of a table; `batch_size` is its default in words."""
    parser.add_argument(
        "--dataset",
        **SEVERAL,
        metavar="NAME|FILE",
        help="packaged prompt sets, or JSON Lines files with a prompt a line; one or more; default: the set `default`",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N prompts of each set; default: all of them"
    )
    parser.add_argument(
        "--temperature", **SEVERAL, type=float, metavar="T", help="one or more, a row each; default: 0 and 1"
    )
    parser.add_argument(
        "--num-draft-tokens",
        **SEVERAL,
        type=int,
        metavar="K",
        help="drafts a step, one or more, a row each; default: all that the drafter was trained for",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="B", help=f"requests that are decoded together; default: {batch_size}"
    )


def add_pair_flags(parser: argparse.ArgumentParser, **drafter: Any) -> None:
    """Both models by name, with layout, dtype and device; `drafter` are options of that flag."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        metavar="TARGET",
        help="folder, GGUF file or Hub id of the target, or the word embedded, the default",
    )
    group.add_argument(
        "--drafter",
        **drafter,
        metavar="DRAFTER",
        help="folder or Hub id of the drafter, or the word embedded, the default"
        + "; one or more, a run each" * bool(drafter),
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
        help="block layout, for checkpoints that do not state it: the anchor's row drafts, or only the rows after it; "
        "default: as the checkpoint states or, where it does not, as its packaging has it",
    )


def add_sampling_flags(parser: argparse.ArgumentParser, seed: str) -> None:
    """Schedule and sampling; `seed` is its default in words."""
    group = parser.add_argument_group("drafting and sampling")
    group.add_argument(
        "--schedule",
        metavar="FILE|threshold:P",
        help="choose in each step how many drafts to verify: by a cost table of `dspark profile`, or while the chance "
        "that they survive is at least P; default: all of them",
    )
    add_distribution_flags(group, seed)


def add_distribution_flags(group: Any, seed: str) -> None:
    """What drafts and tokens are drawn from; `seed` is its default in words."""
    group.add_argument(
        "--drafting",
        choices=("probabilistic", "greedy"),
        help="draw drafts from the drafter's distribution (default), or take its most likely tokens; lossless both",
    )
    group.add_argument("--top-k", type=int, metavar="N", help="keep the N most likely tokens; default: 0, all of them")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="keep the most likely tokens up to this mass; default: 1, all of them"
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="keep tokens above this share of the largest probability; default: 0, all of them",
    )
    group.add_argument("--seed", type=int, metavar="N", help=f"of the random numbers; default: {seed}")
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="length limit, end-of-text included; default: 256"
    )


def check_backend_flags(options: argparse.Namespace) -> None:
    """Refuse flags that contradict each other.

    Raises:
        ValueError: with the flag, the one that it contradicts, and what to do.
    """
    chosen = getattr(options, "backend", None)
    if getattr(options, "plain", False):
        _refuse(options, "--plain", WITH_PLAIN)
    if hasattr(options, "endpoint"):
        if chosen is not None:
            raise ValueError(f"--endpoint asks a running server, so --backend {chosen} says nothing: leave one out")
        if not options.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"--endpoint {options.endpoint} is no address such as http://localhost:8000")
        _refuse(options, "--endpoint", WITH_ENDPOINT)
    if chosen == "vllm":
        _refuse(options, "--backend vllm", WITH_ENGINE)
        if getattr(options, "dtype", None) == "float64":
            raise ValueError("--dtype float64 does not go with --backend vllm: vLLM has no such models; take float32")


def _refuse(options: argparse.Namespace, chosen: str, reasons: dict[str, str]) -> None:
    for name, reason in reasons.items():
        if getattr(options, name, False):
            raise ValueError(f"--{name.replace('_', '-')} does not go with {chosen}: {reason}; leave it out")
