"""`dspark eval` on vLLM: an engine in this process, or a server elsewhere.

Both keep the library's records without `accept_probs` and `confidence`, which vLLM does not report. Nothing here
imports vLLM before an engine is started, and a server needs no vLLM here.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dspark.default import load_tokenizer, locate_target
from dspark.evals.backends import VERIFICATION, OnFinish
from dspark.evals.settings import EvalSettings, config_sha256, describe_drafter_config
from dspark.families import CheckpointError
from dspark.families.container import local_folder
from dspark.records import Generation
from dspark.sampling import SamplingParams
from dspark.vllm.client import ServedModel, generate_at_endpoint, generate_in_engine, served_model, start_engine

NOT_REPORTED = ("accept_probs", "confidence")
# The engine in this process, its log beside ours, and only what is worth reading.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class EngineBackend:
    """A vLLM engine in this process. `models` is what `describe` gives."""

    llm: Any
    tokenizer: Any
    models: dict[str, Any]

    @classmethod
    def start(cls, target: str, drafter: str | None, settings: EvalSettings, dtype: str) -> "EngineBackend":
        """Load a pair into vLLM.

        Args:
            target: folder or Hub id of the target.
            drafter: folder or Hub id of the drafter; None decodes plainly.
            settings: the run's; K, drafting and batch size are the engine's.
            dtype: of both models, such as "float32".

        Raises:
            ValueError: vLLM is not installed, or it or the plug-in refuses the pair or the settings.
        """
        check_installed()
        if not settings.draft_truncation:
            raise ValueError("draft_truncation=False cannot be asked of vLLM; what its model runner does is recorded")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from pydantic import ValidationError

        chosen, options = settings.num_draft_tokens, {"max_batch_size": settings.batch_size, "dtype": dtype}
        try:
            llm = start_engine(target, drafter, num_draft_tokens=chosen, drafting=settings.drafting, **options)
        except ValidationError as error:  # pydantic's words begin with their number, ours are inside
            cause = error.errors()[0].get("ctx", {}).get("error")
            if isinstance(cause, CheckpointError):
                raise cause from None
            raise ValueError(" ".join(str(cause or error).split())) from error
        return cls(llm, AutoTokenizer.from_pretrained(target), _describe_engine(llm, drafter, dtype))

    def describe(self) -> dict[str, Any]:
        """See `dspark.evals.backends.Backend`."""
        return self.models

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], on_finish: OnFinish
    ) -> list[Generation]:
        """`generate_in_engine`."""
        return generate_in_engine(self.llm, prompts, params, on_finish)


@dataclass(frozen=True)
class ServerBackend:
    """A vLLM server, with whatever drafter it was started with."""

    url: str
    model: ServedModel
    tokenizer: Any
    settings: EvalSettings

    @classmethod
    def connect(cls, url: str, tokenizer: str | None, settings: EvalSettings) -> "ServerBackend":
        """Ask the server what it serves, and load that model's tokenizer here.

        Args:
            url: root of the server.
            tokenizer: folder, GGUF file or Hub id of the tokenizer; None takes what the server's model was loaded from.
            settings: the run's; the batch size is the number of requests sent together.

        Raises:
            ValueError: no vLLM server answers there, or the tokenizer cannot be had.
        """
        model = served_model(url)
        path = tokenizer or model.root
        try:
            location, _ = locate_target(path)
            loaded = AutoTokenizer.from_pretrained(path) if location is None else load_tokenizer(location)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the tokenizer of {model.name} cannot be loaded from {path}: name a copy of the server's model with "
                f"--target ({str(error).strip().splitlines()[0]})"
            ) from error
        return cls(url, model, loaded, settings)

    def describe(self) -> dict[str, Any]:
        """See `dspark.evals.backends.Backend`; most of it is the server's own business."""
        unknown = {"model_type": None, "config_sha256": None, "dtype": None}
        return {
            "backend": _backend(f"vLLM {self.model.version} server", self.model.version),
            "options": {"num_draft_tokens": None, "drafting": None},
            "target": {"name": self.model.name, "root": self.model.root, **unknown, "device": self.url},
            "drafter": {"family": None, "weights_sha256": None, "block_size": None, "layout": None},
            "verification": f"as {self.url} was started",
        }

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], on_finish: OnFinish
    ) -> list[Generation]:
        """`generate_at_endpoint`."""
        batch_size = self.settings.batch_size
        return generate_at_endpoint(
            self.url, prompts, params, model=self.model.name, max_batch_size=batch_size, on_finish=on_finish
        )


def check_installed() -> None:
    """Raise ValueError, with what to install, if there is no vLLM."""
    if find_spec("vllm") is None:
        raise ValueError(
            f"vLLM is not installed for {sys.executable}: install it with pip install 'vllm==0.32.0' beside this "
            "package; on a machine without a GPU run scripts/test_vllm once, and then .venv-vllm/bin/dspark"
        )


def _describe_engine(llm: Any, drafter: str | None, dtype: str) -> dict[str, Any]:
    """What `describe` gives, read from a running engine and the drafter's files."""
    from vllm import __version__
    from vllm.platforms import current_platform

    from dspark.vllm.requirements import resolve_drafter

    model, speculative = llm.model_config, llm.llm_engine.vllm_config.speculative_config
    described = None
    if drafter is not None:
        described = describe_drafter_config(resolve_drafter(drafter, model))
        described |= {"files_sha256": files_sha256(local_folder(drafter)), "dtype": dtype}
    return {
        "backend": _backend(f"vLLM {__version__} engine", __version__),
        "options": {
            "num_draft_tokens": 0 if speculative is None else speculative.num_speculative_tokens,
            # The V2 runner's drafts follow the temperature alone, whoever draws them.
            "draft_truncation": not llm.llm_engine.vllm_config.use_v2_model_runner,
        },
        "target": {
            "model_type": model.hf_config.model_type,
            "num_layers": model.get_total_num_hidden_layers(),
            "hidden_size": model.get_hidden_size(),
            "vocab_size": model.get_vocab_size(),
            "config_sha256": config_sha256(model.hf_config),
            "dtype": dtype,
            "device": current_platform.get_device_name(),
        },
        "drafter": described,
        "verification": VERIFICATION,
    }


def files_sha256(folder: Path) -> str:
    """Digest of a folder's safetensors files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _backend(name: str, version: str) -> dict[str, Any]:
    return {"name": name, "version": version, "not_reported": list(NOT_REPORTED)}
