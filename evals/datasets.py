"""Prompt sets, and how a prompt becomes the token ids that the target sees.

A data set is a JSON Lines file with one prompt a line: `{"prompt": "..."}`, or `{"turns": ["...", ...]}`, of which
the *first turn* is evaluated and the others are left out. An optional `domain` is kept with the prompt; other fields
are ignored. Sets that ship with the package are found by name.

Acceptance depends strongly on what is around the prompt (chat template, thinking mode), so `PromptFormat` says what
was applied and is part of every result.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.terminal import count

log = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "data"
EXPECTED_ROW = 'expected one JSON object a line, {"prompt": "text"} or {"turns": ["first turn", ...]}'
THINKING_VARIABLE = "enable_thinking"  # the name that chat templates with a thinking switch use for it
PROMPT_MODES = ("auto", "chat", "raw")


@dataclass(frozen=True)
class Prompt:
    """One request of a data set. `index` counts the prompts of the file from 0, whatever the limit."""

    index: int
    text: str
    domain: str | None = None


@dataclass(frozen=True)
class Dataset:
    """Prompts of one file. `sha256` is that of the whole file, also where a limit shortens `prompts`."""

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]


def packaged_datasets() -> list[str]:
    """Names of the sets that ship with the package."""
    return sorted(path.stem for path in PACKAGED.glob("*.jsonl"))


def load_dataset(name_or_path: str | Path, limit: int | None = None) -> Dataset:
    """Read a prompt set.

    Args:
        name_or_path: name of a packaged set, or the path of a JSON Lines file. A packaged name wins over a file of
            the same name in the current directory; `./name` reads the file.
        limit: keep the first `limit` prompts; None keeps all.

    Returns:
        The prompts in file order, named after the file without its suffix.

    Raises:
        ValueError: no such set or file, no prompt in it, a limit below 1, or a malformed line, named as file:line.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}; leave it out to evaluate every prompt")
    path = find_dataset(name_or_path)
    data = path.read_bytes()
    prompts: list[Prompt] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            prompts.append(_parse(line, f"{path}:{number}", len(prompts)))
    if not prompts:
        raise ValueError(f"{path} holds no prompt; {EXPECTED_ROW}")
    return Dataset(path.stem, hashlib.sha256(data).hexdigest(), tuple(prompts[:limit]))


def load_datasets(names: Sequence[str], limit: int | None = None) -> list[Dataset]:
    """Several sets by `load_dataset`.

    Raises:
        ValueError: as there, or two sets have the same name.
    """
    datasets = [load_dataset(name, limit) for name in names]
    found = [dataset.name for dataset in datasets]
    if len(set(found)) < len(found):
        raise ValueError(f"two data sets have the same name, so their rows could not be told apart: {', '.join(found)}")
    return datasets


def check_datasets(names: Sequence[str], limit: int | None = None) -> int:
    """Read sets before models are loaded for them, so that faults cost nothing; says where a set is below its limit.

    Returns:
        Prompts of the longest, within the limit.

    Raises:
        ValueError: as `load_datasets`.
    """
    sizes = {dataset.name: len(dataset.prompts) for dataset in load_datasets(names, limit)}
    for name, size in sizes.items():
        if limit is not None and size < limit:
            log.info("--limit %s: %s has only %s, and all are taken", limit, name, count(size, "prompt"))
    return max(sizes.values())


def find_dataset(name_or_path: str | Path) -> Path:
    """The file of a set (ValueError where there is none)."""
    if str(name_or_path) in packaged_datasets():
        return PACKAGED / f"{name_or_path}.jsonl"
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        names = ", ".join(packaged_datasets())
        raise ValueError(
            f"no data set {str(name_or_path)!r}: it is neither a packaged set ({names}) nor an existing file"
        )
    return path


def _parse(line: bytes, where: str, index: int) -> Prompt:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}); {EXPECTED_ROW}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON {type(row).__name__}; {EXPECTED_ROW}")
    if ("prompt" in row) == ("turns" in row):
        found = "both" if "prompt" in row else f"neither (fields: {', '.join(sorted(row)) or 'none'})"
        raise ValueError(f"{where}: one of the fields prompt and turns is needed, found {found}; {EXPECTED_ROW}")
    turns = row.get("turns", [row.get("prompt")])
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: turns must be a list with at least one string, got {turns!r}; {EXPECTED_ROW}")
    text = turns[0]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: the prompt must be a string that is not blank, got {text!r}; {EXPECTED_ROW}")
    domain = row.get("domain")
    if domain is not None and not isinstance(domain, str):
        raise ValueError(f"{where}: domain must be a string, got {domain!r}")
    return Prompt(index, text, domain)


@dataclass(frozen=True)
class PromptFormat:
    """What is put around a prompt.

    `mode` is "chat" (the tokenizer's chat template, with the generation prompt added) or "raw" (the bare text with
    the tokenizer's own special tokens). `thinking` is the value given to the template's thinking switch, None where
    there is no such switch.
    """

    mode: str
    template_sha256: str | None = None
    thinking: bool | None = None


def resolve_prompt_format(target: Any, mode: str = "auto", thinking: bool | None = None) -> PromptFormat:
    """Decide how prompts are formatted, once for a run.

    Args:
        target: anything with a transformers `tokenizer`, such as `HFTarget`.
        mode: "chat", "raw", or "auto": chat where the tokenizer has a template, else raw.
        thinking: value of the template's thinking switch. None means False where the template has the switch.

    Raises:
        ValueError: an unknown mode, chat without a template, or a thinking value that nothing would read.
    """
    if mode not in PROMPT_MODES:
        raise ValueError(f"prompt_mode must be one of {', '.join(PROMPT_MODES)}, got {mode!r}")
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(
            "the target has no tokenizer, so text prompts cannot be encoded; load the target with its tokenizer"
        )
    template = tokenizer.chat_template
    if mode == "chat" and template is None:
        raise ValueError(
            "prompt_mode is 'chat', but the tokenizer has no chat template; use 'raw', or set tokenizer.chat_template"
        )
    if isinstance(template, dict):  # several named templates; apply_chat_template uses this one
        template = template.get("default")
        if template is None and mode != "raw":
            raise ValueError(
                f"the tokenizer has chat templates {sorted(tokenizer.chat_template)}, but none named 'default'"
            )
    if mode == "raw" or template is None:
        if thinking is not None:
            raise ValueError(f"thinking is {thinking}, but prompts are raw: no template would read it")
        return PromptFormat("raw")
    has_switch = THINKING_VARIABLE in template
    if thinking is not None and not has_switch:
        raise ValueError(
            f"thinking is {thinking}, but the chat template has no {THINKING_VARIABLE} switch that would read it"
        )
    digest = hashlib.sha256(template.encode()).hexdigest()
    return PromptFormat("chat", digest, bool(thinking) if has_switch else None)


def format_prompt(target: Any, text: str, prompt_format: PromptFormat | None = None) -> list[int]:
    """Token ids of one user prompt, ready for the target to answer.

    Without a `prompt_format` the one that `resolve_prompt_format` picks by itself is used. A chat template writes the
    special tokens itself, so none are added on top of it.
    """
    prompt_format = prompt_format or resolve_prompt_format(target)
    tokenizer = target.tokenizer
    if prompt_format.mode == "raw":
        return list(tokenizer(text)["input_ids"])
    variables = {} if prompt_format.thinking is None else {THINKING_VARIABLE: prompt_format.thinking}
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def prompt_sha256(prompt_ids: Sequence[int]) -> str:
    """Digest of a formatted prompt: the same ids give the same digest on every platform."""
    return hashlib.sha256(",".join(map(str, prompt_ids)).encode()).hexdigest()
