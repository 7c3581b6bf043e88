"""Every checkpoint that would load and draft badly is refused: a valid tiny one, one thing wrong, and the message."""

import pytest
import torch
from checkpoints_util import (
    ABSENT,
    DEEPSPEC,
    SPECULATORS,
    changed,
    random_weights,
    vocabulary_tables,
    write_checkpoint,
    write_deepspec,
)

from dspark.checkpoint import load_drafter
from dspark.families import CheckpointError

TLC = "transformer_layer_config."
LAYER0 = "layers.0.self_attn."


def drop(*names):
    return lambda weights: {name: tensor for name, tensor in weights.items() if name not in names}


def add(name, *shape, dtype=torch.float32):
    return lambda weights: {**weights, name: torch.zeros(shape, dtype=dtype)}


def replace(name, value):
    return lambda weights: {**weights, name: value(weights[name]) if callable(value) else value}


def with_nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[3] = float("nan")
    return tensor


def with_infinity(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("-inf")
    return tensor


def keep(weights):
    return weights


TOO_FEW_FLAGS = vocabulary_tables(range(0, 78, 2), 96)["t2d"]
OTHER_FLAGS = vocabulary_tables(range(1, 80, 2), 96)["t2d"]
ABSOLUTE_IDS = torch.arange(0, 80, 2)

# id: (base config, config changes, change of the base config's weights, parts of the message)
REFUSALS = {
    # container
    "another-algorithm": (SPECULATORS, {"speculators_model_type": "eagle3"}, keep, ["algorithm 'eagle3'", '"dspark"']),
    "algorithms-that-disagree": (SPECULATORS, {"speculators_config.algorithm": "dflash"}, keep, ["'dflash'"]),
    "verifier-by-name-only": (
        SPECULATORS,
        {"speculators_config.verifier": "tiny/target"},
        keep,
        ["verifier='tiny/target'", "an object"],
    ),
    "no-backbone": (SPECULATORS, {"transformer_layer_config": ABSENT}, keep, ["lacks transformer_layer_config"]),
    "no-aux-layers": (
        SPECULATORS,
        {"aux_hidden_state_layer_ids": ABSENT},
        keep,
        ["lacks aux_hidden_state_layer_ids"],
    ),
    "deepspec-over-another-backbone": (DEEPSPEC, {"model_type": "llama"}, keep, ["'llama'", "model_type='qwen3'"]),
    "missing-norm": (DEEPSPEC, {}, drop("hidden_norm.weight"), ["missing hidden_norm.weight", "unexpected none"]),
    "missing-shard-of-qkv": (DEEPSPEC, {}, drop(LAYER0 + "k_proj.weight"), [f"missing {LAYER0}k_proj.weight"]),
    "unexpected-gate": (DEEPSPEC, {}, add(LAYER0 + "g_proj.weight", 4, 4), [f"unexpected {LAYER0}g_proj.weight"]),
    "attention-sinks": (DEEPSPEC, {}, add(LAYER0 + "attention_sink_bias", 4), ["attention_sink_bias"]),
    "bias-without-flag": (DEEPSPEC, {}, add(LAYER0 + "q_proj.bias", 64), [f"unexpected {LAYER0}q_proj.bias"]),
    "flag-without-bias": (DEEPSPEC, {"attention_bias": True}, keep, [f"missing {LAYER0}k_proj.bias"]),
    "two-values-for-one-field": (DEEPSPEC, {"dspark_block_size": 5}, keep, ["block_size=4 contradicts", "=5"]),
    "two-mask-ids": (DEEPSPEC, {"pard_token": 62}, keep, ["mask_token_id=63 contradicts pard_token=62"]),
    "intermediate-size": (
        DEEPSPEC,
        {"intermediate_size": 64},
        keep,
        ["layers.0.mlp.gate_proj.weight has shape [48, 32]", "intermediate_size=64"],
    ),
    "head-dim": (DEEPSPEC, {"head_dim": 8}, keep, [f"{LAYER0}q_norm.weight has shape [16]", "head_dim=8"]),
    "vocab-size": (DEEPSPEC, {"vocab_size": 80}, keep, ["embed_tokens.weight has shape [64, 32]", "vocab_size=80"]),
    "fused-and-split": (DEEPSPEC, {}, add(LAYER0 + "qkv_proj.weight", 128, 32), ["q_proj.weight is given twice"]),
    "prefixed-and-not": (DEEPSPEC, {}, add("model.norm.weight", 32), ["norm.weight is given twice"]),
    "fused-with-wrong-rows": (
        DEEPSPEC,
        {},
        lambda weights: add(LAYER0 + "qkv_proj.weight", 120, 32)(
            drop(*(LAYER0 + f"{part}_proj.weight" for part in "qkv"))(weights)
        ),
        ["qkv_proj.weight has shape [120, 32]", "64+32+32"],
    ),
    "nan": (DEEPSPEC, {}, replace("lm_head.weight", with_nan), ["lm_head.weight contains non-finite values"]),
    "infinity": (DEEPSPEC, {}, replace("fc.weight", with_infinity), ["fc.weight contains non-finite values"]),
    "surplus-layer": (DEEPSPEC, {"num_hidden_layers": 1, "layer_types": ABSENT}, keep, ["layers found [0, 1]", "=1"]),
    "layer-gap": (
        DEEPSPEC,
        {"num_hidden_layers": 3, "layer_types": ABSENT},
        keep,
        ["layers found [0, 1]", "num_hidden_layers=3"],
    ),
    "mask-hidden": (DEEPSPEC, {}, add("mask_hidden", 32), ["tensor mask_hidden"]),
    "quantised-weight": (
        DEEPSPEC,
        {},
        lambda weights: replace("fc.weight", weights["fc.weight"].to(torch.float8_e4m3fn))(weights),
        ["tensor fc.weight of type F8_E4M3"],
    ),
    "scale-without-quantised-weight": (DEEPSPEC, {}, add("fc.weight_scale", 1), ["tensor fc.weight_scale"]),
    "unknown-drafter-field": (DEEPSPEC, {"markov_temperature": 2.0}, keep, ["markov_temperature=2.0", "unknown"]),
    "unknown-nested-field": (
        DEEPSPEC,
        {"dspark_config.gating": "soft"},
        keep,
        ["dspark_config.gating='soft'", "unknown"],
    ),
    # taps
    "no-taps": (DEEPSPEC, {"target_layer_ids": ABSENT}, keep, ["target_layer_ids is missing"]),
    "empty-taps": (DEEPSPEC, {"target_layer_ids": []}, keep, ["target_layer_ids=[]", "non-empty list of integers"]),
    "taps-of-text": (DEEPSPEC, {"target_layer_ids": ["1", "2", "3"]}, keep, ["['1', '2', '3']"]),
    "unsorted-taps": (DEEPSPEC, {"target_layer_ids": [0, 2, -1]}, keep, ["[0, 2, -1]", "strictly increasing"]),
    "repeated-taps": (SPECULATORS, {"aux_hidden_state_layer_ids": [1, 1, 6]}, keep, ["[1, 1, 6]"]),
    "tap-before-the-embedding": (DEEPSPEC, {"target_layer_ids": [-2, 1, 4]}, keep, ["[-2, 1, 4]", "ids >= -1"]),
    "negative-index": (SPECULATORS, {"aux_hidden_state_layer_ids": [-1, 1, 2]}, keep, ["[-1, 1, 2]", "ids >= 0"]),
    "tap-past-the-declared-target": (
        DEEPSPEC,
        {"target_layer_ids": [-1, 1, 6]},
        keep,
        ["target layer id 6 is outside -1..5", "num_target_layers=6"],
    ),
    "one-tap-too-few": (
        DEEPSPEC,
        {"target_layer_ids": [1, 4]},
        keep,
        ["fc.weight takes 96 features but 2 taps of width 32 give 64"],
    ),
    # block and mask
    "no-block-size": (DEEPSPEC, {"block_size": ABSENT}, keep, ["block_size is missing", "dspark_block_size"]),
    "zero-block-size": (DEEPSPEC, {"block_size": 0}, keep, ["block_size=0", "integer >= 1"]),
    "fractional-block-size": (DEEPSPEC, {"block_size": 4.0}, keep, ["block_size=4.0", "integer >= 1"]),
    "fill-block-of-one": (
        DEEPSPEC,
        {"block_size": 1, "sample_from_anchor": False},
        keep,
        ["block_size=1 in the 1+N layout", "at least 2"],
    ),
    "no-mask": (DEEPSPEC, {"mask_token_id": None}, keep, ["mask_token_id is missing", "pard_token"]),
    "mask-outside-the-embedding": (
        DEEPSPEC,
        {"mask_token_id": 64},
        keep,
        ["mask_token_id=64 is outside the 64 embedding rows"],
    ),
    "sliding-without-window": (SPECULATORS, {TLC + "sliding_window": None}, keep, ["layer 1: sliding_window=None"]),
    "window-of-zero": (SPECULATORS, {TLC + "sliding_window": 0}, keep, ["sliding_window=0", "integer >= 1"]),
    "layer-types-for-other-layers": (
        DEEPSPEC,
        {"layer_types": ["full_attention"] * 3},
        keep,
        ["layer_types has 3 entries", "2 layers"],
    ),
    "unknown-layer-type": (
        DEEPSPEC,
        {"layer_types": ["full_attention", "linear_attention"]},
        keep,
        ["layer_types contains linear_attention"],
    ),
    # heads
    "no-markov-rank": (DEEPSPEC, {"markov_rank": ABSENT}, keep, ["markov_rank is missing", "[64, 8]"]),
    "rank-0-with-tensors": (
        DEEPSPEC,
        {"markov_rank": 0, "confidence_head_with_markov": False},
        keep,
        ["markov_rank=0 but markov_w1 has shape [64, 8]"],
    ),
    "negative-rank": (DEEPSPEC, {"markov_rank": -1}, keep, ["markov_rank=-1", "integer >= 0"]),
    "rank-against-columns": (DEEPSPEC, {"markov_rank": 4}, keep, ["markov_rank=4 but markov_w1 has shape [64, 8]"]),
    "no-head-type": (DEEPSPEC, {"markov_head_type": ABSENT}, keep, ["markov_head_type is missing"]),
    "unknown-head-type": (DEEPSPEC, {"markov_head_type": "mamba"}, keep, ["unsupported markov_head_type='mamba'"]),
    "gated-without-gate": (
        DEEPSPEC,
        {"markov_head_type": "gated"},
        keep,
        ["markov_head_type='gated' requires gate_proj, markov_w1, markov_w2; found markov_w1, markov_w2"],
    ),
    "rnn-without-projection": (DEEPSPEC, {"markov_head_type": "rnn"}, keep, ["'rnn' requires joint_proj"]),
    "vanilla-with-a-gate": (
        DEEPSPEC,
        {},
        add("markov_head.gate_proj.weight", 8, 40),
        ["markov_head_type='vanilla' requires markov_w1, markov_w2; found gate_proj"],
    ),
    "half-a-markov-head": (DEEPSPEC, {}, drop("markov_head.markov_w2.weight"), ["found markov_w1"]),
    "confidence-stated-but-absent": (
        DEEPSPEC,
        {},
        drop("confidence_head.proj.weight", "confidence_head.proj.bias"),
        ["enable_confidence_head=True but confidence_head.proj.weight is missing"],
    ),
    "confidence-without-bias": (DEEPSPEC, {}, drop("confidence_head.proj.bias"), ["missing confidence_head.proj.bias"]),
    "confidence-disabled-but-present": (
        DEEPSPEC,
        {"enable_confidence_head": False},
        keep,
        ["enable_confidence_head=False but confidence_head.proj.weight is present"],
    ),
    "confidence-width-against-the-flag": (
        DEEPSPEC,
        {"confidence_head_with_markov": False},
        keep,
        ["confidence head takes 40 inputs", "32 (hidden_size=32, markov_rank=8"],
    ),
    "markov-confidence-of-rank-0": (
        DEEPSPEC,
        {"markov_rank": 0, "markov_head_type": ABSENT},
        drop("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        ["confidence_head_with_markov=True with markov_rank=0"],
    ),
    "softcap-of-zero": (DEEPSPEC, {"final_logit_softcapping": 0.0}, keep, ["final_logit_softcapping=0.0", "> 0"]),
    # vocabulary
    "reduced-without-table": (SPECULATORS, {}, drop("d2t", "t2d"), ["reduced vocabulary (40 of 96) needs a d2t"]),
    "reduced-without-head": (
        SPECULATORS,
        {},
        drop("lm_head.weight"),
        ["reduced vocabulary (40 of 96) needs its own lm_head"],
    ),
    "table-without-reduction": (
        DEEPSPEC,
        {},
        add("d2t", 64, dtype=torch.int64),
        ["d2t has shape [64]", "64 of 64 is not reduced"],
    ),
    "table-of-another-length": (SPECULATORS, {}, add("d2t", 41, dtype=torch.int64), ["d2t has shape [41]", "is 40"]),
    "table-of-floats": (SPECULATORS, {}, add("d2t", 40), ["d2t has type torch.float32", "integers"]),
    "absolute-ids-in-place-of-offsets": (
        SPECULATORS,
        {},
        replace("d2t", ABSOLUTE_IDS),
        ["d2t is not an offset table", "entry 32 maps to 96"],
    ),
    "ids-that-do-not-increase": (
        SPECULATORS,
        {},
        replace("d2t", -torch.arange(40)),
        ["d2t is not an offset table", "entry 1 maps to 0"],
    ),
    "negative-ids": (SPECULATORS, {}, replace("d2t", -torch.ones(40, dtype=torch.int64)), ["entry 0 maps to -1"]),
    "flags-without-table": (SPECULATORS, {}, drop("d2t"), ["t2d without d2t"]),
    "table-without-flags": (SPECULATORS, {}, drop("t2d"), ["d2t without t2d"]),
    "a-flag-too-few": (SPECULATORS, {}, replace("t2d", TOO_FEW_FLAGS), ["t2d keeps 39 ids, d2t has 40 entries"]),
    "flags-of-other-ids": (SPECULATORS, {}, replace("t2d", OTHER_FLAGS), ["t2d's kept id 0 is 1, d2t's is 0"]),
    "flags-of-another-vocabulary": (SPECULATORS, {}, add("t2d", 95, dtype=torch.bool), ["t2d has shape [95]"]),
    "too-many-candidates": (DEEPSPEC, {"dspark_draft_topk": 65}, keep, ["dspark_draft_topk=65", "1..64"]),
    "head-stated-as-text": (DEEPSPEC, {"has_lm_head": "false"}, keep, ["has_lm_head='false'", "true or false"]),
    "head-stated-but-absent": (DEEPSPEC, {"has_lm_head": True}, drop("lm_head.weight"), ["has_lm_head=True"]),
    "shared-matrix-of-another-width": (
        DEEPSPEC,
        {"target_hidden_size": 64},
        lambda weights: drop("lm_head.weight")({**weights, "fc.weight": torch.zeros(32, 192)}),
        ["hidden_size=32 with target_hidden_size=64 and no own head"],
    ),
    # backbone
    "heads-that-do-not-divide": (DEEPSPEC, {"num_key_value_heads": 3}, keep, ["num_attention_heads=4", "heads=3"]),
    "odd-head-dim": (DEEPSPEC, {"head_dim": 15}, keep, ["head_dim=15", "even"]),
    "another-activation": (DEEPSPEC, {"hidden_act": "gelu"}, keep, ["hidden_act='gelu'", "'silu'"]),
    "no-hidden-size": (SPECULATORS, {TLC + "hidden_size": ABSENT}, keep, ["hidden_size is missing", TLC[:-1]]),
    "no-context-limit": (DEEPSPEC, {"max_position_embeddings": ABSENT}, keep, ["max_position_embeddings is missing"]),
    "epsilon-of-zero": (DEEPSPEC, {"rms_norm_eps": 0}, keep, ["rms_norm_eps=0", "> 0"]),
    "no-theta": (DEEPSPEC, {"rope_parameters": ABSENT, "rope_theta": ABSENT}, keep, ["rope_theta is missing"]),
    "negative-theta": (DEEPSPEC, {"rope_parameters.rope_theta": -1.0}, keep, ["rope_theta=-1.0"]),
    "unknown-rope": (DEEPSPEC, {"rope_parameters.rope_type": "spiral"}, keep, ["rope_type='spiral'"]),
    "length-dependent-rope": (DEEPSPEC, {"rope_parameters.rope_type": "longrope"}, keep, ["rope_type='longrope'"]),
    "yarn-without-factor": (DEEPSPEC, {"rope_parameters.rope_type": "yarn"}, keep, ["rope_type='yarn'", "factor"]),
    "unknown-rope-parameter": (
        DEEPSPEC,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "twist": 1}},
        keep,
        ["'twist': 1", "no twist"],
    ),
    "scaled-and-partial": (
        DEEPSPEC,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "partial_rotary_factor": 0.5}},
        keep,
        ["rope_type='yarn' with partial_rotary_factor=0.5"],
    ),
    "two-ropes": (
        DEEPSPEC,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        keep,
        ["rope_type='default'", "rope_scaling says 'yarn'"],
    ),
    "interleaved-rope": (DEEPSPEC, {"rope_is_neox_style": False}, keep, ["rope_is_neox_style=False"]),
    "scaled-values": (DEEPSPEC, {"attention_value_scale": 0.5}, keep, ["attention_value_scale=0.5"]),
    "noise-conditioning": (DEEPSPEC, {"log_snr_conditioning": True}, keep, ["log_snr_conditioning=True"]),
    "flag-as-text": (DEEPSPEC, {"enable_confidence_head": "true"}, keep, ["enable_confidence_head='true'"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_checkpoint_is_refused_with_field_value_and_path(case, tmp_path):
    base, changes, change_weights, parts = REFUSALS[case]
    folder = write_checkpoint(tmp_path / "drafter", changed(base, changes), change_weights(random_weights(base)))
    with pytest.raises(CheckpointError) as error:
        load_drafter(folder)
    message = str(error.value)
    assert message.startswith(f"{folder}: ")
    assert all(part in message for part in parts), message
    assert "expected" in message


@pytest.mark.parametrize("base", [DEEPSPEC, SPECULATORS], ids=["deepspec", "speculators"])
def test_the_checkpoints_that_the_refusals_start_from_load(base, tmp_path):
    load_drafter(write_checkpoint(tmp_path / "drafter", base, random_weights(base)))


def test_all_problems_are_reported_at_once(tmp_path):
    wrong = {"block_size": 0, "target_layer_ids": [4, 1, -1], "markov_head_type": "mamba"}
    with pytest.raises(CheckpointError, match="3 problems") as error:
        load_drafter(write_deepspec(tmp_path, wrong))
    assert all(part in str(error.value) for part in ("block_size=0", "[4, 1, -1]", "'mamba'"))
