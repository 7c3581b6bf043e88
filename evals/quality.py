"""Draft quality without generation: any number of drafters on one target's states.

    prompts -> target states (on disk, once) -> anchor scores of each drafter -> a row per data set, temperature, K

`evaluate` generates with every drafter anew and counts what happened; here the target continues the prompts once,
without a drafter, and what generation would count follows in expectation. It takes a pass of the drafter over the text
instead of a generation, has no noise of acceptance, and rows of all drafters rest on the same texts.
Read first: `dspark.evals.target_states`, `dspark.evals.block_scores`, `dspark.evals.quality_figures`, in that order of
the work. Two commands that run it:

    dspark quality --dataset default --temperature 0 1
    dspark quality TARGET DRAFTER OTHER_DRAFTER --dataset FILE.jsonl --ablate markov --out quality/
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from dspark.drafter import Drafter, check_num_draft_tokens
from dspark.evals.block_scores import ScoringRule, score_paths, without_markov
from dspark.evals.datasets import load_datasets, resolve_prompt_format
from dspark.evals.quality_figures import Quality, measure_quality
from dspark.evals.records import RECORDS_FILE, RESULTS_FILE, write_json
from dspark.evals.settings import EvalSettings, describe_drafter, describe_target, library_versions, source_commit
from dspark.evals.stats import Bootstrap
from dspark.evals.target_states import (
    StateStore,
    TextSet,
    compute_states,
    continue_prompts,
    describe_states,
    states_key,
)
from dspark.loop import check_pair
from dspark.target import HFTarget

ABLATIONS = {"markov": "without Markov head"}


@dataclass(frozen=True)
class QualityOptions:
    """What `EvalSettings` has no word for.

    `num_draft_tokens`: a row for each K; empty means each drafter's maximum. `ablate`: names of `ABLATIONS`, a row for
    each beside the intact drafter. `states`: folder in which target states are kept, a folder for each data set,
    temperature and digest of all settings; None keeps them only while scoring.
    """

    num_draft_tokens: tuple[int, ...] = ()
    ablate: tuple[str, ...] = ()
    states: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what names no row (ValueError)."""
        for name, values in (("num_draft_tokens", self.num_draft_tokens), ("ablate", self.ablate)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} {values} names one twice: its rows could not be told apart")
        unknown = [name for name in self.ablate if name not in ABLATIONS]
        if unknown:
            raise ValueError(f"ablate {unknown[0]!r} is unknown; there is: {', '.join(ABLATIONS)}")


@dataclass(frozen=True)
class QualityRow:
    """Figures of one drafter on one data set at one temperature and K, with all settings they hold for.

    `variant` is empty for the drafter as it is, or says what was switched off. `seconds` is the time of scoring, for
    all K together.
    """

    drafter: str
    variant: str
    dataset: str
    temperature: float
    num_draft_tokens: int
    settings: dict[str, Any]
    quality: Quality
    seconds: float = field(compare=False)

    @property
    def name(self) -> str:
        """What tells the row apart, in words."""
        variant = f" {self.variant}" if self.variant else ""
        return f"{self.drafter}{variant}, {self.dataset} T={self.temperature:g} K={self.num_draft_tokens}"

    def to_dict(self) -> dict[str, Any]:
        """All but the time, ready for JSON."""
        row = asdict(self)
        del row["seconds"]
        return row


def score_drafters(
    target: HFTarget,
    drafters: Mapping[str, Drafter],
    settings: EvalSettings,
    options: QualityOptions | None = None,
    progress: bool = True,
) -> list[QualityRow]:
    """Score drafters on prompt sets.

    Args:
        target: the target, with its tokenizer.
        drafters: by the name that rows are to bear; all loaded for this target.
        settings: data sets, sampling, seed, drafting, batch size. `num_draft_tokens` is not read.
        options: K, ablations, and where states are kept.
        progress: whether to show bars on stderr.

    Returns:
        Rows by data set, temperature, drafter, variant and K, in the order given.

    Raises:
        ValueError: settings, data sets or models do not fit together, or K is outside a drafter's range.
    """
    options = options or QualityOptions()
    for drafter in drafters.values():
        check_pair(target, drafter)
        for num_draft_tokens in options.num_draft_tokens:
            check_num_draft_tokens(drafter.config, num_draft_tokens)
    datasets = load_datasets(settings.datasets, settings.limit)
    prompt_format = resolve_prompt_format(target, settings.prompt_mode, settings.thinking)
    with TemporaryDirectory() as scratch:
        sets = []
        for dataset, temperature in product(datasets, settings.temperatures):
            description = describe_states(target, settings, dataset, prompt_format, temperature)
            name = f"{dataset.name}-T{temperature:g}-{states_key(description)}"
            store = StateStore((options.states or Path(scratch)) / name, description)
            sets.append(TextSet(dataset, temperature, store))
        continue_prompts(target, sets, settings, prompt_format, progress)
        tap_ids = {tap_id for drafter in drafters.values() for tap_id in drafter.config.tap_ids}
        for texts in sets:
            compute_states(target, texts.store, texts.paths, sorted(tap_ids), progress)
        models = {"target": describe_target(target), "versions": library_versions(), "commit": source_commit()}
        rows = []
        for texts, (name, drafter) in product(sets, drafters.items()):
            shared = models | {"drafter": describe_drafter(drafter), "drafter_name": name}
            variants = {"": drafter}
            if "markov" in options.ablate and drafter.markov_head is not None:
                variants[ABLATIONS["markov"]] = without_markov(drafter)
            for variant, scored in variants.items():
                rows += _rows(target, (name, variant, scored), texts, settings, options, shared, progress)
    return rows


def _rows(
    target: HFTarget,
    named: tuple[str, str, Drafter],
    texts: TextSet,
    settings: EvalSettings,
    options: QualityOptions,
    shared: dict[str, Any],
    progress: bool,
) -> list[QualityRow]:
    """Score one drafter on one set of texts; a row for each K."""
    name, variant, drafter = named
    lengths = options.num_draft_tokens or (drafter.config.max_draft_tokens,)
    params = settings.sampling_params(texts.temperature, seed=0)
    rule = ScoringRule(params, max(lengths), settings.drafting, settings.draft_truncation)
    started = time.perf_counter()
    num_anchors = sum(path.num_anchors for path in texts.paths)
    bar_name = f"{name} {texts.dataset.name} T={texts.temperature:g}"
    with tqdm(total=num_anchors, desc=bar_name, unit="anchor", file=sys.stderr, disable=not progress) as bar:
        scores = score_paths(target, drafter, texts.store, texts.paths, rule, bar.update)
    seconds = time.perf_counter() - started
    bootstrap = Bootstrap(len(texts.paths))
    described = {
        **shared,
        "variant": variant,
        "states": texts.store.description,
        "num_prompts": len(texts.paths),
        "drafting": settings.drafting,
        "draft_truncation": settings.draft_truncation,
        "target_name": settings.target_name,
    }
    return [
        QualityRow(
            *(name, variant, texts.dataset.name, texts.temperature, num_draft_tokens),
            {**described, "num_draft_tokens": num_draft_tokens},
            measure_quality(scores, len(texts.paths), num_draft_tokens, bootstrap),
            seconds,
        )
        for num_draft_tokens in lengths
    ]


def check_results_folder(folder: Path) -> None:
    """Refuse a folder of `dspark eval`, whose results of the same name would be lost (ValueError)."""
    if (folder / RECORDS_FILE).exists():
        raise ValueError(f"{folder} holds a run of dspark eval, and its {RESULTS_FILE} would be lost; choose another")


def write_results(folder: Path, rows: Sequence[QualityRow], requirements: Sequence[Any] = ()) -> None:
    """Write results.json: rows with their settings, timing, and what was required of them.

    Raises:
        ValueError: see `check_results_folder`.
    """
    check_results_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    timing = [{"row": row.name, "anchors": row.quality.num_anchors, "seconds": row.seconds} for row in rows]
    results = {"command": "quality", "rows": [row.to_dict() for row in rows], "requirements": requirements}
    write_json(folder / RESULTS_FILE, results | {"timing": timing})
