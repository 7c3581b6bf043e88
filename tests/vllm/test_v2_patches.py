"""On a release of the V2 runner the plug-in checks configurations and replaces two names of the runner's module."""

import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig

from dspark.vllm import patches, plugin, v2


@pytest.fixture
def unpatched(monkeypatch):
    """vLLM's configuration class as a process without the plug-in has it; restored afterwards."""
    for name in ("_validate_v2_model_runner", "use_v2_model_runner", "_set_cudagraph_sizes"):
        monkeypatch.setattr(VllmConfig, name, vars(VllmConfig)[name])
    monkeypatch.setattr(VllmConfig, patches._MARK, True, raising=False)  # so that it is gone again if it was not there
    monkeypatch.delattr(VllmConfig, patches._MARK)
    return monkeypatch


def test_a_release_gets_the_patches_of_its_runner(monkeypatch):
    for version, expected in (("0.32.0+cpu", "0.32.0"), ("0.33.0", "0.33.0")):
        applied = []
        monkeypatch.setattr(plugin, "vllm_version", version)
        monkeypatch.setattr(plugin, "apply_patches", applied.append)
        plugin.register()
        assert applied == [expected]


def test_a_configuration_of_the_method_is_checked(unpatched):
    checked = []
    unpatched.setattr(VllmConfig, "_validate_v2_model_runner", lambda config: None)
    unpatched.setattr("dspark.vllm.requirements.check_v2_configuration", checked.append)
    patches.apply_patches("0.33.0")
    for method in ("dspark", "eagle3"):
        config = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
        VllmConfig._validate_v2_model_runner(config)
    VllmConfig._validate_v2_model_runner(SimpleNamespace(speculative_config=None))
    assert [config.speculative_config.method for config in checked] == ["dspark"]


def test_only_a_worker_that_runs_the_method_on_v2_is_patched(unpatched):
    patched = []
    unpatched.setattr(VllmConfig, "use_v2_model_runner", property(lambda config: config.v2))
    unpatched.setattr(patches, "patch_v2_runner_module", lambda: patched.append(True))
    unpatched.setattr("dspark.vllm.kda_choice.prepare_kda_layers", lambda config: None)
    patches.apply_patches("0.33.0")
    ask = VllmConfig.use_v2_model_runner.fget
    uses = SimpleNamespace(method="dspark")
    other = SimpleNamespace(method="ngram")
    unpatched.delitem(sys.modules, "vllm.v1.worker.gpu_worker", raising=False)
    assert ask(SimpleNamespace(v2=True, speculative_config=uses)) is True
    assert not patched, "the process that the user started runs no model"
    unpatched.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace())
    assert ask(SimpleNamespace(v2=False, speculative_config=uses)) is False
    assert ask(SimpleNamespace(v2=True, speculative_config=other)) is True
    assert not patched
    assert ask(SimpleNamespace(v2=True, speculative_config=uses)) is True
    assert patched


@pytest.fixture
def capture_sizes(unpatched):
    """(method, max_num_seqs, what a user names) -> capture sizes of vLLM's own function with the patch around it."""
    patches.apply_patches("0.33.0")

    def resolve(method, max_num_seqs, **named):
        config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=CompilationConfig(cudagraph_mode="FULL_AND_PIECEWISE", **named),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
            speculative_config=SimpleNamespace(
                method=method, num_speculative_tokens=8, uses_dynamic_speculative_decoding=lambda: False
            ),
            uniform_decode_query_len=9,
            performance_mode="balanced",
        )
        VllmConfig._set_cudagraph_sizes(config)
        return config.compilation_config.cudagraph_capture_sizes

    return resolve


@pytest.mark.parametrize("max_num_seqs", [64, 100, 256, 700])
def test_a_graph_is_captured_for_every_number_of_requests(capture_sizes, max_num_seqs):
    sizes, vllms_own = capture_sizes("dspark", max_num_seqs), capture_sizes("eagle3", max_num_seqs)
    assert sizes[-1] == 9 * max_num_seqs > vllms_own[-1] == 512
    assert set(vllms_own) < set(sizes)
    whole = [size // 9 for size in sizes if size > 512]
    assert all(size % 9 == 0 for size in sizes if size > 512)
    for requests in range(57, max_num_seqs + 1):
        padded = min(each for each in whole if each >= requests)
        assert padded - requests < (8 if requests <= 256 else 32), "at most so many requests of padding"


def test_sizes_that_a_user_names_stay(capture_sizes):
    assert capture_sizes("dspark", 256, cudagraph_capture_sizes=[9, 18]) == [9, 18]
    assert capture_sizes("dspark", 256, max_cudagraph_capture_size=64)[-1] == 64
    assert capture_sizes("dspark", 16)[-1] < 512, "all requests fit into vLLM's own sizes"


def test_other_methods_get_vllms_speculator(monkeypatch):
    asked = []
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
    v2.make_speculator(lambda *arguments: asked.append(arguments), config, "device", "states")
    assert asked == [(config, "device", "states")]


def test_ranks_that_differ_are_named(monkeypatch):
    tokens = torch.tensor([[1, 2], [3, 4]])
    others = torch.tensor([[1, 2], [3, 5]])
    group = SimpleNamespace(world_size=2, all_gather=lambda mine, dim: torch.stack([mine[0], others]))
    monkeypatch.setattr(v2, "get_tp_group", lambda: group)
    with pytest.raises(RuntimeError, match=r"row 1 is \[3, 4\] on rank 0 and \[3, 5\] on rank 1"):
        v2.check_ranks_agree("drafts", tokens)
    others[1, 1] = 4
    v2.check_ranks_agree("drafts", tokens)


def test_weights_that_differ_in_one_bit_have_another_digest():
    torch.manual_seed(0)
    one, other = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    other.load_state_dict(one.state_dict())
    assert torch.equal(v2.digests(one), v2.digests(other))
    with torch.no_grad():
        other.weight[3, 7] = torch.nextafter(other.weight[3, 7], torch.tensor(9.0))
    assert not torch.equal(v2.digests(one), v2.digests(other))
