"""When the KDA layers of a target are replaced, and what is said where they are not."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from dspark.vllm import kda_choice

KIMI, OTHER = "KimiLinearForCausalLM", "LlamaForCausalLM"


@pytest.fixture
def seen(monkeypatch):
    """In a process that runs models on a GPU: what `prepare_kda_layers` did."""
    done = []
    layers = ModuleType("dspark.vllm.kda")
    layers.replace_layers = lambda: done.append("replaced")
    monkeypatch.setitem(sys.modules, "dspark.vllm.kda", layers)
    monkeypatch.setitem(sys.modules, kda_choice.WORKER_MODULE, ModuleType("worker"))
    monkeypatch.setattr(kda_choice, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(kda_choice.logger, "info_once", lambda text, *args: done.append(text % args))
    return done


def configuration(architecture=KIMI, replay=True, method="dspark", extra=None):
    return SimpleNamespace(
        model_config=SimpleNamespace(architecture=architecture),
        cache_config=SimpleNamespace(use_replayssm=replay, use_kda_recoverssm=replay),
        speculative_config=SimpleNamespace(method=method),
        additional_config=extra or {},
        num_speculative_tokens=7,
    )


def test_a_kimi_target_with_replayssm_gets_our_layers(seen):
    kda_choice.prepare_kda_layers(configuration())
    assert seen == ["replaced"]


def test_without_replayssm_the_cost_is_said_in_one_line(seen):
    kda_choice.prepare_kda_layers(configuration(replay=False))
    assert len(seen) == 1
    assert "KimiLinearForCausalLM keeps 8 recurrent states for each request" in seen[0]
    assert "--use-replayssm" in seen[0]


def test_vllms_kernels_on_request(seen):
    kda_choice.prepare_kda_layers(configuration(extra={"dspark_kda": "vllm"}))
    assert seen == []


def test_other_targets_and_other_processes_import_nothing(seen, monkeypatch):
    kda_choice.prepare_kda_layers(configuration(OTHER))
    monkeypatch.delitem(sys.modules, kda_choice.WORKER_MODULE)
    kda_choice.prepare_kda_layers(configuration())
    assert seen == []
