"""Run a drafter over prompt sets and measure it: `evaluate`.

    prompts -> a backend -> a record per request (records.jsonl) -> a `Run`, with a row per data set and temperature

Rows are computed from the records alone, so a run that was interrupted and continued gives the rows of one that was
not. Every request has its own seed, from the run's seed, the data set's name and the prompt's index. In float64 its
tokens do not depend on what else is in the batch; in narrower types a near-tie may fall otherwise where an
interruption changed the batches.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dspark.drafter import Drafter
from dspark.evals.backends import Backend, LoopBackend
from dspark.evals.compare import Run, compare_runs
from dspark.evals.datasets import (
    Dataset,
    Prompt,
    PromptFormat,
    format_prompt,
    load_dataset,
    prompt_sha256,
    resolve_prompt_format,
)
from dspark.evals.folder import write_results
from dspark.evals.records import RecordStore, RequestRecord
from dspark.evals.rows import NOT_TIMED, ResultRow, Timing
from dspark.evals.settings import EvalSettings, describe_run, request_seed
from dspark.records import Generation
from dspark.target import HFTarget


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
    return run_backend(backend, settings, out_dir, progress).rows


def run_backend(
    backend: Backend,
    settings: EvalSettings,
    out_dir: str | Path | None = None,
    progress: bool = True,
    run_name: str = "run",
) -> Run:
    """`evaluate_backend`, with the records that the rows were computed from; `run_name` is what reports call it."""
    datasets = [load_dataset(name, settings.limit) for name in settings.datasets]
    names = [dataset.name for dataset in datasets]
    if len(set(names)) < len(names):
        raise ValueError(f"two data sets have the same name, so their rows could not be told apart: {', '.join(names)}")
    prompt_format = resolve_prompt_format(backend, settings.prompt_mode, settings.thinking)
    description = describe_run(backend.describe(), settings, datasets, prompt_format)
    store = RecordStore(None if out_dir is None else Path(out_dir), description)
    cells, timings = {}, {}
    for dataset in datasets:
        requests = _requests(backend, dataset, prompt_format, settings.seed)
        for temperature in settings.temperatures:
            missing = [r for r in requests if not _is_stored(r, temperature, store)]
            cell = (dataset.name, temperature)
            timings[cell] = _generate(backend, settings, temperature, missing, store, progress)
            cells[cell] = [store.records[r.key(temperature)] for r in requests]
    run = Run(run_name, description, cells, timings)
    if out_dir is not None:
        write_results(Path(out_dir), compare_runs([run]))
    return run


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
        return NOT_TIMED
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
