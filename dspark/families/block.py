"""Block size, mask token and block layout.

The two layouts differ by one row: anchor-first predicts from row 0 on, 1+N lets row 0 re-state the anchor. Read with
the wrong one, a healthy checkpoint is accepted about 1 % of the time and nothing fails, so the source of the choice
is always recorded.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from dspark.families.fields import Fields, Found, integer, section
from dspark.families.findings import Findings, refusal

Layout = Literal["anchor", "fill"]
NAMES = {True: "anchor-first", False: "1+N (fill)"}
MASK_TOKEN_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
ONE_PERCENT = "Read with the wrong layout, almost no draft would be accepted."
OVERRIDE = "override with --layout (layout= in Python)"
CHOOSE = "Correct config.json, or decide with --layout anchor or --layout fill (layout= in Python)."


def read_block_size(fields: Fields) -> int:
    """Rows the drafter was trained with."""
    return fields.integer(
        "block_size",
        "dspark_block_size",
        minimum=1,
        consequence="Engines would guess 8 or 16 rows; more rows than were trained collapse every position.",
    )


def read_layout(fields: Fields, drafter: Mapping[str, Any], chosen: Layout | None, findings: Findings) -> bool:
    """Whether the layout is anchor-first: by the argument, a key, what another field implies, or the packaging.

    Args:
        fields: sections that may state the layout.
        drafter: the raw config; a speculators one implies the layout by its number of speculative tokens.
        chosen: the caller's decision, for a checkpoint whose keys state no layout, or contradict one another.
        findings: receives the source of the choice.

    Raises:
        CheckpointError: two sources disagree and the caller did not choose; `chosen` is unknown, or differs from what
            the checkpoint states.
    """
    if chosen is not None:
        return _read_chosen(fields, drafter, chosen, findings)
    stated, implied = _sources(fields, drafter)
    if stated:
        findings.note(f"layout: {NAMES[stated[0][1]]}, from {stated[0][0]}")
        return stated[0][1]
    if implied:
        findings.assume(f"layout: {NAMES[implied[0][1]]}, inferred from {implied[0][0]}; {OVERRIDE}")
        return implied[0][1]
    if drafter.get("speculators_model_type") is not None:
        findings.assume(
            "layout: 1+N (fill), assumed: a speculators checkpoint without sample_from_anchor predates that key; "
            f"{OVERRIDE}"
        )
        return False
    findings.assume(f"layout: anchor-first, assumed: the config has no layout key; {OVERRIDE}")
    return True


def _read_chosen(fields: Fields, drafter: Mapping[str, Any], chosen: Layout, findings: Findings) -> bool:
    if chosen not in ("anchor", "fill"):
        raise refusal(f"layout={chosen!r}", '"anchor" or "fill"', ONE_PERCENT, "Pass one of them, or leave layout out.")
    anchor_first = chosen == "anchor"
    sources = Findings().attempt(_sources, fields, drafter)  # None: they contradict one another, and the choice decides
    if sources is not None and sources[0]:
        source, value = sources[0][0]
        if value != anchor_first:
            raise refusal(
                f"--layout {chosen} (layout= in Python) means {NAMES[anchor_first]}, but the checkpoint states "
                f"{source}, which means {NAMES[value]}",
                "no --layout for a checkpoint that states its layout",
                ONE_PERCENT,
                "Leave --layout out; if the checkpoint is wrong, correct it in config.json.",
            )
    findings.note(f"layout: {NAMES[anchor_first]}, from --layout or layout=")
    return anchor_first


_Sources = list[tuple[str, bool]]  # where the layout stands, and whether it is anchor-first


def _sources(fields: Fields, drafter: Mapping[str, Any]) -> tuple[_Sources, _Sources]:
    """What keys state and what other fields imply (CheckpointError if two of them disagree)."""
    stated = _stated(fields)
    implied = _implied_by_speculative_tokens(fields, drafter)
    for (source, value), (other, differing) in pairwise(stated + implied):
        if value != differing:
            raise refusal(
                f"{source} means {NAMES[value]} but {other} means {NAMES[differing]}: they are inconsistent",
                "sources that agree",
                f"{ONE_PERCENT} {CHOOSE}",
            )
    return stated, implied


def _stated(fields: Fields) -> _Sources:
    """What keys say."""
    stated = []
    for name, anchor_value in (
        ("sample_from_anchor", True),
        ("query_zero_predicts_next", True),
        ("dspark_bonus_anchor", False),
    ):
        found = fields.flag(name)
        if found is not None:
            stated.append((str(found), found.value is anchor_value))
    start = fields.find("logits_start")
    if start is not None:
        if start.value not in (0, 1) or isinstance(start.value, bool):
            raise refusal(str(start), "0 (anchor-first) or 1 (fill)", ONE_PERCENT, "Correct it in config.json.")
        stated.append((str(start), start.value == 0))
    return stated


def _implied_by_speculative_tokens(fields: Fields, drafter: Mapping[str, Any]) -> _Sources:
    """speculators records how many tokens a round yields: all rows (anchor-first) or all but row 0."""
    methods = section(drafter, "speculators_config").get("proposal_methods")
    if not isinstance(methods, list):
        return []
    rows = read_block_size(fields)
    implied = []
    for method in methods:
        tokens = method.get("speculative_tokens") if isinstance(method, Mapping) else None
        if tokens is None:
            continue
        found = Found("speculative_tokens", tokens)
        if rows - integer(found, 1, ONE_PERCENT) not in (0, 1):
            raise refusal(
                f"block_size={rows} with {found}", f"{rows} or {rows - 1} speculative tokens", ONE_PERCENT, CHOOSE
            )
        implied.append((f"block_size={rows} with {found}", rows == tokens))
    return implied


def check_block(block_size: int, anchor_first: bool, mask_token_id: int, vocab_size: int) -> None:
    """Refuse a 1+N block without draft rows, and a mask token that has no embedding row."""
    if not anchor_first and block_size < 2:
        raise refusal(
            f"block_size={block_size} in the 1+N layout",
            "at least 2",
            "Row 0 only re-states the anchor; no row drafts. Correct block_size or the layout.",
        )
    if mask_token_id >= vocab_size:
        raise refusal(
            f"mask_token_id={mask_token_id} is outside the {vocab_size} embedding rows",
            f"an id in 0..{vocab_size - 1}",
            "Filler rows could not be embedded.",
            "Correct mask_token_id, or ship the larger embed_tokens it was trained with.",
        )


def read_draft_topk(fields: Fields, draft_vocab_size: int, findings: Findings) -> None:
    """`dspark_draft_topk`, a serving option: checked, and noted as not applied."""
    found = fields.find("dspark_draft_topk")
    if found is None:
        return
    if integer(found, 1, "No candidate would be left.") > draft_vocab_size:
        raise refusal(
            str(found), f"1..{draft_vocab_size}", "There are not that many candidates.", "Correct it in config.json."
        )
    findings.note(f"{found} not applied: the Markov step always runs over the whole draft vocabulary")
