"""The `dspark` command.

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
from dspark.cli_flags import (
    add_distribution_flags,
    add_json_flag,
    add_layout_flag,
    add_models_argument,
    add_pair_flags,
    add_precision_flags,
    add_sampling_flags,
)
from dspark.cli_tools import add_convert, add_doctor, add_profile
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
    if options.command == "quality":
        from dspark.commands_quality import quality

        return quality(options)
    if options.command in ("profile", "convert", "doctor"):
        from dspark import commands_tools

        return int(getattr(commands_tools, options.command)(options))
    if options.command in ("eval", "report", "calibrate"):
        from dspark import commands_eval

        return {
            "eval": commands_eval.evaluate,
            "report": commands_eval.report,
            "calibrate": commands_eval.calibrate,
        }[options.command](options)
    run = {"generate": commands.generate, "inspect": commands.inspect}[options.command]
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
    add_pair_flags(generate)
    add_sampling_flags(generate)

    evaluate = commands.add_parser(
        "eval",
        help="measure acceptance on prompt sets",
        description="Measure acceptance, per position and calibrated, on prompt sets; intervals are over requests. "
        "Several drafters, draft lengths or temperatures run one after another and are set side by side.",
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
    evaluate.add_argument(
        "--out",
        metavar="DIR",
        help="write records and the report here (results.json, report.md, plots); an interrupted run continues",
    )
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
    add_pair_flags(evaluate, repeatable=True)
    add_sampling_flags(evaluate, repeatable=True)
    _add_report(commands, shared)
    _add_calibrate(commands, shared)

    _add_quality(commands, shared)

    inspect = commands.add_parser(
        "inspect",
        help="what a drafter checkpoint is, and whether it can run",
        description="Read a drafter checkpoint: what it is, what was assumed about it, and all that is wrong with it.",
        **shared,
    )
    inspect.add_argument("drafter", nargs="?", metavar="DRAFTER", help="folder or Hub id; default: the embedded one")
    inspect.add_argument("--target", metavar="TARGET", help="also check that the drafter fits this target")
    add_layout_flag(inspect)
    add_json_flag(inspect)
    add_profile(commands, shared)
    add_convert(commands, shared)
    add_doctor(commands, shared)
    return parser


def _add_quality(commands: Any, shared: dict[str, Any]) -> None:
    quality = commands.add_parser(
        "quality",
        help="score drafters on a target's text without generating; thresholds for CI",
        description="Score drafters on the target's own continuations of a prompt set, without generating with them. "
        "What generation accepts is computed, not drawn: figures are its expectation. The exit status is 1 where a "
        "requirement is not met.",
        **shared,
    )
    add_models_argument(quality, "[TARGET] DRAFTER...")
    several: dict[str, Any] = {"action": "extend", "nargs": "+"}
    quality.add_argument(
        "--dataset", **several, metavar="NAME|FILE", help="prompt sets as in eval; default: the set `default`"
    )
    quality.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of each set")
    quality.add_argument("--temperature", **several, type=float, metavar="T", help="default: 0 and 1, a row each")
    quality.add_argument(
        "--num-draft-tokens", **several, type=int, metavar="K", help="a row each; default: all it was trained for"
    )
    quality.add_argument(
        "--ablate", **several, choices=("markov",), help="also score the drafter without this part, a row each"
    )
    quality.add_argument(
        "--require",
        **several,
        metavar="EXPR",
        help="thresholds that every row has to meet, such as 'tokens_per_step>=2.5', 'one_minus_tv[1]>=0.6', "
        "'ece.high<=0.05'; a wrong name lists all",
    )
    quality.add_argument(
        "--states",
        metavar="DIR",
        help="keep the target's states here, for these settings only; default: a folder for each in the user's cache",
    )
    quality.add_argument("--out", metavar="DIR", help="write results.json here")
    quality.add_argument("--batch-size", type=int, metavar="B", help="continuations that are decoded together")
    group = quality.add_argument_group("models, drafting and sampling")
    group.add_argument("--target", metavar="TARGET", help="the target, if every MODEL is a drafter")
    add_layout_flag(group)
    add_precision_flags(group)
    add_distribution_flags(group)
    add_json_flag(quality)


def _add_report(commands: Any, shared: dict[str, Any]) -> None:
    report = commands.add_parser(
        "report",
        help="merge and compare finished runs",
        description="Set finished runs of dspark eval side by side: rows, differences on the same requests, plots. "
        "Runs of equal settings are merged; others are compared only if what differs is named.",
        **shared,
    )
    report.add_argument("runs", nargs="+", metavar="DIR", help="folder that dspark eval --out wrote")
    report.add_argument(
        "--allow-differences",
        action="append",
        metavar="FIELD",
        help="a setting in which the runs may differ, such as num_draft_tokens or drafter; repeatable",
    )
    report.add_argument("--out", metavar="DIR", help="write results.json, report.md and plots here")
    add_json_flag(report)


def _add_calibrate(commands: Any, shared: dict[str, Any]) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="fit temperatures and offsets of the confidence head to finished runs",
        description="Fit a temperature and an offset per draft position to what was accepted in finished runs (even prompts), "
        "measure it on the others (odd prompts), and write it beside the drafter, where loading finds it.",
        **shared,
    )
    calibrate.add_argument("runs", nargs="+", metavar="DIR", help="folder that dspark eval --out wrote")
    calibrate.add_argument("--drafter", metavar="DRAFTER", help="the drafter of the runs; default: embedded")
    calibrate.add_argument(
        "--temperature",
        action="append",
        type=float,
        metavar="T",
        help="fit the requests at this temperature; repeatable; default: all above 0",
    )
    calibrate.add_argument(
        "--check", action="append", metavar="DIR", help="another run of the drafter to measure on; repeatable"
    )
    calibrate.add_argument("--out", metavar="FILE", help="default: confidence_calibration.json in the drafter's folder")
    add_json_flag(calibrate)
