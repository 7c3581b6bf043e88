"""From raw configs to the canonical record: packagings, block layouts and taps."""

import dataclasses

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

from dspark.config import LayerConfig, RopeConfig
from dspark.families import CheckpointError, Findings, recognise, refuse_unsupported, resolve_container

TLC = "transformer_layer_config."


NEMOTRON = {
    "model_type": "qwen3",
    "has_embed_tokens": True,
    "has_lm_head": False,
    "quantization_config": {"quant_algo": "W4A16_NVFP4"},
    "target_layer_ids": [1, 3],
    "eagle_aux_hidden_state_layer_ids": [2, 4],
    "sample_from_anchor": False,
}


@pytest.mark.parametrize(
    ("config", "names", "family"),
    [
        pytest.param(
            {"model_type": "deepseek_v4", "dspark_block_size": 5}, (), "DeepSeek-V4 bundled", id="v4-by-model-type"
        ),
        pytest.param(
            {"model_type": "x", "dspark_markov_rank": 256},
            ("mtp.0.main_proj.weight",),
            "DeepSeek-V4 bundled",
            id="v4-by-tensor",
        ),
        pytest.param({"architectures": ["DSparkMiniMaxDraftModel"]}, (), "MiniMax-M3.1", id="minimax"),
        pytest.param({}, ("model.dspark.fc.weight",), "MiniMax-M3.1", id="minimax-by-tensor"),
        pytest.param({"model_type": "k3_dspark"}, (), "K3 MLA", id="k3"),
        pytest.param({"model_type": "muse_spark_dspark"}, (), "Muse Spark", id="muse"),
        pytest.param({"model_type": "gemma4_text"}, (), "DeepSpec Gemma4", id="gemma4"),
        pytest.param({"model_type": "qwen3_5"}, (), "Qwen3.5-native", id="qwen35"),
        pytest.param({"architectures": ["Lfm2DSparkDraftModel"]}, (), "LFM2", id="lfm2"),
        pytest.param({"model_type": "qwen3", "architectures": ["DSparkDraftModel"]}, (), "SpecForge", id="specforge"),
        pytest.param(
            {"model_type": "qwen3", "dflash_config": {"projector_type": "dspark"}}, (), "SpecForge", id="projector"
        ),
        pytest.param(NEMOTRON, (), "Nemotron-3.5", id="nemotron"),
    ],
)
def test_known_but_unsupported_packagings_are_refused_by_name(config, names, family):
    found = recognise(config, names)
    assert found.name == family
    with pytest.raises(CheckpointError, match=f'recognised as packaging "{family}"'):
        refuse_unsupported(found)


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "LingDSparkModel", "Qwen3OmniDSparkModel"])
def test_all_deepspec_qwen3_architectures_are_supported(architecture):
    assert recognise({"model_type": "qwen3", "architectures": [architecture]}).name == "DeepSpec Qwen3"


def test_the_architecture_used_by_three_packagings_does_not_decide():
    # DSparkDraftModel is written by speculators and by SpecForge.
    assert recognise(changed(SPECULATORS, {"architectures": ["DSparkDraftModel"]})).name == "speculators"


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, id="eagle"),
        pytest.param({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, id="plain-dflash"),
        pytest.param({}, id="empty"),
    ],
)
def test_other_drafters_are_not_dspark(config):
    with pytest.raises(CheckpointError, match="not a DSpark drafter"):
        recognise(config)


def test_a_target_with_an_embedded_drafter_is_not_a_standalone_drafter():
    with pytest.raises(CheckpointError, match="pass it as the target"):
        recognise({"model_type": "something", "dspark_block_size": 5})


def test_deepspec_fixture_resolves():
    record = deepspec()
    assert (record.block_size, record.max_draft_tokens, record.anchor_first) == (4, 4, True)
    assert record.tap_ids == (0, 2, 5)
    assert record.layers == (LayerConfig(), LayerConfig())
    assert record.rope == RopeConfig(1e6)
    assert (record.markov_kind, record.markov_rank, record.confidence) == ("vanilla", 8, "hidden+markov")
    assert (record.vocab_size, record.draft_vocab_size, record.num_target_layers) == (64, 64, 6)
    assert record.head_dim * record.num_attention_heads != record.hidden_size


def test_speculators_fixture_resolves():
    record = speculators()
    assert (record.block_size, record.max_draft_tokens, record.anchor_first) == (5, 4, False)
    assert record.tap_ids == (1, 3, 6)
    assert record.layers == (LayerConfig(), LayerConfig(window=8, causal=True))
    assert (record.vocab_size, record.draft_vocab_size, record.reduced_vocabulary) == (96, 40, True)
    assert (record.target_hidden_size, record.verifier_name) == (32, "tiny/target")


BACKBONE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_parameters",
    "layer_types",
    "max_position_embeddings",
    "attention_bias",
    "hidden_act",
)
DRAFTER_FIELDS = (
    "block_size",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "num_target_layers",
)


def as_speculators(config):
    """The same drafter in the speculators packaging: backbone nested, taps counted from the embedding."""
    return {
        "speculators_model_type": "dspark",
        "transformer_layer_config": {name: config[name] for name in BACKBONE_FIELDS},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config["target_layer_ids"]],
        "sample_from_anchor": True,
        **{name: config[name] for name in DRAFTER_FIELDS},
    }


def nested(config, section, *names):
    """The same DeepSpec config with some fields moved into a nested section."""
    return {
        **{key: value for key, value in config.items() if key not in names},
        section: {name: config[name] for name in names},
    }


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("section", ["dflash_config", "dspark_config"])
def test_the_same_drafter_in_every_dialect_is_one_record(kind, section):
    flat = changed(DEEPSPEC, {"markov_head_type": kind})
    moved = nested(flat, section, "block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    records = []
    for raw in (flat, as_speculators(flat), moved):
        findings = Findings()
        container = dataclasses.replace(header_container(flat), raw=raw)
        resolved = resolve_container(container, None, None, findings)
        assert findings.problems == []
        records.append(dataclasses.replace(resolved.config, family="", notes=()))
    assert records[0] == records[1] == records[2]


@pytest.mark.parametrize(
    ("key", "section", "value"),
    [
        ("block_size", "dflash_config", 8),
        ("mask_token_id", "dspark_config", 62),
        ("markov_rank", "dspark_config", 16),
        ("target_layer_ids", "dflash_config", [0, 2, 4]),
    ],
)
def test_a_nested_value_that_contradicts_the_flat_one_is_refused(key, section, value):
    message = refuse(changed(DEEPSPEC, {f"{section}.{key}": value}))
    assert f"{section}.{key}={value!r} contradicts {key}={DEEPSPEC[key]!r}" in message


def test_speculators_fields_inside_the_layer_config_are_not_overlooked():
    message = refuse(changed(SPECULATORS, {TLC + "block_size": 8}))
    assert "block_size=5 contradicts transformer_layer_config.block_size=8" in message


# --- block layout --------------------------------------------------------------------------------------------------

ONLY_KEYS = {"sample_from_anchor": ABSENT, "speculators_config.proposal_methods": ABSENT}


@pytest.mark.parametrize(
    ("packaging", "changes", "anchor_first", "source"),
    [
        pytest.param(DEEPSPEC, {}, True, "assumed", id="deepspec-without-a-key"),
        pytest.param(DEEPSPEC, {"sample_from_anchor": False}, False, "sample_from_anchor=False", id="stated"),
        pytest.param(DEEPSPEC, {"dflash_config.sample_from_anchor": False}, False, "dflash_config", id="nested"),
        pytest.param(DEEPSPEC, {"dspark_bonus_anchor": True}, False, "dspark_bonus_anchor=True", id="bonus-anchor"),
        pytest.param(DEEPSPEC, {"logits_start": 1}, False, "logits_start=1", id="logits-start-1"),
        pytest.param(DEEPSPEC, {"logits_start": 0}, True, "logits_start=0", id="logits-start-0"),
        pytest.param(DEEPSPEC, {"query_zero_predicts_next": False}, False, "query_zero", id="query-zero"),
        pytest.param(SPECULATORS, {}, False, "sample_from_anchor=False", id="speculators-stated"),
        pytest.param(SPECULATORS, {"sample_from_anchor": ABSENT}, False, "speculative_tokens=4", id="by-tokens-fill"),
        pytest.param(
            SPECULATORS,
            {
                "sample_from_anchor": ABSENT,
                "speculators_config.proposal_methods": [{"speculative_tokens": 5}],
            },
            True,
            "speculative_tokens=5",
            id="by-tokens-anchor",
        ),
        pytest.param(SPECULATORS, ONLY_KEYS, False, "predates", id="speculators-before-the-key"),
        pytest.param(
            SPECULATORS,
            {"sample_from_anchor": True, "speculators_config.proposal_methods": [{"speculative_tokens": 5}]},
            True,
            "sample_from_anchor=True",
            id="speculators-anchor",
        ),
    ],
)
def test_a_block_layout_is_resolved_by_a_stated_rule_and_its_source_recorded(packaging, changes, anchor_first, source):
    record = resolve(changed(packaging, changes))
    assert record.anchor_first is anchor_first
    assert record.max_draft_tokens == record.block_size - (0 if anchor_first else 1)
    (note,) = [note for note in record.notes if note.startswith("layout:")]
    assert source in note


@pytest.mark.parametrize(
    ("packaging", "changes", "parts"),
    [
        pytest.param(
            DEEPSPEC,
            {"sample_from_anchor": True, "dspark_bonus_anchor": True},
            ["sample_from_anchor=True", "dspark_bonus_anchor=True"],
            id="two-keys",
        ),
        pytest.param(
            SPECULATORS,
            {"sample_from_anchor": True},
            ["sample_from_anchor=True", "block_size=5", "speculative_tokens=4", "inconsistent"],
            id="key-against-token-count",
        ),
        pytest.param(
            SPECULATORS,
            {"speculators_config.proposal_methods": [{"speculative_tokens": 3}]},
            ["block_size=5", "speculative_tokens=3"],
            id="impossible-token-count",
        ),
        pytest.param(DEEPSPEC, {"logits_start": 2}, ["logits_start=2"], id="unknown-start"),
        pytest.param(DEEPSPEC, {"sample_from_anchor": "false"}, ["sample_from_anchor='false'"], id="string"),
    ],
)
def test_contradictory_layouts_are_refused_and_the_caller_can_decide(packaging, changes, parts):
    message = refuse(changed(packaging, changes))
    assert all(part in message for part in parts)
    for layout, anchor_first in (("anchor", True), ("fill", False)):
        record = resolve(changed(packaging, changes), layout=layout)
        assert record.anchor_first is anchor_first
        assert f"{'anchor-first' if anchor_first else '1+N (fill)'}, from --layout or layout=" in " ".join(record.notes)


@pytest.mark.parametrize(
    ("packaging", "changes", "layout", "parts"),
    [
        pytest.param(DEEPSPEC, {"sample_from_anchor": True}, "fill", ["sample_from_anchor=True"], id="deepspec"),
        pytest.param(
            DEEPSPEC,
            {"dflash_config.query_zero_predicts_next": False},
            "anchor",
            ["dflash_config.query_zero_predicts_next=False"],
            id="nested",
        ),
        pytest.param(SPECULATORS, {}, "anchor", ["sample_from_anchor=False"], id="speculators"),
    ],
)
def test_a_stated_layout_is_not_overridden(packaging, changes, layout, parts):
    message = refuse(changed(packaging, changes), layout=layout)
    assert all(part in message for part in [*parts, f"--layout {layout}", "Leave --layout out"])
    other = "fill" if layout == "anchor" else "anchor"
    assert resolve(changed(packaging, changes), layout=other).anchor_first is (other == "anchor")


def test_a_layout_that_is_only_inferred_can_be_overridden():
    assert resolve(changed(SPECULATORS, {"sample_from_anchor": ABSENT}), layout="anchor").anchor_first


def test_an_unknown_layout_argument_is_refused():
    assert "layout='auto'" in refuse(DEEPSPEC, layout="auto")


def test_rank_0_does_not_imply_the_fill_layout():
    changes = {"markov_rank": 0, "markov_head_type": ABSENT, "confidence_head_with_markov": False}
    assert deepspec(changes).anchor_first


@pytest.mark.parametrize(("block_size", "layout", "largest"), [(8, "anchor", 8), (8, "fill", 7), (5, "anchor", 5)])
def test_the_largest_number_of_drafts_follows_block_and_layout(block_size, layout, largest):
    assert deepspec({"block_size": block_size}, layout=layout).max_draft_tokens == largest


# --- taps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        pytest.param({"target_layer_ids": [-1, 0, 2]}, (0, 1, 3), id="layer-outputs-and-the-embedding"),
        pytest.param(
            {"target_layer_ids": ABSENT, "aux_hidden_state_layer_ids": [0, 1, 3]}, (0, 1, 3), id="hidden-state-indices"
        ),
        pytest.param({"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, (0, 2, 5), id="both-lists-when-they-agree"),
    ],
)
def test_both_ways_of_counting_target_layers_give_the_same_states(changes, taps):
    assert deepspec(changes).tap_ids == taps


def test_layer_ids_and_aux_ids_that_are_equal_are_off_by_one_and_refused():
    message = refuse(changed(DEEPSPEC, {"eagle_aux_hidden_state_layer_ids": [-1, 1, 4]}))
    assert "eagle_aux_hidden_state_layer_ids=[-1, 1, 4]" in message
    message = refuse(changed(DEEPSPEC, {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}))
    assert "aux ids one more than the layer ids, that is [0, 2, 5]" in message
