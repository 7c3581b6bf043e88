"""The parsers of `dspark profile`, `dspark convert` and `dspark doctor`."""

import argparse
from typing import Any

from dspark.cli_flags import add_json_flag, add_layout_flag, add_models_argument, add_precision_flags


def add_profile(commands: Any, shared: dict[str, Any]) -> None:
    """`dspark profile`."""
    profile = commands.add_parser(
        "profile",
        help="time steps on this machine, for --schedule",
        description="Time whole steps of the loop by requests that run together and by drafts verified. The table that "
        "is written says what verifying costs here; --schedule FILE decides by it how much to verify.",
        **shared,
    )
    _add_pair_arguments(profile)
    profile.add_argument("--out", required=True, metavar="FILE", help="write the table here (JSON)")
    profile.add_argument("--batch-size", nargs="+", type=int, metavar="B", help="default: 1 2 4 8, on a GPU up to 256")
    profile.add_argument("--num-draft-tokens", type=int, metavar="K", help="time 0..K; default: the trained maximum")
    profile.add_argument("--context", type=int, metavar="N", help="tokens in each prompt")
    profile.add_argument("--temperature", type=float, metavar="T", help="of the requests; 0 leaves out sampling's work")
    profile.add_argument("--repeats", type=int, metavar="N", help="timed steps of each kind")
    add_json_flag(profile)


def add_convert(commands: Any, shared: dict[str, Any]) -> None:
    """`dspark convert`."""
    convert = commands.add_parser(
        "convert",
        help="write a drafter in the other packaging",
        description="Write a drafter as DeepSpec or as speculators would. Weights are copied bit for bit; what the "
        "other packaging cannot express is refused.",
        **shared,
    )
    convert.add_argument("source", metavar="SRC", help="folder or Hub id, or the word embedded")
    convert.add_argument("destination", metavar="DST", help="folder to write")
    convert.add_argument("--to", required=True, choices=("deepspec", "speculators"), help="the packaging to write")
    convert.add_argument("--target", metavar="TARGET", help="copy embedding and head from here if SRC has none")
    convert.add_argument("--verifier", metavar="NAME", help="name of the target in a speculators config")
    convert.add_argument("--force", action="store_true", default=False, help="replace a checkpoint in DST")
    add_layout_flag(convert)
    add_json_flag(convert)


def add_doctor(commands: Any, shared: dict[str, Any]) -> None:
    """`dspark doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="find faults of a drafter that nothing fails on",
        description="Read a drafter in other ways than its files say (taps, layout, mask, rotary embedding, causality, "
        "embedding, head, vocabulary, norms), score each on the target's own text, and say what to change if one "
        "drafts better. The exit status is 1 if something is wrong.",
        **shared,
    )
    _add_pair_arguments(doctor)
    doctor.add_argument("--prompts", type=int, metavar="N", help="texts to judge on")
    doctor.add_argument("--new-tokens", type=int, metavar="N", help="tokens that the target writes in each")
    doctor.add_argument("--anchors", type=int, metavar="N", help="blocks drafted in each")
    doctor.add_argument("--seed", type=int, metavar="N", help="of the texts")
    add_json_flag(doctor)


def _add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Both models as positional arguments, as in `dspark quality`."""
    add_models_argument(parser, "[TARGET] DRAFTER")
    add_layout_flag(parser)
    add_precision_flags(parser)
