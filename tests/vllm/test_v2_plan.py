"""What runs on the V2 runner, what is left to vLLM with which reason, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from dspark.config import DrafterConfig, LayerConfig, RopeConfig
from dspark.vllm.requirements import align_drafter_config
from dspark.vllm.v2_plan import ARCHITECTURE, Options, describe, is_ours, make_plan

DRAFTER = DrafterConfig(
    family="DeepSpec Qwen3",
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=64,
    draft_vocab_size=64,
    block_size=4,
    anchor_first=True,
    mask_token_id=63,
    tap_ids=(0, 2, 5),
    target_hidden_size=32,
    rope=RopeConfig(10000.0),
    layers=(LayerConfig(), LayerConfig()),
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    markov_kind="vanilla",
    markov_rank=8,
    confidence="hidden+markov",
)


def replaced(**changes):
    return DrafterConfig(**(vars(DRAFTER) | changes))


def configuration(
    topk=None, additional=None, watermark=None, model=None, sharded=False, revision=None, data_parallel=1, **speculative
):
    """The fields of a vLLM configuration that a plan looks at."""
    hf_config = SimpleNamespace(architectures=[ARCHITECTURE], dspark_draft_topk=topk)
    fields = {
        "method": "dspark",
        "draft_model_config": SimpleNamespace(hf_config=hf_config, model="drafter", revision=revision),
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
        "enable_adaptive_verification": False,
        "num_speculative_tokens": 4,
        "quantization": None,
        "use_local_argmax_reduction": False,
    }
    models = {"use_fp64_gumbel": False, "enforce_eager": False, "dtype": torch.bfloat16}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**(fields | speculative)),
        additional_config={} if additional is None else {"dspark": additional},
        watermark_config=watermark,
        parallel_config=SimpleNamespace(enable_batch_sharded_sampling=sharded, data_parallel_size=data_parallel),
        model_config=SimpleNamespace(**(models | (model or {}))),
    )


def test_everything_is_ours():
    plan = make_plan(configuration(), DRAFTER)
    assert (plan.chain, plan.verification, plan.sparse) == ("kernels", "kernels", False)
    assert plan.chain_reason == plan.verification_reason == ""
    assert make_plan(configuration(topk=64), DRAFTER).sparse


@pytest.mark.parametrize(
    ("changes", "chain", "verification", "reason"),
    [
        ({"draft_sample_method": "greedy"}, "kernels", "vllm", "drafting is greedy"),
        ({"rejection_sample_method": "block"}, "kernels", "vllm", "rejection_sample_method='block'"),
        ({"watermark": object()}, "vllm", "vllm", "drafts are watermarked"),
        ({"model": {"use_fp64_gumbel": True}}, "vllm", "vllm", "use_fp64_gumbel"),
        ({"model": {"dtype": torch.float16}}, "vllm", "vllm", "float16"),
        ({"topk": 48}, "vllm", "vllm", "dspark_draft_topk=48, and our kernels take 16, 32"),
        ({"topk": 64, "rejection_sample_method": "block"}, "vllm", "vllm", "vLLM's verification reads dense ones"),
        ({"additional": {"chain": "vllm"}}, "vllm", "vllm", "asked for with chain='vllm'"),
        ({"additional": {"verification": "vllm"}}, "kernels", "vllm", "asked for with verification='vllm'"),
    ],
)
def test_what_is_left_to_vllm_has_a_reason(changes, chain, verification, reason):
    plan = make_plan(configuration(**changes), DRAFTER)
    assert (plan.chain, plan.verification) == (chain, verification)
    assert reason in plan.chain_reason + plan.verification_reason
    line = describe(plan, path="p", plugin="1", vllm="0.33.0", kernels="" if chain == "vllm" else "our kernels")
    assert reason in line


@pytest.mark.parametrize("kind", ["gated", "rnn", "none"])
def test_a_head_that_vllms_loop_does_not_know_is_refused_where_it_must_draft(kind):
    drafter = replaced(markov_kind=kind, markov_rank=0 if kind == "none" else 8, confidence="hidden")
    with pytest.raises(ValueError, match="computes the vanilla Markov head only") as error:
        make_plan(configuration(watermark=object()), drafter)
    assert ("no Markov head" if kind == "none" else f"a {kind} Markov head") in str(error.value)
    assert make_plan(configuration(), drafter).chain == "kernels"


def test_adaptive_verification_needs_a_confidence_head_of_ours():
    """Without one vLLM estimates acceptance from the logits, inside its own loop."""
    adaptive = configuration(enable_adaptive_verification=True)
    assert make_plan(adaptive, DRAFTER).chain == "kernels"
    assert "acceptance estimator" in make_plan(adaptive, replaced(confidence="none")).chain_reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_speculative_tokens": 5}, "num_speculative_tokens=5 is outside 1..4"),
        ({"quantization": "fp8"}, "quantization='fp8': the drafter is served as it was stored"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction"),
        ({"additional": {"chain": "reference"}}, "set enforce_eager"),
        ({"additional": {"chain": "vllm", "w2": "fp8"}}, "w2='fp8' needs our kernels"),
        ({"additional": {"check_ranks": True}, "sharded": True}, "each rank samples other requests"),
        ({"data_parallel": 2}, "data_parallel_size=2: the dummy steps of an idle rank"),
        ({"revision": "v2"}, "revision='v2': configuration and calibration of the drafter are read from the default"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(ValueError, match="dspark cannot run on vLLM's V2 model runner as configured") as error:
        make_plan(configuration(**changes), DRAFTER)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"w3": 1}, "expected a mapping with some of w2, chain, verification, sampling_graph, check_ranks"),
        ({"w2": "int4"}, "w2='int4'; expected 'checkpoint' or 'fp8'"),
        ({"check_ranks": "yes"}, "check_ranks='yes'; expected true or false"),
        ({"sampling_graph": "all"}, "sampling_graph='all'; expected true or false"),
        ("fp8", "expected a mapping"),
    ],
)
def test_options_that_nobody_meant(section, words):
    with pytest.raises(ValueError, match="additional_config") as error:
        Options.read({"dspark": section})
    assert words in str(error.value)


def test_layers_that_vllms_backbone_cannot_mask():
    """It takes one switch for all layers, or makes exactly the sliding ones causal."""
    sliding = (LayerConfig(), LayerConfig(window=8, causal=True))
    assert make_plan(configuration(), replaced(layers=sliding)).chain == "kernels"
    mixed = (LayerConfig(causal=True), LayerConfig(window=8))
    with pytest.raises(ValueError, match=r"block rows of layers \[0\] see earlier rows only"):
        make_plan(configuration(), replaced(layers=mixed))


def test_vllms_config_gets_the_resolved_values():
    hf_config = SimpleNamespace(
        rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}, sample_from_anchor=True
    )
    bidirectional = (LayerConfig(), LayerConfig(window=8))
    align_drafter_config(hf_config, replaced(anchor_first=False, draft_vocab_size=40, layers=bidirectional))
    assert hf_config.eagle_aux_hidden_state_layer_ids == [0, 2, 5]
    assert hf_config.sample_from_anchor is False
    assert (hf_config.draft_vocab_size, hf_config.mask_token_id) == (40, 63)
    assert hf_config.is_causal is False, "sliding layers of this drafter see their whole block"
    assert hf_config.rope_parameters == {"rope_theta": 1e4}
    plain = SimpleNamespace()
    align_drafter_config(plain, DRAFTER)
    assert not hasattr(plain, "is_causal"), "vLLM's own rule holds"


def test_other_packagings_stay_vllms(monkeypatch):
    raw = {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"]}
    monkeypatch.setattr("dspark.vllm.v2_plan.get_hf_file_to_dict", lambda name, path, revision: raws[path])
    raws = {"ours": raw, "specforge": raw | {"architectures": ["DSparkDraftModel"]}}
    for path, expected in (("ours", True), ("specforge", False)):
        config = configuration()
        config.speculative_config.draft_model_config.model = path
        assert is_ours(config) is expected
    config.speculative_config.draft_model_config.hf_config.architectures = ["K3DSparkModel"]
    assert not is_ours(config)
    assert not is_ours(SimpleNamespace(speculative_config=None))
