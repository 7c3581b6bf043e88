"""From raw configs to the canonical record: packagings, block layouts, taps, rotary embedding, windows."""

import dataclasses

import pytest
from checkpoints_util import ABSENT, DEEPSPEC, SPECULATORS, changed, header_container

from dspark.config import DrafterConfig, LayerConfig, RopeConfig
from dspark.families import CheckpointError, Findings, recognise, refuse_unsupported, resolve_container
from dspark.families.expected import dimensions, expected_shapes

TLC = "transformer_layer_config."


def read(config, without=(), layout=None, target_vocab_size=None) -> tuple[DrafterConfig | None, Findings]:
    findings = Findings()
    resolved = resolve_container(header_container(config, without), layout, target_vocab_size, findings)
    return (None if resolved is None else resolved.config), findings


def resolve(config, **options) -> DrafterConfig:
    record, findings = read(config, **options)
    assert findings.problems == []
    return record


def refuse(config, **options) -> str:
    _, findings = read(config, **options)
    assert findings.problems
    return "\n".join(findings.problems)


def deepspec(changes=None, **options) -> DrafterConfig:
    return resolve(changed(DEEPSPEC, changes or {}), **options)


def speculators(changes=None, **options) -> DrafterConfig:
    return resolve(changed(SPECULATORS, changes or {}), **options)


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
        assert f"{'anchor-first' if anchor_first else '1+N (fill)'}, from the layout argument" in " ".join(record.notes)


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
    sizes, total = dimensions(config), 0
    for shape in expected_shapes(config).values():
        elements = 1
        for dimension in shape:
            elements *= sizes[dimension]
        total += elements
    return total


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
