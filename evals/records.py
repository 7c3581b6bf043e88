"""The files of an evaluation in progress: settings.json and records.jsonl.

`records.jsonl` gets one line per request as soon as the request ends, so an interrupted run loses only what was in
flight, and running it again continues. `settings.json` is written before the first record: a run continues only with
the settings that it began with. A last line without its newline was torn by the interruption; it is dropped, and its
request runs again.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dspark.evals.datasets import Dataset, Prompt, PromptFormat, format_prompt, prompt_sha256
from dspark.evals.settings import EvalSettings, request_seed
from dspark.records import FinishReason, Generation, StepRecord

log = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
RECORDS_FILE = "records.jsonl"
RESULTS_FILE = "results.json"  # figures, made from the two files above


@dataclass(frozen=True)
class RequestRecord:
    """One finished request. `token_ids` ends with the stop token if there was one; `steps` do not contain its first
    token."""

    dataset: str
    temperature: float
    index: int
    domain: str | None
    seed: int
    prompt_sha256: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...]
    steps: tuple[StepRecord, ...]

    @property
    def key(self) -> tuple[str, float, int]:
        """What identifies the request within a run."""
        return self.dataset, self.temperature, self.index

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> "RequestRecord":
        """Inverse of `dataclasses.asdict`.

        Raises:
            TypeError: fields are missing or unknown.
        """
        steps = [
            StepRecord(**{key: tuple(value) if isinstance(value, list) else value for key, value in step.items()})
            for step in row["steps"]
        ]
        return cls(**{**row, "token_ids": tuple(row["token_ids"]), "steps": tuple(steps)})


@dataclass(frozen=True)
class Request:
    """One prompt of a data set at one temperature, formatted, with its seed."""

    dataset: str
    temperature: float
    prompt: Prompt
    prompt_ids: list[int]
    seed: int

    @property
    def key(self) -> tuple[str, float, int]:
        """That of its record."""
        return self.dataset, self.temperature, self.prompt.index

    def record(self, generation: Generation) -> RequestRecord:
        """What is kept of it when it has ended."""
        return RequestRecord(
            dataset=self.dataset,
            temperature=self.temperature,
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


def list_requests(
    source: Any, dataset: Dataset, temperature: float, prompt_format: PromptFormat, seed: int
) -> list[Request]:
    """The requests of a data set at a temperature, in prompt order.

    Args:
        source: anything with the target's `tokenizer`.
        dataset: the prompts.
        temperature: of all of them.
        prompt_format: how prompts are formatted.
        seed: of the run; each request gets its own from it.
    """
    return [
        Request(
            dataset=dataset.name,
            temperature=temperature,
            prompt=prompt,
            prompt_ids=format_prompt(source, prompt.text, prompt_format),
            seed=request_seed(seed, dataset.name, prompt.index),
        )
        for prompt in dataset.prompts
    ]


def run_requests(
    generate: Callable[..., list[Generation]],
    waiting: Sequence[tuple["RecordStore", Request]],
    settings: EvalSettings,
    name: str,
    progress: bool,
    keep_steps: bool = True,
) -> list[Generation]:
    """Generate for requests; the record of each goes to its store as soon as it ends.

    Args:
        generate: as `Backend.generate`.
        waiting: the requests, each with the store of its record.
        settings: how they are sampled.
        name: of the bar on stderr.
        progress: whether to show it.
        keep_steps: whether records hold the steps.
    """
    with tqdm(total=len(waiting), desc=name, unit="request", file=sys.stderr, disable=not progress) as bar:

        def on_finish(index: int, generation: Generation) -> None:
            store, request = waiting[index]
            store.add(request.record(generation if keep_steps else replace(generation, steps=[])))
            bar.update()

        params = [settings.sampling_params(request.temperature, request.seed) for _, request in waiting]
        return generate([request.prompt_ids for _, request in waiting], params, on_finish=on_finish)


class RecordStore:
    """Records of one run, in memory and, given a folder, on disk.

    Args:
        folder: where the files are, created if needed; None keeps everything in memory.
        description: the run's full settings.

    Raises:
        ValueError: the folder holds a run with other settings, records without settings, or a damaged record.
    """

    def __init__(self, folder: Path | None, description: dict[str, Any]):
        self.folder, self.description = folder, description
        self.records: dict[tuple[str, float, int], RequestRecord] = {}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._claim(folder / SETTINGS_FILE, description)
        path = folder / RECORDS_FILE
        self.records, num_bytes = read_records(path)
        if path.exists() and num_bytes < path.stat().st_size:
            log.info("%s: its last line was torn by an interruption and is dropped; that request runs again", path)
            with path.open("r+b") as file:
                file.truncate(num_bytes)

    def add(self, record: RequestRecord) -> None:
        """Keep a finished request; on disk before this returns to the caller's loop."""
        if self.folder is not None:
            with (self.folder / RECORDS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
        self.records[record.key] = record

    def missing(self, requests: Sequence[Request]) -> list[Request]:
        """Those without a record.

        Raises:
            ValueError: a record is of other prompt tokens. Settings do not name the tokenizer, so it is checked here by
                what it does.
        """
        found = []
        for request in requests:
            record, expected = self.records.get(request.key), prompt_sha256(request.prompt_ids)
            if record is None:
                found.append(request)
            elif record.prompt_sha256 != expected:
                raise ValueError(
                    f"prompt {record.index} of {record.dataset} is stored in {self.folder} with sha256 "
                    f"{record.prompt_sha256}, but its tokens now give {expected}: the tokenizer has changed. Choose "
                    "another folder"
                )
        return found

    def _claim(self, path: Path, description: dict[str, Any]) -> None:
        if not path.exists():
            if (path.parent / RECORDS_FILE).exists():
                raise ValueError(
                    f"{path.parent} has {RECORDS_FILE} but no {SETTINGS_FILE}: what its records were made with is "
                    "unknown. Choose another folder"
                )
            write_json(path, description)
            return
        stored = read_json(path, "Choose another folder")
        differences = differing_fields(stored, json.loads(json.dumps(description)))
        if differences:
            listed = "; ".join(
                f"{name}: stored {json.dumps(old)}, now {json.dumps(new)}" for name, (old, new) in differences.items()
            )
            code = f", with commit {stored.get('commit')} checked out" if "code" in differences else ""
            raise ValueError(
                f"{path.parent} holds a run with other settings, and mixing the two would give figures of neither: "
                f"{listed}. Continue with the stored values{code}, or choose another folder"
            )


def read_records(path: Path) -> tuple[dict[tuple[str, float, int], RequestRecord], int]:
    """The records of a file by their keys, and how many bytes of it they are; a torn last line is no record, and a file
    that is not there has none.

    Raises:
        ValueError: a line is damaged, or a request is there twice; named as file:line.
    """
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    records: dict[tuple[str, float, int], RequestRecord] = {}
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            record = RequestRecord.from_dict(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}:{number}: not a record of this version ({error}). Delete the line to run its request again"
            ) from None
        if record.key in records:
            raise ValueError(
                f"{path}:{number}: a second record of request {record.key}; did two runs share the folder?"
            )
        records[record.key] = record
    return records, len(complete)


def read_json(path: Path, remedy: str) -> Any:
    """What a JSON file holds (ValueError with the remedy where it is damaged)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: no JSON ({error}). {remedy}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, dataclasses as objects, so that a reader sees the old file or the new one, never a part."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(value, indent=1, allow_nan=False, default=asdict) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def differing_fields(first: Any, second: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Both values of every field that differs, by its dotted path; None where one side lacks it.

    A commit does not count where the digest of the code is known too, which says more exactly what ran.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        keys = first.keys() | second.keys()
        keys -= {"commit"} if "code" in keys else set()
        parts = (differing_fields(first.get(k), second.get(k), f"{path}.{k}" if path else k) for k in sorted(keys))
        return {name: values for part in parts for name, values in part.items()}
    return {} if first == second else {path: (first, second)}
