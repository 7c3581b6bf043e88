"""The flags of `dspark eval` that choose vLLM: which go together, and the backend that they name."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark.default import TargetLocation
    from dspark.evals.backends import Backend
    from dspark.evals.settings import EvalSettings

# Flags that mean nothing where vLLM runs the models, each with its reason.
WITH_ENDPOINT = dict.fromkeys(
    ("drafter", "plain", "layout", "dtype", "device", "num_draft_tokens", "drafting", "schedule"),
    "the server was started with its own",
)
WITH_ENGINE = {
    "layout": "inside vLLM a checkpoint has to state its layout",
    "device": "vLLM runs on the device that it was built for",
    "schedule": "vLLM decides by its own adaptive verification how much it verifies",
}


def check_backend_flags(options: argparse.Namespace) -> None:
    """Refuse flags that contradict each other.

    Raises:
        ValueError: with the flag, the one that it contradicts, and what to do.
    """
    chosen = getattr(options, "backend", None)
    if hasattr(options, "endpoint"):
        if chosen is not None:
            raise ValueError(f"--endpoint asks a running server, so --backend {chosen} says nothing: leave one out")
        if not options.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"--endpoint {options.endpoint} is no address such as http://localhost:8000")
        _refuse(options, "--endpoint", WITH_ENDPOINT)
    if chosen == "vllm":
        _refuse(options, "--backend vllm", WITH_ENGINE)
        if getattr(options, "dtype", None) == "float64":
            raise ValueError("--dtype float64 does not go with --backend vllm: vLLM has no such models; take float32")


def _refuse(options: argparse.Namespace, chosen: str, reasons: dict[str, str]) -> None:
    for name, reason in reasons.items():
        if getattr(options, name, False):
            raise ValueError(f"--{name.replace('_', '-')} does not go with {chosen}: {reason}; leave it out")


def connect_server(options: argparse.Namespace, settings: "EvalSettings") -> "tuple[Backend, str, str]":
    """The backend behind --endpoint, and words for the report on its target and its drafter.

    Raises:
        ValueError: no vLLM server answers, or the tokenizer of its model is not here.
    """
    from dspark.vllm.backends import ServerBackend

    server = ServerBackend.connect(options.endpoint, getattr(options, "target", None), settings)
    return server, f"{server.model.name} at {options.endpoint}", "as the server was started with"


def start_engine(
    options: argparse.Namespace,
    settings: "EvalSettings",
    target: "TargetLocation | str",
    drafter: str | None,
) -> "Backend":
    """The backend behind --backend vllm.

    Args:
        options: the command line.
        settings: the run's.
        target: where the target is; a string is a Hub id.
        drafter: folder or Hub id of the drafter; None decodes plainly.

    Raises:
        ValueError: vLLM is not installed, cannot read the target, or refuses the pair.
    """
    import torch

    from dspark.vllm.backends import EngineBackend

    if not isinstance(target, str) and target.gguf_file is not None:
        raise ValueError(
            f"--backend vllm cannot load {target.folder / target.gguf_file}: it needs a Hugging Face folder with "
            "config.json and safetensors"
        )
    path = target if isinstance(target, str) else str(target.folder)
    dtype = getattr(options, "dtype", "bfloat16" if torch.cuda.is_available() else "float32")
    return EngineBackend.start(path, drafter, settings, dtype)
