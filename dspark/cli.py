"""The `dspark` command: `generate`, `eval` and `inspect`.

Results go to stdout, progress and remarks to stderr; with `--json` stdout is one line of JSON. A mistake of the user
is one line on stderr and exit status 2. Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from dspark import __version__
from dspark.terminal import say

DESCRIPTION = """\
Speculative decoding with DSpark drafters: a small drafter proposes a block of tokens from the target model's hidden
states, the target verifies it in one pass, and the output stays distributed exactly as the target's.

Without --target and --drafter the embedded pair runs: SmolLM2-135M-Instruct and a drafter for it that ships with this
package. The target is fetched on first use (93 MB); DSPARK_TARGET names a local copy instead.
"""
INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for SIGINT and SIGPIPE


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = build_parser().parse_args(argv)
    try:
        status = _run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        say("dspark: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Python flushes stdout once more at exit; point it where that cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError) as error:
        say(f"dspark: {_message(error)}")
        return 2


def _run(options: argparse.Namespace) -> int:
    from dspark import commands

    logger = logging.getLogger("dspark")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Remarks) for handler in logger.handlers):
        logger.addHandler(_Remarks())
    run = {"generate": commands.generate, "eval": commands.evaluate, "inspect": commands.inspect}[options.command]
    return run(options)


class _Remarks(logging.Handler):
    """Log records as plain lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def _message(error: Exception) -> str:
    """One line, the first where another library wrote several; but all the problems of a checkpoint."""
    from dspark.families import CheckpointError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return str(error) if isinstance(error, CheckpointError) else lines[0]


def build_parser() -> Parser:
    """All commands and flags. A flag that is not given is absent from the result: defaults live in the dataclasses."""
    parser = Parser(
        prog="dspark", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared: dict[str, Any] = {"allow_abbrev": False, "argument_default": argparse.SUPPRESS}

    generate = commands.add_parser(
        "generate",
        help="continue one prompt, with accepted drafts underlined",
        description="Continue one prompt. Text appears as it is committed, accepted drafts underlined on a terminal.",
        **shared,
    )
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="the prompt; - reads it from stdin")
    generate.add_argument("--no-chat", action="store_true", default=False, help="bare text, no chat template")
    generate.add_argument(
        "--compare", action="store_true", default=False, help="also decode without the drafter: speed-up, same output?"
    )
    generate.add_argument(
        "--temperature", type=float, metavar="T", help="default 0, which takes the most likely token every time"
    )
    _add_pair_flags(generate)
    _add_sampling_flags(generate)

    evaluate = commands.add_parser(
        "eval",
        help="measure acceptance on prompt sets",
        description="Measure acceptance, per position and calibrated, on prompt sets; intervals are over requests.",
        **shared,
    )
    evaluate.add_argument(
        "--dataset",
        action="append",
        metavar="NAME|FILE",
        help="packaged prompt set, or a JSON Lines file with a prompt a line; repeatable; default: the set `default`",
    )
    evaluate.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of each set")
    evaluate.add_argument(
        "--temperature", action="append", type=float, metavar="T", help="repeatable; default: 0 and 1, a row each"
    )
    evaluate.add_argument("--batch-size", type=int, metavar="B", help="requests that run together")
    evaluate.add_argument("--out", metavar="DIR", help="write records and results here; an interrupted run continues")
    evaluate.add_argument("--plain", action="store_true", default=False, help="without the drafter, as a base line")
    evaluate.add_argument(
        "--backend",
        choices=("dspark", "vllm"),
        help="what runs the models: this package's own loop (default), or a vLLM engine in this process",
    )
    evaluate.add_argument(
        "--endpoint",
        metavar="URL",
        help="ask a running vLLM server, with the drafter that it was started with; --target then names the tokenizer, "
        "default: what the server's model was loaded from",
    )
    _add_pair_flags(evaluate)
    _add_sampling_flags(evaluate)

    inspect = commands.add_parser(
        "inspect",
        help="what a drafter checkpoint is, and whether it can run",
        description="Read a drafter checkpoint: what it is, what was assumed about it, and all that is wrong with it.",
        **shared,
    )
    inspect.add_argument("drafter", nargs="?", metavar="DRAFTER", help="folder or Hub id; default: the embedded one")
    inspect.add_argument("--target", metavar="TARGET", help="also check that the drafter fits this target")
    _add_layout_flag(inspect)
    _add_json_flag(inspect)
    return parser


def _add_pair_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target", metavar="TARGET", help="folder, GGUF file or Hub id of the target; default: embedded"
    )
    group.add_argument("--drafter", metavar="DRAFTER", help="folder or Hub id of the drafter; default: embedded")
    _add_layout_flag(group)
    group.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="of both models; default: bfloat16 on a GPU, float32 on a CPU",
    )
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ...; default: a GPU if there is one")


def _add_layout_flag(group: Any) -> None:
    group.add_argument(
        "--layout",
        choices=("anchor", "fill"),
        help="block layout, for checkpoints that do not state it: the anchor's row drafts, or only the rows after it",
    )


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting and sampling")
    group.add_argument(
        "--num-draft-tokens", type=int, metavar="K", help="drafts a step; default: all it was trained for"
    )
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
    _add_json_flag(parser)


def _add_json_flag(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", default=False, help="one line of JSON on stdout")
