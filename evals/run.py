"""Run a drafter over prompt sets and measure it: `evaluate`.

    prompts -> a backend -> a record per request (records.jsonl) -> a `Run`, with a row per data set and temperature

Rows are computed from the records alone, so a run that was interrupted and continued gives the rows of one that was
not. Every request has its own seed, from the run's seed, the data set's name and the prompt's index. In float64 its
tokens do not depend on what else is in the batch; in narrower types a near-tie may fall otherwise where an
interruption changed the batches.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from dspark.drafter import Drafter
from dspark.evals.backends import Backend, LoopBackend
from dspark.evals.compare import Run, compare_runs
from dspark.evals.datasets import Dataset, PromptFormat, load_datasets, resolve_prompt_format
from dspark.evals.document import write_results
from dspark.evals.records import RecordStore, Request, list_requests, run_requests
from dspark.evals.rows import NOT_TIMED, ResultRow, Timing
from dspark.evals.settings import EvalSettings, describe_run
from dspark.target import HFTarget

log = logging.getLogger(__name__)


def evaluate(
    target: HFTarget,
    drafter: Drafter | None,
    settings: EvalSettings,
    out_dir: str | Path | None = None,
    progress: bool = True,
) -> list[ResultRow]:
    """Measure acceptance on prompt sets with the library's own loop.

    Args:
        target: the target, with its tokenizer.
        drafter: the drafter; None decodes plainly, the base line.
        settings: what to run.
        out_dir: see `open_run`.
        progress: whether to show a bar on stderr.

    Returns:
        One row per data set and temperature, data sets outermost.

    Raises:
        ValueError: settings, data sets or models do not fit together, or `out_dir` holds a run with other settings.
    """
    return open_run(LoopBackend(target, drafter, settings), settings, out_dir).finish(progress).rows


@dataclass(frozen=True)
class OpenRun:
    """A run whose folder, if it has one, says what it is; `finish` runs what is missing in it."""

    name: str
    backend: Backend
    settings: EvalSettings
    datasets: list[Dataset]
    prompt_format: PromptFormat
    store: RecordStore

    @property
    def num_requests(self) -> int:
        """Requests of the whole run, those that the folder has included."""
        return sum(len(dataset.prompts) for dataset in self.datasets) * len(self.settings.temperatures)

    def finish(self, progress: bool = True) -> Run:
        """Run every request that the folder lacks, write results.json, and give the records of all."""
        cells, timings = {}, {}
        for dataset in self.datasets:
            for temperature in self.settings.temperatures:
                cell, seed = (dataset.name, temperature), self.settings.seed
                requests = list_requests(self.backend, dataset, temperature, self.prompt_format, seed)
                timings[cell] = self._generate(self.store.missing(requests), progress)
                cells[cell] = [self.store.records[request.key] for request in requests]
        run = Run(self.name, self.store.description, cells, timings)
        if self.store.folder is not None:
            write_results(self.store.folder, compare_runs([run]))
        return run

    def _generate(self, requests: list[Request], progress: bool) -> Timing:
        """Run requests of one cell; each goes to the store as soon as it ends."""
        if not requests:
            return NOT_TIMED
        name, waiting = f"{requests[0].dataset} T={requests[0].temperature:g}", [(self.store, r) for r in requests]
        started = time.perf_counter()
        generations = run_requests(self.backend.generate, waiting, self.settings, name, progress)
        num_tokens = sum(len(generation.token_ids) for generation in generations)
        return Timing(len(requests), num_tokens, time.perf_counter() - started)


def open_run(backend: Backend, settings: EvalSettings, out_dir: str | Path | None = None, name: str = "run") -> OpenRun:
    """Prepare an evaluation.

    Args:
        backend: what runs the requests.
        settings: what to run.
        out_dir: folder for settings.json, written here, records.jsonl and results.json; a run found there continues.
            None writes nothing.
        name: what reports call the run.

    Raises:
        ValueError: settings, data sets or models do not fit together, or `out_dir` holds a run with other settings.
    """
    datasets = load_datasets(settings.datasets, settings.limit)
    prompt_format = resolve_prompt_format(backend, settings.prompt_mode, settings.thinking)
    description = describe_run(backend.describe(), settings, datasets, prompt_format)
    store = RecordStore(None if out_dir is None else Path(out_dir), description)
    run = OpenRun(name, backend, settings, datasets, prompt_format, store)
    kept, total = len(store.records), run.num_requests
    if kept:
        rest = "the run was complete, and nothing is run again" if kept == total else "the run continues"
        log.info("%s of %s requests are already there in %s: %s", kept, total, out_dir, rest)
    return run
