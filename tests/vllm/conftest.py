"""Real vLLM engines on tiny models, in this process; each file is skipped, aloud, where vLLM is not installed.

vLLM needs an environment of its own: `scripts/test_vllm` makes it and runs these tests.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
WITHOUT_VLLM = "vLLM is not installed in this environment; scripts/test_vllm makes one and runs these tests in it"

# Before vLLM is imported: no warm-up, the engine in this process, and no calls home.
os.environ |= {
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
}

MAX_MODEL_LEN = 256
NEED_NO_VLLM = ("test_kda_state.py",)


class SkippedFile(pytest.File):
    """A test file that cannot even be imported here."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(WITHOUT_VLLM, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    needs_vllm = module_path.name not in NEED_NO_VLLM
    return SkippedFile.from_parent(parent, path=module_path) if needs_vllm and not HAS_VLLM else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Without -rs pytest counts skipped files and keeps the reason to itself."""
    if not HAS_VLLM:
        terminalreporter.write_line(f"tests/vllm: skipped, {WITHOUT_VLLM}")


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    from served_pairs import write_target

    return write_target(tmp_path_factory.mktemp("pair") / "target")


@pytest.fixture(scope="session")
def drafter(target, tmp_path_factory) -> Callable[..., Path]:
    """drafter(packaging, **changes): a drafter for `target` on disk, written once."""
    from served_pairs import write_drafter

    written: dict[str, Path] = {}

    def get(packaging: str = "deepspec", **changes: Any) -> Path:
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        key = f"{packaging} {sorted(changes.items())}"
        if key not in written:
            written[key] = write_drafter(tmp_path_factory.mktemp("drafter"), target, packaging, changes)
        return written[key]

    return get


@pytest.fixture(scope="session")
def engine(target) -> Callable[..., Any]:
    """engine(drafter, **options): an `LLM` with that drafter (None: without), made once for each combination.

    `speculative` holds further fields of the speculative configuration; the others are engine options.
    """
    from vllm import LLM

    made: dict[str, Any] = {}

    def get(drafter: Path | None = None, *, speculative: dict[str, Any] | None = None, **options: Any) -> Any:
        options = {
            "model": str(target),
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 64 * 2**20,
            "enforce_eager": True,
            "disable_log_stats": False,
            "seed": 0,
        } | options
        if drafter is not None:
            options["per_request_spec_decode_metrics"] = "detailed"
            options["speculative_config"] = {"model": str(drafter), "method": "dspark", "num_speculative_tokens": 4} | (
                speculative or {}
            )
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = LLM(**options)
        return made[key]

    return get
