"""Run a drafter over prompt sets and measure it: `evaluate`.

    prompts -> a backend -> a record per request (records.jsonl) -> a row per data set and temperature (results.json)

Rows are computed from the records alone, so a run that was interrupted and continued gives the rows of one that was
not. Every request has its own seed, from the run's seed, the data set's name and the prompt's index. In float64 its
tokens do not depend on what else is in the batch; in narrower types a near-tie may fall otherwise where an
interruption changed the batches.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dspark.drafter import Drafter
from dspark.evals.acceptance import measure_acceptance, tail_repeats
from dspark.evals.backends import Backend, LoopBackend
from dspark.evals.datasets import (
    Dataset,
    Prompt,
    PromptFormat,
    format_prompt,
    load_dataset,
    prompt_sha256,
    resolve_prompt_format,
)
from dspark.evals.records import RecordStore, RequestRecord, write_json
from dspark.evals.report import ResultRow, Timing
from dspark.evals.settings import EvalSettings, describe_run, request_seed, row_settings
from dspark.evals.stats import Bootstrap
from dspark.records import Generation
from dspark.target import HFTarget

RESULTS_FILE = "results.json"


def evaluate(
    target: HFTarget,
    drafter: Drafter | None,
    settings: EvalSettings,
    out_dir: str | Path | None = None,
    progress: bool = True,
) -> list[ResultRow]:
    """Measure acceptance on prompt sets with the library's own loop: `evaluate_backend` with a `LoopBackend`.

    Args:
        target: the target, with its tokenizer.
        drafter: the drafter; None decodes plainly, the base line.
        settings: see `evaluate_backend`.
        out_dir: see `evaluate_backend`.
        progress: see `evaluate_backend`.
    """
    return evaluate_backend(LoopBackend(target, drafter, settings), settings, out_dir, progress)


def evaluate_backend(
    backend: Backend, settings: EvalSettings, out_dir: str | Path | None = None, progress: bool = True
) -> list[ResultRow]:
    """Measure acceptance on prompt sets.

    Args:
        backend: what runs the requests.
        settings: what to run.
        out_dir: folder for settings.json, records.jsonl and results.json; a run found there continues. None writes
            nothing.
        progress: whether to show a bar on stderr.

    Returns:
        One row per data set and temperature, data sets outermost.

    Raises:
        ValueError: settings, data sets or models do not fit together, or `out_dir` holds a run with other settings.
    """
    datasets = [load_dataset(name, settings.limit) for name in settings.datasets]
    names = [dataset.name for dataset in datasets]
    if len(set(names)) < len(names):
        raise ValueError(f"two data sets have the same name, so their rows could not be told apart: {', '.join(names)}")
    prompt_format = resolve_prompt_format(backend, settings.prompt_mode, settings.thinking)
    description = describe_run(backend.describe(), settings, datasets, prompt_format)
    store = RecordStore(None if out_dir is None else Path(out_dir), description)
    rows = []
    for dataset in datasets:
        requests = _requests(backend, dataset, prompt_format, settings.seed)
        for temperature in settings.temperatures:
            missing = [r for r in requests if not _is_stored(r, temperature, store)]
            timing = _generate(backend, settings, temperature, missing, store, progress)
            records = [store.records[r.key(temperature)] for r in requests]
            rows.append(make_row(records, row_settings(description, dataset.name, temperature), timing))
    if out_dir is not None:
        _write_results(Path(out_dir), description, rows)
    return rows


def make_row(records: Sequence[RequestRecord], settings: dict[str, Any], timing: Timing) -> ResultRow:
    """Compute the figures of one data set at one temperature.

    Args:
        records: its requests, at least one, in prompt order.
        settings: what `row_settings` gives for them.
        timing: speed of the requests that were run.
    """
    bootstrap = Bootstrap(len(records))
    loops = np.array([tail_repeats(record.token_ids) for record in records], dtype=np.float64)
    return ResultRow(
        dataset=records[0].dataset,
        temperature=records[0].temperature,
        settings=settings,
        acceptance=measure_acceptance([record.steps for record in records], bootstrap),
        num_tokens=sum(record.num_tokens for record in records),
        finish_reasons=dict(Counter(record.finish_reason for record in records)),
        repetition=bootstrap.mean(loops),
        timing=timing,
    )


@dataclass(frozen=True)
class _Request:
    """One prompt, formatted, with its seed."""

    dataset: str
    prompt: Prompt
    prompt_ids: list[int]
    seed: int

    def key(self, temperature: float) -> tuple[str, float, int]:
        return self.dataset, temperature, self.prompt.index

    def record(self, temperature: float, generation: Generation) -> RequestRecord:
        return RequestRecord(
            dataset=self.dataset,
            temperature=temperature,
            index=self.prompt.index,
            domain=self.prompt.domain,
            seed=self.seed,
            prompt_sha256=prompt_sha256(self.prompt_ids),
            num_prompt_tokens=len(self.prompt_ids),
            num_tokens=len(generation.token_ids),
            finish_reason=generation.finish_reason,
            token_ids=tuple(generation.token_ids),
            steps=tuple(generation.steps),
        )


def _requests(backend: Backend, dataset: Dataset, prompt_format: PromptFormat, seed: int) -> list[_Request]:
    return [
        _Request(
            dataset=dataset.name,
            prompt=prompt,
            prompt_ids=format_prompt(backend, prompt.text, prompt_format),
            seed=request_seed(seed, dataset.name, prompt.index),
        )
        for prompt in dataset.prompts
    ]


def _is_stored(request: _Request, temperature: float, store: RecordStore) -> bool:
    """Whether an earlier run finished this request; its record must be of the very same prompt tokens.

    The settings that a store compares do not name the tokenizer, so it is checked here by what it does.
    """
    record = store.records.get(request.key(temperature))
    if record is None:
        return False
    expected = prompt_sha256(request.prompt_ids)
    if record.prompt_sha256 != expected:
        raise ValueError(
            f"prompt {record.index} of {record.dataset} is stored with sha256 {record.prompt_sha256}, but its tokens "
            f"now give {expected}: the tokenizer has changed. Choose another folder"
        )
    return True


def _generate(
    backend: Backend,
    settings: EvalSettings,
    temperature: float,
    requests: list[_Request],
    store: RecordStore,
    progress: bool,
) -> Timing:
    """Run requests at one temperature; each goes to the store as soon as it ends."""
    if not requests:
        return Timing(0, 0, 0.0)
    name = f"{requests[0].dataset} T={temperature:g}"
    started = time.perf_counter()
    with tqdm(total=len(requests), desc=name, unit="request", file=sys.stderr, disable=not progress) as bar:

        def on_finish(index: int, generation: Generation) -> None:
            store.add(requests[index].record(temperature, generation))
            bar.update()

        generations = backend.generate(
            [request.prompt_ids for request in requests],
            [settings.sampling_params(temperature, request.seed) for request in requests],
            on_finish,
        )
    num_tokens = sum(len(generation.token_ids) for generation in generations)
    return Timing(len(requests), num_tokens, time.perf_counter() - started)


def _write_results(folder: Path, description: dict[str, Any], rows: Sequence[ResultRow]) -> None:
    timing = [{"dataset": row.dataset, "temperature": row.temperature, **row.timing.to_dict()} for row in rows]
    results = {"description": description, "rows": [row.to_dict() for row in rows], "timing": timing}
    write_json(folder / RESULTS_FILE, results)
