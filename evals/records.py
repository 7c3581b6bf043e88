"""The files of an evaluation in progress: settings.json and records.jsonl.

`records.jsonl` gets one line per request as soon as the request ends, so an interrupted run loses only what was in
flight, and running it again continues. `settings.json` is written before the first record: a run continues only with
the settings that it began with. A last line without its newline was torn by the interruption; it is dropped, and its
request runs again.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.records import FinishReason, StepRecord

SETTINGS_FILE = "settings.json"
RECORDS_FILE = "records.jsonl"


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


class RecordStore:
    """Records of one run, in memory and, given a folder, on disk.

    Args:
        folder: where the files are, created if needed; None keeps everything in memory.
        description: the run's full settings.

    Raises:
        ValueError: the folder holds a run with other settings, records without settings, or a damaged record.
    """

    def __init__(self, folder: Path | None, description: dict[str, Any]):
        self.folder = folder
        self.records: dict[tuple[str, float, int], RequestRecord] = {}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._claim(folder / SETTINGS_FILE, description)
        self._load(folder / RECORDS_FILE)

    def add(self, record: RequestRecord) -> None:
        """Keep a finished request; on disk before this returns to the caller's loop."""
        self.records[record.key] = record
        if self.folder is not None:
            with (self.folder / RECORDS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")

    def _claim(self, path: Path, description: dict[str, Any]) -> None:
        if not path.exists():
            if (path.parent / RECORDS_FILE).exists():
                raise ValueError(
                    f"{path.parent} has {RECORDS_FILE} but no {SETTINGS_FILE}: what its records were made with is "
                    "unknown. Choose another folder"
                )
            write_json(path, description)
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
        differences = list(_differences(stored, json.loads(json.dumps(description))))
        if differences:
            raise ValueError(
                f"{path.parent} holds a run with other settings, and mixing the two would give figures of neither: "
                f"{'; '.join(differences)}. Continue with the stored values, or choose another folder"
            )

    def _load(self, path: Path) -> None:
        if not path.exists():
            return
        data = path.read_bytes()
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(complete))
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                record = RequestRecord.from_dict(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{path}:{number}: not a record of this version ({error}). Delete the line to run its request again"
                ) from None
            if record.key in self.records:
                raise ValueError(
                    f"{path}:{number}: a second record of request {record.key}; did two runs share the folder?"
                )
            self.records[record.key] = record


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old file or the new one, never a part."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def _differences(stored: Any, current: Any, path: str = "") -> list[str]:
    """One line for each value that differs, named by its path."""
    if isinstance(stored, dict) and isinstance(current, dict):
        keys = sorted(stored.keys() | current.keys())
        return [
            line
            for key in keys
            for line in _differences(stored.get(key), current.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if stored == current else [f"{path}: stored {json.dumps(stored)}, now {json.dumps(current)}"]
