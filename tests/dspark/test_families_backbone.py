"""From raw configs to the canonical record: rotary embedding, windows, heads, vocabularies, published checkpoints."""

import dataclasses
import math

import pytest
from checkpoints_util import (
    ABSENT,
    DEEPSPEC,
    SPECULATORS,
    changed,
    deepspec,
    header_container,
    refuse,
    resolve,
    speculators,
)

from dspark.config import DrafterConfig, LayerConfig, RopeConfig
from dspark.families import Findings, resolve_container
from dspark.families.expected import expected_shapes

TLC = "transformer_layer_config."

# --- rotary embedding and norms ------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        pytest.param(
            {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "rope_theta": 1e6},
            RopeConfig(1e7),
            id="nested-beats-flat",
        ),
        pytest.param({"rope_parameters": ABSENT, "rope_theta": 1e6}, RopeConfig(1e6), id="flat-only"),
        pytest.param({"rope_parameters": ABSENT, "rope_scaling": None}, RopeConfig(1e6), id="null-scaling"),
        pytest.param(
            {"rope_parameters": {**YARN, "rope_theta": 5e5}},
            RopeConfig(5e5, "yarn", {"factor": 16.0, "original_max_position_embeddings": 4096}),
            id="yarn-nested",
        ),
        pytest.param(
            {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(1e6, "linear", {"factor": 2.0}),
            id="old-spelling-of-the-type",
        ),
        pytest.param(
            {"rope_parameters.partial_rotary_factor": 0.25, "rope_parameters.mrope_section": [8, 4, 4]},
            RopeConfig(1e6),
            id="copies-of-the-target's-fields",
        ),
    ],
)
def test_rotary_embedding_is_read_from_wherever_it_stands(changes, rope):
    assert deepspec(changes).rope == rope


def test_a_missing_theta_is_an_error_and_not_a_default():
    message = refuse(changed(DEEPSPEC, {"rope_parameters": ABSENT, "rope_theta": ABSENT}))
    assert "rope_theta is missing" in message


def test_speculators_uses_the_sliding_entry_of_per_layer_rope_for_every_layer():
    by_layer = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert speculators({TLC + "rope_parameters": by_layer}).rope == RopeConfig(1e4)
    assert speculators({TLC + "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}).rope == RopeConfig(1e6)


def test_norm_epsilon_is_honoured_and_its_default_recorded():
    assert deepspec({"rms_norm_eps": 1e-5}).rms_norm_eps == 1e-5
    record = deepspec({"rms_norm_eps": ABSENT})
    assert record.rms_norm_eps == 1e-6
    assert any("rms_norm_eps" in note for note in record.notes)


# --- windows and causality -----------------------------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        pytest.param({}, (LayerConfig(), LayerConfig(8, True)), id="sliding-is-causal"),
        pytest.param(
            {"sliding_window_non_causal": True}, (LayerConfig(), LayerConfig(8, False)), id="non-causal-window"
        ),
        pytest.param({"is_causal": True}, (LayerConfig(None, True), LayerConfig(8, True)), id="all-causal"),
        pytest.param(
            {"is_causal": False}, (LayerConfig(None, False), LayerConfig(8, False)), id="none-causal-beats-the-type"
        ),
        pytest.param(
            {"dflash_config.causal": True}, (LayerConfig(None, True), LayerConfig(8, True)), id="nested-causal"
        ),
        pytest.param(
            {"dflash_config.swa_window_size": 4}, (LayerConfig(), LayerConfig(4, True)), id="own-window-beats-the-copy"
        ),
        pytest.param({TLC + "layer_types": ABSENT}, (LayerConfig(), LayerConfig()), id="no-types-is-full-attention"),
        pytest.param(
            {TLC + "layer_types": [FULL, FULL], "dflash_config.use_swa": True},
            (LayerConfig(8, False), LayerConfig(8, False)),
            id="one-switch-makes-all-layers-sliding",
        ),
    ],
)
def test_window_and_causality_of_each_layer(changes, layers):
    assert speculators(changes).layers == layers


def test_a_window_copied_from_the_target_does_not_make_full_layers_slide():
    assert deepspec({"sliding_window": 4096, "use_sliding_window": True}).layers == (LayerConfig(), LayerConfig())


# --- heads and vocabulary ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "confidence"),
    [
        pytest.param({"enable_confidence_head": False, "confidence_head_with_markov": True}, "none", id="no-head"),
        pytest.param({"confidence_head_with_markov": False}, "hidden", id="head-without-markov"),
    ],
)
def test_rank_0_goes_with_a_confidence_head_that_needs_no_markov(changes, confidence):
    record = deepspec({"markov_rank": 0, "markov_head_type": ABSENT, **changes})
    assert (record.markov_rank, record.markov_kind, record.confidence) == (0, "none", confidence)


def test_heads_are_decided_by_their_tensors_where_the_config_is_silent():
    silent = dataclasses.replace(
        header_container(DEEPSPEC),
        raw=changed(DEEPSPEC, {"enable_confidence_head": ABSENT, "confidence_head_with_markov": ABSENT}),
    )
    findings = Findings()
    assert resolve_container(silent, None, None, findings).config.confidence == "hidden+markov"
    assert any("confidence head" in note for note in findings.notes)


def test_the_schema_defaults_of_speculators_are_recorded():
    without = {"markov_head_type": ABSENT}
    record = speculators(without)
    assert record.markov_kind == "vanilla"
    assert any("markov_head_type" in note for note in record.notes)


def test_a_missing_draft_vocabulary_size_is_read_from_the_head():
    container = dataclasses.replace(header_container(SPECULATORS), raw=changed(SPECULATORS, {"draft_vocab_size": None}))
    findings = Findings()
    assert resolve_container(container, None, None, findings).config.draft_vocab_size == 40
    assert any("draft_vocab_size=40" in note for note in findings.notes)


def test_extra_embedding_rows_over_a_full_head_are_no_reduction_for_the_right_target():
    # One own row for the mask token; the head has the target's 95 tokens, in order.
    config = changed(SPECULATORS, {"draft_vocab_size": 95})
    tables = ("d2t", "t2d")
    assert resolve(config, without=tables, target_vocab_size=95).draft_vocab_size == 95
    assert "reduced vocabulary (95 of 96) needs a d2t table" in refuse(config, without=tables)


def test_the_case_of_the_head_type_does_not_matter():
    assert deepspec({"markov_head_type": "vanilla"}) == dataclasses.replace(
        deepspec({"markov_head_type": "Vanilla"}), notes=deepspec().notes
    )


def test_serving_options_are_noted():
    record = deepspec({"dspark_draft_topk": 8, "final_logit_softcapping": 30.0})
    assert any("dspark_draft_topk=8 not applied" in note for note in record.notes)
    assert any("final_logit_softcapping=30.0 ignored" in note for note in record.notes)


def test_a_logit_scale_is_kept():
    assert deepspec({"logit_scale": 0.5}).logit_scale == 0.5


# --- published checkpoints -----------------------------------------------------------------------------------------

QWEN3_8B = {
    "block_size": 7,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": [FULL] * 5,
    "markov_rank": 256,
    "mask_token_id": 151669,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "vocab_size": 151936,
}
QWEN3_4B = {**QWEN3_8B, "hidden_size": 2560, "intermediate_size": 9728}
QWEN3_14B = {
    **QWEN3_8B,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_target_layers": 40,
    "target_layer_ids": [1, 10, 19, 28, 37],
}


def num_parameters(config: DrafterConfig) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


@pytest.mark.parametrize(
    ("changes", "taps", "parameters"),
    [
        pytest.param(QWEN3_4B, (2, 10, 18, 26, 34), 1_393_133_569, id="qwen3-4b"),
        pytest.param(QWEN3_8B, (2, 10, 18, 26, 34), 2_371_081_729, id="qwen3-8b"),
        pytest.param(QWEN3_14B, (2, 11, 20, 29, 38), 3_416_263_169, id="qwen3-14b"),
    ],
)
def test_published_deepspec_checkpoints_have_their_published_size(changes, taps, parameters):
    record = deepspec(changes)
    assert record.tap_ids == taps
    assert (record.anchor_first, record.max_draft_tokens) == (True, 7)
    assert len(expected_shapes(record)) == 11 * 5 + 9
    assert num_parameters(record) == parameters


def published_speculators(num_layers, vocab_size, draft_vocab_size, block_size, aux, mask, **changes):
    return changed(
        SPECULATORS,
        {
            "aux_hidden_state_layer_ids": aux,
            "block_size": block_size,
            "draft_vocab_size": draft_vocab_size,
            "mask_token_id": mask,
            "sample_from_anchor": ABSENT,
            "speculators_config.proposal_methods": ABSENT,
            TLC + "num_hidden_layers": num_layers,
            TLC + "layer_types": ABSENT,
            TLC + "vocab_size": vocab_size,
            **changes,
        },
    )


@pytest.mark.parametrize(
    ("config", "largest", "num_tensors"),
    [
        pytest.param(
            published_speculators(5, 154880, 154880, 8, [8, 23, 39, 55, 70], 154856), 7, 64, id="no-layout-key"
        ),
        pytest.param(published_speculators(5, 154880, 32000, 16, [8, 23, 39], 154856), 15, 66, id="block-of-16"),
        pytest.param(published_speculators(3, 163840, 32000, 8, [1, 29, 57], 163608), 7, 44, id="three-layers"),
        pytest.param(
            published_speculators(1, 151936, 151936, 3, [2, 10, 18, 26, 34], 151669), 2, 20, id="two-draft-tokens"
        ),
        pytest.param(
            published_speculators(
                5,
                154880,
                154880,
                8,
                [20, 28, 32, 36, 40, 44],
                154856,
                **{"speculators_config.proposal_methods": [{"speculative_tokens": 8}]},
            ),
            8,
            64,
            id="as-many-tokens-as-rows",
        ),
    ],
)
def test_published_speculators_checkpoints(config, largest, num_tensors):
    record = resolve(config)
    assert record.max_draft_tokens == largest
    assert record.tap_ids == tuple(config["aux_hidden_state_layer_ids"])
    tables = 2 if record.reduced_vocabulary else 0
    assert len(expected_shapes(record)) + tables == num_tensors


def test_a_published_layout_without_embedding_and_head():
    config = published_speculators(5, 151936, 151936, 8, list(range(4, 61, 8)), 151669)
    record = resolve(config, without=("embed_tokens.weight", "lm_head.weight"))
    assert (record.owns_embedding, record.owns_head, len(record.tap_ids)) == (False, False, 8)
