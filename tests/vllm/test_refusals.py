"""What cannot work is refused while vLLM builds its configuration: before a model is loaded, every reason named."""

import json
from importlib.metadata import entry_points

import pytest
from checkpoints_util import write_deepspec
from vllm.engine.arg_utils import EngineArgs

from dspark.vllm import plugin


@pytest.fixture
def refused(target, drafter):
    """refused(path, speculative, **options): the message, or None where the configuration is accepted."""

    def message(path=None, speculative=None, **options):
        speculative = {"method": "dspark", "num_speculative_tokens": 4} | (speculative or {})
        options = {"model": str(target), "dtype": "float32", "max_model_len": 256} | options
        options["speculative_config"] = {"model": str(path or drafter())} | speculative
        try:
            EngineArgs(**options).create_engine_config()
        except ValueError as error:
            return str(error)
        return None

    return message


def test_a_right_configuration_is_accepted(refused):
    assert refused() is None


@pytest.mark.parametrize(
    ("changes", "drafts", "limit"), [({}, 5, 4), ({"sample_from_anchor": False}, 4, 3)], ids=["anchor-first", "1+N"]
)
def test_more_drafts_than_were_trained(changes, drafts, limit, refused, drafter):
    message = refused(drafter(**changes), {"num_speculative_tokens": drafts})
    assert f"num_speculative_tokens={drafts} is outside 1..{limit}" in message
    assert "never trained" in message


@pytest.mark.parametrize(
    ("speculative", "reason"),
    [
        ({"rejection_sample_method": "block"}, "rejection_sample_method='block': only 'standard' is implemented"),
        ({"dspark_draft_topk": 8}, "dspark_draft_topk=8"),
        ({"disable_padded_drafter_batch": True}, "disable_padded_drafter_batch"),
        ({"max_model_len": 128}, "max_model_len=128 has no effect"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' has no effect"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_options_without_effect(speculative, reason, refused):
    message = refused(speculative=speculative)
    assert "dspark cannot run on vLLM's V1 model runner as configured" in message
    assert reason in message


def test_engine_features_that_were_not_shown_to_work(refused):
    message = refused(tensor_parallel_size=2, enable_lora=True)
    assert "tensor_parallel_size=2: the drafter runs unsharded" in message
    assert "LoRA" in message


def test_all_reasons_at_once(refused):
    message = refused(speculative={"num_speculative_tokens": 9, "rejection_sample_method": "block"}, enable_lora=True)
    assert "num_speculative_tokens=9" in message
    assert "rejection_sample_method" in message
    assert "LoRA" in message


def test_an_unknown_head(refused, drafter, tmp_path):
    config = json.loads((drafter() / "config.json").read_text()) | {"markov_head_type": "transformer"}
    for file in drafter().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "markov_head_type" in refused(tmp_path)


def test_a_drafter_for_another_target(refused, tmp_path):
    """64 tokens and 6 layers, where the target has 259 tokens."""
    message = refused(write_deepspec(tmp_path / "other"))
    assert "vocab_size=64" in message
    assert "trained for this target" in message


def test_vllm_finds_the_plug_in():
    points = entry_points(group="vllm.general_plugins")
    assert [point.value for point in points if point.name == "dspark"] == ["dspark.vllm.plugin:register"]


def test_an_unknown_vllm_is_left_alone(monkeypatch):
    """A warning says that nothing was activated."""
    applied, messages = [], []
    monkeypatch.setattr(plugin, "vllm_version", "9.9.9+cpu")
    monkeypatch.setattr(plugin, "apply_patches", lambda: applied.append(True))
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *values: messages.append(text % values))
    plugin.register()
    assert applied == []
    assert "this is vLLM 9.9.9+cpu: nothing was activated" in messages[0]


def test_other_methods_see_vllms_own(target):
    """With the plug-in installed, n-gram speculation and plain decoding are configured and built as ever."""
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}):
        config = EngineArgs(model=str(target), max_model_len=256, speculative_config=speculative).create_engine_config()
        assert config._get_v1_model_runner_unsupported_features() == []
