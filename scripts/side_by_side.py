"""Run vLLM engines side by side, each in a process of its own, spread over the GPUs; for the check programs.

A child gets the arguments of its job, and prints one line of JSON on stdout when it is done; vLLM's own output goes to
a log. As many children start at once as the CPUs can take, since most of an engine's start is work for them. A child
that does not end in time is stopped with everything that it started.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A part of the memory that leaves room for a dozen tiny engines on one GPU.
ENGINE_OPTIONS = {"kv_cache_memory_bytes": 2**29, "gpu_memory_utilization": 0.04, "disable_log_stats": False}
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


@dataclass(frozen=True)
class Job:
    """One engine.

    Attributes:
        name: of its log.
        arguments: of the program that runs again as the child.
        num_gpus: how many it takes.
        plugin: whether the DSpark plug-in is loaded.
    """

    name: str
    arguments: Sequence[str]
    num_gpus: int = 1
    plugin: bool = True


def run_jobs(
    program: str, jobs: Sequence[Job], *, gpus: int, logs: Path, limit_s: float, at_once: int
) -> Iterator[tuple[int, Any]]:
    """Run all jobs, `at_once` of them at a time, the first ones first.

    Args:
        program: path of the script.
        jobs: what runs.
        gpus: GPUs to spread one-GPU jobs over; 0 leaves the choice to CUDA.
        logs: folder for a log of each.
        limit_s: seconds after which what still runs is stopped, and nothing is started any more.
        at_once: most jobs at a time.

    Yields:
        Index of a job that ended, and what the child printed; {"error": ...} where it printed nothing.
    """
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    with ThreadPoolExecutor(at_once) as pool:
        running = {
            pool.submit(_run, program, job, str(index % gpus) if gpus else None, logs, deadline): index
            for index, job in enumerate(jobs)
        }
        for future in as_completed(running):
            yield running[future], future.result()


def _run(program: str, job: Job, gpu: str | None, logs: Path, deadline: float) -> Any:
    """One child: its line, or why there is none."""
    if time.monotonic() > deadline:
        return {"error": "not started within the time limit"}
    environment = os.environ | {"VLLM_PLUGINS": "dspark" if job.plugin else "", "OMP_NUM_THREADS": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a process less for each
    if gpu is not None and job.num_gpus == 1:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    log = logs / f"{job.name}.log"
    with log.open("w") as stream:
        child = subprocess.Popen(
            [sys.executable, program, *job.arguments],
            stdout=subprocess.PIPE,
            stderr=stream,
            env=environment,
            start_new_session=True,
            text=True,
        )
    try:
        output, _ = child.communicate(timeout=max(deadline - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        if not output.strip():
            return {"error": f"stopped after the time limit; the end of its log: {_tail(log, 3)}"}
    if not output.strip():
        return {"error": f"ended with status {child.returncode}; the end of its log: {_tail(log, 6)}"}
    return json.loads(output)


def _tail(log: Path, lines: int) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])[-600:]


def start_quickly() -> None:
    """Have vLLM compile kernels when they are first used, not ahead of that, and in one configuration each.

    vLLM's switch for the first would leave its workspace at 0 bytes too, since only the warm-up's steps give it its
    size. Trying the hundred configurations of KDA's prefill kernels takes longer than everything else, and two engines
    may choose differently.
    """
    from triton.runtime.autotuner import Autotuner
    from vllm.model_executor.warmup import jit_warmup, kernel_warmup

    jit_warmup.JitWarmupRegistry.warmup = lambda self: None
    kernel_warmup.kimi_k3_triton_warmup = lambda worker: None
    all_configurations = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, kwargs: all_configurations(self, kwargs)[:1]


def answers() -> Any:
    """The child's stdout, kept for its lines; vLLM's prints go to the log from here on."""
    kept = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return kept


def generate(llm: Any, prompts: Sequence[list[int]], temperature: float, max_tokens: int, first_seed: int = 100):
    """Tokens of every request, the i-th with seed first_seed + i, and tokens a step over all of them."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature, seed=first_seed + i, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        for i in range(len(prompts))
    ]
    before = counters(llm)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    after = counters(llm)
    steps, accepted = (after[name] - before[name] for name in COUNTERS)
    return [list(output.outputs[0].token_ids) for output in outputs], 1 + accepted / steps if steps else 1.0


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The place of the first token that differs in what two texts share; None if one begins with the other."""
    return next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)


def counters(llm: Any) -> dict[str, float]:
    """vLLM's speculation counters; 0 where it does not speculate."""
    values = dict.fromkeys(COUNTERS, 0.0)
    for metric in llm.get_metrics():
        name = metric.name.removesuffix("_total")
        if name in values:
            values[name] += metric.value
    return values
