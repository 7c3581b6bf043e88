"""The commands of `dspark` and their flags.

A flag that is not given is absent from the result: defaults live in the dataclasses.
"""

import argparse
from typing import Any, NoReturn

from dspark import __version__
from dspark.cli_flags import (
    SEVERAL,
    add_distribution_flags,
    add_evaluation_flags,
    add_json_flag,
    add_layout_flag,
    add_models_argument,
    add_pair_flags,
    add_precision_flags,
    add_sampling_flags,
    add_switch,
)

DESCRIPTION = """\
Speculative decoding with DSpark drafters: a small drafter proposes a block of tokens from the target model's hidden
states, the target verifies it in one pass, and the output stays distributed exactly as the target's.

Without --target and --drafter the embedded pair runs: SmolLM2-135M-Instruct and a drafter for it that ships with this
package. The target is fetched on first use (93 MB); DSPARK_TARGET names a local copy instead.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class CommandParser(Parser):
    """The parser of one command, which refuses unknown flags itself: `dspark` would point to its own help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """All arguments are known, or there is an error."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown


def build_parser() -> Parser:
    """All commands; `run` of the result is the module and the function of the command that was chosen."""
    parser = Parser(
        prog="dspark", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    _add_generate(commands)
    _add_eval(commands)
    _add_report(commands)
    _add_calibrate(commands)
    _add_quality(commands)
    _add_inspect(commands)
    _add_profile(commands)
    _add_convert(commands)
    _add_doctor(commands)
    return parser


def _command(commands: Any, name: str, run: tuple[str, str], summary: str, description: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.set_defaults(run=run)
    add_json_flag(parser)
    return parser


def _add_generate(commands: Any) -> None:
    generate = _command(
        commands,
        "generate",
        ("commands", "generate"),
        "continue one prompt, with accepted drafts underlined",
        "Continue one prompt. Text appears as it is committed, accepted drafts underlined on a terminal.",
    )
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="the prompt; - reads it from stdin")
    add_switch(generate, "--no-chat", "bare text, no chat template")
    add_switch(generate, "--compare", "also decode without the drafter: speed-up, same output?")
    generate.add_argument(
        "--temperature", type=float, metavar="T", help="default: 0, which takes the most likely token every time"
    )
    generate.add_argument(
        "--num-draft-tokens", type=int, metavar="K", help="drafts a step; default: all it was trained for"
    )
    add_pair_flags(generate)
    add_sampling_flags(generate, seed="a random one")


def _add_eval(commands: Any) -> None:
    evaluate = _command(
        commands,
        "eval",
        ("commands_eval", "evaluate"),
        "measure acceptance on prompt sets",
        "Measure acceptance, per position and calibrated, on prompt sets; intervals are over requests. Several "
        "drafters, draft lengths or temperatures run one after another and are set side by side.",
    )
    add_evaluation_flags(evaluate, batch_size="8")
    evaluate.add_argument(
        "--out",
        metavar="DIR",
        help="write records and the report here (results.json, report.md, plots); an interrupted run continues; "
        "default: nowhere, only a table",
    )
    add_switch(evaluate, "--plain", "without the drafter, as a base line")
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
    add_pair_flags(evaluate, **SEVERAL)
    add_sampling_flags(evaluate, seed="0")


def _add_report(commands: Any) -> None:
    report = _command(
        commands,
        "report",
        ("commands_eval", "report"),
        "merge and compare finished runs",
        "Set finished runs of dspark eval side by side: rows, differences on the same requests, plots. Runs of equal "
        "settings are merged; others are compared only if what differs is named.",
    )
    report.add_argument("runs", nargs="+", metavar="DIR", help="folder that dspark eval --out wrote")
    report.add_argument(
        "--allow-differences",
        action="append",
        metavar="FIELD",
        help="a setting in which the runs may differ, such as num_draft_tokens or drafter; repeatable; default: what "
        "the runs of one dspark eval varied",
    )
    report.add_argument(
        "--out", metavar="DIR", help="write results.json, report.md and plots here; default: nowhere, only a table"
    )


def _add_calibrate(commands: Any) -> None:
    calibrate = _command(
        commands,
        "calibrate",
        ("commands_eval", "calibrate"),
        "fit temperatures and offsets of the confidence head to finished runs",
        "Fit a temperature and an offset per draft position to what was accepted in finished runs (even prompts), "
        "measure it on the others (odd prompts), and write it beside the drafter, where loading finds it.",
    )
    calibrate.add_argument("runs", nargs="+", metavar="DIR", help="folder that dspark eval --out wrote")
    calibrate.add_argument(
        "--drafter",
        metavar="DRAFTER",
        help="folder or Hub id of the drafter of the runs, or the word embedded, the default",
    )
    calibrate.add_argument(
        "--temperature",
        action="append",
        type=float,
        metavar="T",
        help="fit the requests at this temperature; repeatable; default: all above 0",
    )
    calibrate.add_argument(
        "--check",
        action="append",
        metavar="DIR",
        help="another run of the drafter to measure on; repeatable; default: none",
    )
    calibrate.add_argument("--out", metavar="FILE", help="default: confidence_calibration.json in the drafter's folder")
    add_switch(calibrate, "--force", "replace a calibration that is there")


def _add_quality(commands: Any) -> None:
    quality = _command(
        commands,
        "quality",
        ("commands_quality", "quality"),
        "score drafters on a target's text without generating; thresholds for CI",
        "Score drafters on the target's own continuations of a prompt set, without generating with them. What "
        "generation accepts is computed, not drawn: figures are its expectation. The exit status is 1 where a "
        "requirement is not met.",
    )
    add_models_argument(quality, "[TARGET] DRAFTER...")
    add_evaluation_flags(quality, batch_size="8, on a GPU 128")
    quality.add_argument(
        "--ablate",
        **SEVERAL,
        choices=("markov",),
        help="also score the drafter without this part, a row each; default: only the whole drafter",
    )
    quality.add_argument(
        "--require",
        **SEVERAL,
        metavar="EXPR",
        help="thresholds that every row has to meet, such as 'tokens_per_step>=2.5', 'one_minus_tv[1]>=0.6', "
        "'ece.high<=0.05', one or more; a wrong name lists all; default: none",
    )
    quality.add_argument("--states", metavar="DIR", help="keep the target's states here; default: in the user's cache")
    quality.add_argument("--out", metavar="DIR", help="write results.json here; default: nowhere, only a table")
    group = quality.add_argument_group("models, drafting and sampling")
    group.add_argument(
        "--target",
        metavar="TARGET",
        help="the target, or the word embedded, if every MODEL is a drafter; default: as MODEL says",
    )
    add_layout_flag(group)
    add_precision_flags(group)
    add_distribution_flags(group, seed="0")


def _add_inspect(commands: Any) -> None:
    inspect = _command(
        commands,
        "inspect",
        ("commands", "inspect"),
        "what a drafter checkpoint is, and whether it can run",
        "Read a drafter checkpoint: what it is, what was assumed about it, and all that is wrong with it.",
    )
    inspect.add_argument(
        "drafter", nargs="?", metavar="DRAFTER", help="folder or Hub id, or the word embedded, the default"
    )
    inspect.add_argument(
        "--target",
        metavar="TARGET",
        help="also check that the drafter fits this target (folder, GGUF file or Hub id, or the word embedded); "
        "default: the files are checked by themselves",
    )
    add_layout_flag(inspect)


def _add_profile(commands: Any) -> None:
    profile = _command(
        commands,
        "profile",
        ("commands_tools", "profile"),
        "time steps on this machine, for --schedule",
        "Time whole steps of the loop by requests that run together and by drafts verified: as a schedule chooses them "
        "by the confidences of all drafts, and settled beforehand, without waiting for those. The table that is "
        "written says what verifying costs here; --schedule FILE decides by it how much to verify.",
    )
    _add_pair_arguments(profile)
    profile.add_argument("--out", required=True, metavar="FILE", help="write the table here (JSON)")
    profile.add_argument(
        "--batch-size",
        **SEVERAL,
        type=int,
        metavar="B",
        help="requests that run together, one or more numbers; default: 1 2 4 8, on a GPU also 16 32 64 128 256",
    )
    profile.add_argument("--num-draft-tokens", type=int, metavar="K", help="time 0..K; default: the trained maximum")
    profile.add_argument("--context", type=int, metavar="N", help="tokens in each prompt; default: 128")
    profile.add_argument(
        "--temperature", type=float, metavar="T", help="of the requests; 0 leaves out sampling's work; default: 1"
    )
    profile.add_argument("--repeats", type=int, metavar="N", help="timed steps of each kind, at least 3; default: 7")


def _add_convert(commands: Any) -> None:
    convert = _command(
        commands,
        "convert",
        ("commands_tools", "convert"),
        "write a drafter in the other packaging",
        "Write a drafter as DeepSpec or as speculators would. Weights are copied bit for bit; what the other packaging "
        "cannot express is refused.",
    )
    convert.add_argument("source", metavar="SRC", help="folder or Hub id, or the word embedded")
    convert.add_argument("destination", metavar="DST", help="folder to write")
    convert.add_argument("--to", required=True, choices=("deepspec", "speculators"), help="the packaging to write")
    convert.add_argument(
        "--target",
        metavar="TARGET",
        help="copy embedding and head from here (folder, GGUF file or Hub id, or the word embedded) if SRC has none; "
        "default: only SRC is read",
    )
    convert.add_argument(
        "--verifier", metavar="NAME", help="name of the target in a speculators config; default: what SRC says"
    )
    add_switch(convert, "--force", "replace a checkpoint in DST")
    add_layout_flag(convert)


def _add_doctor(commands: Any) -> None:
    doctor = _command(
        commands,
        "doctor",
        ("commands_tools", "doctor"),
        "find faults of a drafter that nothing fails on",
        "Read a drafter in other ways than its files say (taps, layout, mask, rotary embedding, causality, embedding, "
        "head, vocabulary, norms), score each on the target's own text, and say what to change if one drafts better. "
        "The exit status is 1 if something is wrong.",
    )
    _add_pair_arguments(doctor)
    doctor.add_argument("--prompts", type=int, metavar="N", help="texts to judge on, at least 2; default: 12")
    doctor.add_argument(
        "--new-tokens", type=int, metavar="N", help="tokens that the target writes in each, at least 4; default: 24"
    )
    doctor.add_argument("--anchors", type=int, metavar="N", help="blocks drafted in each; default: 6")
    doctor.add_argument("--seed", type=int, metavar="N", help="of the texts; default: 0")


def _add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Both models as positional arguments."""
    add_models_argument(parser, "[TARGET] DRAFTER")
    add_layout_flag(parser)
    add_precision_flags(parser)
