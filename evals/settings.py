"""What was run, in full: the options of an evaluation, and the description that every result carries.

Figures of speculative decoding cannot be compared without the data set, the chat template, the thinking flag, the
sampling settings, K, the block layout, and the models; so a result without them cannot be written.
"""

import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch

import dspark
from dspark.config import DrafterConfig
from dspark.drafter import Drafter
from dspark.evals.datasets import PROMPT_MODES, Dataset, PromptFormat
from dspark.sampling import Drafting, SamplingParams
from dspark.schedule import parse_schedule
from dspark.target import HFTarget

DISTRIBUTIONS = ("torch", "transformers", "numpy")
# Of each setting that counts something, what to do where None stands for all; of others the values there are.
COUNTS = {"limit": "; leave it out for all", "num_draft_tokens": "; leave it out for all"}
COUNTS |= {"batch_size": "", "max_new_tokens": ""}
CHOICES = {"drafting": get_args(Drafting), "prompt_mode": PROMPT_MODES, "thinking": (True, False, None)}
CHOICES |= dict.fromkeys(("draft_truncation", "ignore_eos"), (True, False))


@dataclass(frozen=True)
class EvalSettings:
    """Options of an evaluation. Every data set is run at every temperature, one result row each.

    `num_draft_tokens` None means the drafter's maximum; `limit` None every prompt; `prompt_mode` and `thinking` are
    those of `resolve_prompt_format`; `schedule` is text for `parse_schedule`, None verifies every draft. `target_name`
    and `drafter_name` say in words where the models came from; they are only recorded.
    """

    datasets: tuple[str, ...] = ("default",)
    limit: int | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_draft_tokens: int | None = None
    drafting: Drafting = "probabilistic"
    draft_truncation: bool = True
    schedule: str | None = None
    max_new_tokens: int = 256
    ignore_eos: bool = False
    seed: int = 0
    batch_size: int = 8
    prompt_mode: str = "auto"
    thinking: bool | None = None
    target_name: str | None = None
    drafter_name: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings that name no run.

        Raises:
            ValueError: no data set or temperature, one of them twice, or an option out of its range, by name.
        """
        object.__setattr__(self, "datasets", tuple(str(name) for name in self.datasets))
        object.__setattr__(self, "temperatures", tuple(float(value) for value in self.temperatures))
        for field, values in (("datasets", self.datasets), ("temperatures", self.temperatures)):
            if not values:
                raise ValueError(f"{field} is empty: name at least one")
            if len(set(values)) < len(values):
                raise ValueError(f"{field} {values} names one twice: its rows could not be told apart")
        for field, hint in COUNTS.items():
            count = getattr(self, field)
            if not (hint and count is None) and (type(count) is not int or count < 1):
                raise ValueError(f"{field} must be at least 1, got {count!r}{hint}")
        for field, values in CHOICES.items():
            chosen = getattr(self, field)
            if not any(chosen == value and type(chosen) is type(value) for value in values):  # 1 is not True
                raise ValueError(f"{field} must be one of {', '.join(map(str, values))}, got {chosen!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        parse_schedule(self.schedule)
        for temperature in self.temperatures:
            self.sampling_params(temperature, seed=0)

    def sampling_params(self, temperature: float, seed: int) -> SamplingParams:
        """Sampling parameters of one request."""
        shared = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p", "max_new_tokens", "ignore_eos")}
        return SamplingParams(temperature=temperature, seed=seed, **shared)


def request_seed(seed: int, dataset: str, index: int) -> int:
    """Seed of one request, 0 <= seed < 2^63: the same for every limit, order of data sets and batch size."""
    digest = hashlib.sha256(f"{seed}:{dataset}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def describe_run(
    models: dict[str, Any], settings: EvalSettings, datasets: Sequence[Dataset], prompt_format: PromptFormat
) -> dict[str, Any]:
    """Everything that the figures of a run depend on, ready for JSON; `models` is what `Backend.describe` gives.

    Two runs with equal descriptions give the same records, up to rounding where the batch differs (none in float64).
    """
    options = asdict(settings) | {"temperatures": list(settings.temperatures), **models["options"]}
    del options["datasets"]
    return {
        "datasets": [{"name": d.name, "sha256": d.sha256, "num_prompts": len(d.prompts)} for d in datasets],
        "turns": "first",
        "prompt_format": asdict(prompt_format),
        "settings": options,
        **{key: models[key] for key in ("backend", "verification", "target", "drafter")},
        "versions": library_versions(),
        "commit": source_commit(),
        "code": source_digest(),
    }


def row_settings(description: dict[str, Any], dataset: str, temperature: float) -> dict[str, Any]:
    """The part of a run's description that belongs to one data set and temperature."""
    options = {key: value for key, value in description["settings"].items() if key != "temperatures"}
    described = next(d for d in description["datasets"] if d["name"] == dataset)
    kept = {key: value for key, value in description.items() if key not in ("datasets", "settings")}
    return {"dataset": described, **options, "temperature": temperature, **kept}


def describe_target(target: HFTarget) -> dict[str, Any]:
    """A loaded target, for `describe_run`."""
    return {
        "model_type": target.config.model_type,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "config_sha256": config_sha256(target.config),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else str(target.device),
    }


def config_sha256(config: Any) -> str:
    """Digest of a transformers configuration."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True, default=str).encode()).hexdigest()


def describe_drafter(drafter: Drafter) -> dict[str, Any]:
    """A loaded drafter, for `describe_run`."""
    scaling = None if drafter.calibration is None else drafter.calibration.scaling
    return {
        **describe_drafter_config(drafter.config),
        "weights_sha256": weights_sha256(drafter),
        "confidence_scaling": scaling and {name: list(values) for name, values in scaling._asdict().items()},
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }


def describe_drafter_config(config: DrafterConfig) -> dict[str, Any]:
    """What a report says of a drafter without its weights."""
    return {
        "family": config.family,
        "block_size": config.block_size,
        "layout": "anchor-first" if config.anchor_first else "1+N",
        "markov_kind": config.markov_kind,
        "confidence": config.confidence,
        "draft_vocab_size": config.draft_vocab_size,
    }


def weights_sha256(module: torch.nn.Module, samples: int | None = None) -> str:
    """Digest of a module's own tensors (names, dtypes, shapes, bytes); those it shares with a target are not in it.

    With `samples` only so many evenly spaced values of each tensor are read, which still tells fine-tunings and
    quantisations of one model apart.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        flat = flat if samples is None else flat[:: max(flat.numel() // samples, 1)]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(flat.contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def library_versions() -> dict[str, str]:
    """Versions of what the numbers come out of."""
    versions = {name: version(name) for name in DISTRIBUTIONS}
    return {"dspark": dspark.__version__, "python": platform.python_version(), **versions}


def source_digest() -> str:
    """SHA-256 of the package's Python files: what ran, committed or not, whatever else a commit changed."""
    files: dict[str, Path] = {}
    for part in ("", "sampling", "kernels", "evals"):
        folder = Path(import_module(f"dspark.{part}".rstrip(".")).__path__[0])  # a checkout keeps them side by side
        files |= {(Path(part) / path.relative_to(folder)).as_posix(): path for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].read_bytes() + b"\0")
    return digest.hexdigest()


def source_commit() -> str | None:
    """Commit of the checkout that `dspark` comes from, with "-dirty" if tracked files differ; None if installed."""
    source = Path(dspark.__file__).resolve()
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None  # a package installed inside somebody else's checkout is not of that checkout
    return _git(source.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None
