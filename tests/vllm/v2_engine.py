"""A V2 speculator on the CPU, without an engine: real vLLM configuration, models and weights, and hand-made steps.

vLLM runs its V2 runner on GPUs only. What is ours of it needs none: the drafter's model class is built and loaded by
vLLM's own loader, and vLLM's speculator fills fixed buffers, which the tests fill in its place.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from dspark.vllm.requirements import check_v2_configuration
from dspark.vllm.v2 import Speculator

MAX_REQUESTS = 8


def make_config(target: Path, drafter: Path, speculative: dict[str, Any] | None = None, **options: Any) -> VllmConfig:
    """vLLM's configuration of a pair; K = 4 unless stated."""
    chosen = {"method": "dspark", "model": str(drafter), "num_speculative_tokens": 4} | (speculative or {})
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": MAX_REQUESTS, "enforce_eager": True}
    arguments = EngineArgs(model=str(target), speculative_config=chosen, **(settings | options))
    return arguments.create_engine_config()


@contextmanager
def one_process(config: VllmConfig, store: Path) -> Iterator[None]:
    """The distributed state that vLLM's layers ask for, of a single rank."""
    started = not model_parallel_is_initialized()
    with set_current_vllm_config(config):
        if started:
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            if started:
                cleanup_dist_env_and_memory()


def without_v1_checks(patch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM builds every configuration for its V1 runner; leave out what is checked for that alone."""
    patch.setattr("dspark.vllm.requirements.check_configuration", lambda config: None)
    patch.setattr(VllmConfig, "_validate_v1_model_runner", lambda config: None)
    patch.setattr(VllmConfig, "_validate_adaptive_verification", lambda config: None)  # it needs CUDA graphs
    patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is no accelerator


def load_speculator(config: VllmConfig) -> tuple[Speculator, torch.nn.Module]:
    """Our speculator as an engine would build it, and the target it shares matrices with."""
    target = get_model(vllm_config=config)
    check_v2_configuration(config)
    speculator = Speculator(config, torch.device("cpu"))
    speculator.load_model(target)
    return speculator, target


@dataclass(frozen=True)
class Step:
    """One step's requests as the tests write them; all sequences have an entry per request."""

    slots: Sequence[int]
    anchor_positions: Sequence[int]
    anchors: Sequence[int]
    temperatures: Sequence[float]
    seeds: Sequence[int]


def fill_buffers(speculator: Speculator, step: Step) -> None:
    """What vLLM's kernel writes before the drafter runs; rows past the step are padding."""
    steps, rows = speculator.num_speculative_steps, speculator.num_query_per_req
    speculator.sample_indices.zero_()
    speculator.sample_pos.zero_()
    speculator.sample_idx_mapping.fill_(-1)
    for request, slot in enumerate(step.slots):
        for i in range(steps):
            at = request * steps + i
            speculator.sample_indices[at] = request * rows + (rows - steps) + i
            speculator.sample_pos[at] = step.anchor_positions[request] + 1 + i
            speculator.sample_idx_mapping[at] = slot
        speculator.input_buffers.input_ids[request * rows] = step.anchors[request]
        speculator.temperature[slot] = step.temperatures[request]
        speculator.seeds[slot] = step.seeds[request]
