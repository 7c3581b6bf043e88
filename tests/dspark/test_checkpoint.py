"""Loading: the same drafter however it is stored, whose matrices it uses, and that every tensor counts."""

import logging

import pytest
import torch
from checkpoints_util import (
    DEEPSPEC,
    SPECULATORS,
    FakeTarget,
    changed,
    random_weights,
    vocabulary_tables,
    write_checkpoint,
    write_deepspec,
    write_speculators,
)
from safetensors.torch import load_file

from dspark.checkpoint import load_drafter
from dspark.families import CheckpointError
from dspark.sampling import SamplingParams, SamplingTensors, Streams

QKV = [f"layers.{layer}.self_attn.{part}_proj" for layer in range(2) for part in "qkv"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def outputs(drafter, context_rows=6):
    """What a drafter computes for fixed inputs: context features, hidden rows, logits along the chain, confidence."""
    config, dtype = drafter.config, drafter.dtype
    generator = torch.Generator().manual_seed(3)
    width = len(config.tap_ids) * config.target_hidden_size
    taps = torch.randn(1, context_rows, width, generator=generator, dtype=torch.float64).to(dtype)
    anchors = torch.tensor([5])
    cache = drafter.new_cache(1)
    drafter.extend(cache, taps, [context_rows])
    hidden = drafter.block_hidden(cache, anchors)
    logits = []

    def pick(i, corrected):
        logits.append(corrected)
        return torch.tensor([7 + 2 * i])

    confidence = drafter.chain(hidden, anchors, config.max_draft_tokens, pick)
    return {
        "features": drafter.context_features(taps),
        "hidden": hidden,
        "logits": torch.stack(logits),
        "confidence": confidence if confidence is not None else torch.zeros(0),
        "ids": drafter.draft_ids() if drafter.draft_ids() is not None else torch.zeros(0),
    }


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def fused(weights):
    """q/k/v and gate/up stored as one tensor each."""
    result = dict(weights)
    for layer in range(2):
        at = f"layers.{layer}."
        parts = [result.pop(f"{at}self_attn.{part}_proj.weight") for part in "qkv"]
        result[f"{at}self_attn.qkv_proj.weight"] = torch.cat(parts)
        parts = [result.pop(f"{at}mlp.{part}_proj.weight") for part in ("gate", "up")]
        result[f"{at}mlp.gate_up_proj.weight"] = torch.cat(parts)
    return result


def prefixed(weights):
    return {f"model.{name}": tensor for name, tensor in weights.items()}


def with_leftovers(weights):
    """Tensors that training leaves behind and that take no part in drafting."""
    return {
        **weights,
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "mask_embedding": torch.ones(32),
        "verifier_lm_head.weight": torch.full((4, 4), float("nan")),
        "verifier_norm.weight": torch.ones(32),
    }


def aliased(weights):
    names = {"layers.0.": "midlayer.", "fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    renamed = {}
    for name, tensor in weights.items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), "")
        renamed[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed


@pytest.mark.parametrize("base", [DEEPSPEC, SPECULATORS], ids=["deepspec", "speculators"])
@pytest.mark.parametrize(
    ("store", "num_shards"),
    [
        pytest.param(dict, 3, id="sharded"),
        pytest.param(fused, 1, id="fused"),
        pytest.param(prefixed, 1, id="prefixed"),
        pytest.param(lambda weights: prefixed(fused(weights)), 2, id="prefixed-fused-sharded"),
        pytest.param(with_leftovers, 1, id="with-leftovers"),
        pytest.param(aliased, 1, id="aliased"),
    ],
)
def test_the_same_weights_stored_differently_are_the_same_drafter(base, store, num_shards, tmp_path):
    weights = random_weights(base)
    plain = load_drafter(write_checkpoint(tmp_path / "plain", base, weights))
    other = load_drafter(write_checkpoint(tmp_path / "other", base, store(weights), num_shards))
    assert plain.config == other.config
    assert plain.state_dict().keys() == other.state_dict().keys()
    assert same(outputs(plain), outputs(other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_keep_their_own_type_or_take_the_requested_one(dtype, tmp_path):
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(DEEPSPEC).items()}
    folder = write_checkpoint(tmp_path / "drafter", DEEPSPEC, weights)
    assert {p.dtype for p in load_drafter(folder).parameters()} == {dtype}
    for requested in DTYPES:
        drafter = load_drafter(folder, dtype=requested)
        assert {parameter.dtype for parameter in drafter.parameters()} == {requested}
        assert torch.equal(drafter.norm.weight, weights["norm.weight"].to(requested))


def test_mixed_types_load_as_that_of_most_bytes(tmp_path):
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(DEEPSPEC).items()}
    weights["confidence_head.proj.weight"] = weights["confidence_head.proj.weight"].float()
    drafter = load_drafter(write_checkpoint(tmp_path / "drafter", DEEPSPEC, weights))
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    assert any("BF16, F32 are loaded as BF16" in note for note in drafter.config.notes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_types_that_would_round_weights_away_are_refused(dtype, tmp_path):
    with pytest.raises(CheckpointError, match="expected float64, float32"):
        load_drafter(write_deepspec(tmp_path), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loading_onto_a_gpu_gives_the_weights_of_the_cpu(dtype, tmp_path):
    folder = write_speculators(tmp_path)
    on_cpu, on_gpu = load_drafter(folder, dtype=dtype), load_drafter(folder, dtype=dtype, device="cuda")
    for name, tensor in on_cpu.state_dict().items():
        assert on_gpu.state_dict()[name].device.type == "cuda"
        assert torch.equal(on_gpu.state_dict()[name].cpu(), tensor)


# --- every tensor takes part ---------------------------------------------------------------------------------------

PERTURBED = {
    "vanilla": (DEEPSPEC, {}),
    "gated": (DEEPSPEC, {"markov_head_type": "gated"}),
    "rnn": (DEEPSPEC, {"markov_head_type": "rnn"}),
    "attention-bias": (DEEPSPEC, {"attention_bias": True}),
    "reduced-fill-sliding": (SPECULATORS, {}),
}


@pytest.mark.parametrize("case", PERTURBED)
def test_no_loaded_tensor_is_left_unapplied(case, tmp_path):
    base, changes = PERTURBED[case]
    config = changed(base, changes)
    weights = random_weights(config)
    folder = write_checkpoint(tmp_path / "drafter", config, weights)
    before = outputs(load_drafter(folder, dtype=torch.float64))
    generator = torch.Generator().manual_seed(11)
    for name, tensor in weights.items():
        if name == "t2d":  # training only
            continue
        if name == "d2t":  # draft only the last ids of the vocabulary; its flags must follow
            replaced = vocabulary_tables(range(56, 96), 96)
        elif name.endswith("k_proj.bias"):  # uneven, as a constant added to every key would cancel in the softmax
            replaced = {name: tensor + torch.randn(tensor.shape, generator=generator)}
        else:
            replaced = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)}
        write_checkpoint(tmp_path / "changed", config, {**weights, **replaced})
        after = outputs(load_drafter(tmp_path / "changed", dtype=torch.float64))
        assert not same(before, after), f"{name} has no effect"


def test_draft_ids_are_offsets_from_their_own_index(tmp_path):
    # Kept ids 0, 3, 7, 9: offsets 0, 2, 5, 6; read as absolute ids they would propose 0, 2, 5, 6.
    config = changed(SPECULATORS, {"draft_vocab_size": 4})
    weights = {**random_weights(config), **vocabulary_tables([0, 3, 7, 9], 96)}
    drafter = load_drafter(write_checkpoint(tmp_path, config, weights))
    assert drafter.d2t.tolist() == [0, 2, 5, 6]
    assert drafter.draft_ids().tolist() == [0, 3, 7, 9]


@pytest.mark.parametrize("target_vocab_size", [95, 90], ids=["full-head", "padded-head"])
def test_a_full_head_under_a_larger_embedding_keeps_the_targets_ids(target_vocab_size, tmp_path):
    config = changed(SPECULATORS, {"draft_vocab_size": 95})
    weights = {name: tensor for name, tensor in random_weights(config).items() if name not in ("d2t", "t2d")}
    weights["lm_head.weight"] = torch.zeros(95, 32)
    weights["markov_head.markov_w2.weight"] = torch.zeros(95, 8)
    target = FakeTarget(target_vocab_size, num_layers=8)
    drafter = load_drafter(write_checkpoint(tmp_path, config, weights), target=target, dtype=torch.float32)
    cache, params = drafter.new_cache(64), [SamplingParams(seed=seed) for seed in range(64)]
    drafter.extend(cache, torch.zeros(64, 1, 96), [1] * 64)
    sampling, streams = SamplingTensors.stack(params, "cpu"), Streams.for_params(params, "cpu")
    draft = drafter.propose(cache, torch.arange(64), sampling, streams, num_draft_tokens=4)
    # 256 draws from a flat q: with five ids too many all would stay below 90 with probability 1e-6.
    assert target_vocab_size - 10 < draft.tokens.max() < target_vocab_size


def test_head_rows_beyond_the_target_are_padding(tmp_path):
    drafter = load_drafter(write_deepspec(tmp_path), target=FakeTarget(vocab_size=60))
    assert drafter.draft_ids() is None
    assert drafter.target_vocab_size == 60
    assert any("beyond the target's 60 tokens are cropped" in note for note in drafter.config.notes)


# --- whose embedding and head --------------------------------------------------------------------------------------

MATRICES = ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("tied", [False, True], ids=["untied-target", "tied-target"])
@pytest.mark.parametrize(
    "owned", [MATRICES, (), MATRICES[:1], MATRICES[1:]], ids=["owns-both", "owns-none", "owns-embedding", "owns-head"]
)
def test_own_matrices_are_kept_and_missing_ones_are_the_targets(owned, tied, tmp_path):
    weights = random_weights(DEEPSPEC)
    stored = {name: tensor for name, tensor in weights.items() if name not in MATRICES or name in owned}
    target = FakeTarget(tied=tied)
    embedding, head = target.input_embedding.clone(), target.output_head.clone()
    drafter = load_drafter(write_checkpoint(tmp_path, DEEPSPEC, stored), target=target)
    own_embedding, own_head = MATRICES[0] in owned, MATRICES[1] in owned
    assert (drafter.config.owns_embedding, drafter.config.owns_head) == (own_embedding, own_head)
    assert torch.equal(drafter.embedding_weight, weights[MATRICES[0]] if own_embedding else embedding)
    assert torch.equal(drafter.head_weight, weights[MATRICES[1]] if own_head else head)
    # Shared means the same storage, not a copy: for a tied target both are its embedding.
    if not own_embedding:
        assert drafter.embedding_weight.data_ptr() == target.input_embedding.data_ptr()
    if not own_head:
        assert drafter.head_weight.data_ptr() == target.output_head.data_ptr()
    assert torch.equal(target.input_embedding, embedding)
    assert torch.equal(target.output_head, head)


def test_an_own_embedding_is_never_taken_for_the_missing_head(tmp_path):
    # A tied flag in the drafter's config is a copy of the target's and means nothing for the drafter.
    config = changed(DEEPSPEC, {"tie_word_embeddings": True})
    weights = {name: tensor for name, tensor in random_weights(config).items() if name != "lm_head.weight"}
    target = FakeTarget()
    drafter = load_drafter(write_checkpoint(tmp_path, config, weights), target=target)
    assert torch.equal(drafter.head_weight, target.output_head)


def test_a_drafter_without_matrices_loads_alone_but_does_not_draft(tmp_path):
    weights = {name: tensor for name, tensor in random_weights(DEEPSPEC).items() if name not in MATRICES}
    drafter = load_drafter(write_checkpoint(tmp_path, DEEPSPEC, weights))
    with pytest.raises(ValueError, match="needs the target's"):
        outputs(drafter)
    target = FakeTarget()
    drafter.share(target.input_embedding, target.output_head, target.vocab_size)
    assert outputs(drafter)["logits"].shape[-1] == 64


# --- memory and state ----------------------------------------------------------------------------------------------


def test_weights_are_built_once(tmp_path, monkeypatch):
    """Nothing is allocated and initialised first: the module has no storage until the file's tensors become it."""
    folder = write_deepspec(tmp_path)
    built = []
    original = torch.nn.Module.load_state_dict

    def spy(module, state, **options):
        built.append(({p.device.type for p in module.parameters()}, options, dict(state)))
        return original(module, state, **options)

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", spy)
    drafter = load_drafter(folder)
    ((devices, options, state),) = built
    assert devices == {"meta"}
    assert options == {"strict": True, "assign": True}
    parameters = dict(drafter.named_parameters())
    assert all(parameters[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items())
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)


def test_a_loaded_drafter_and_its_file_do_not_change_each_other(tmp_path):
    file = write_speculators(tmp_path) / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(file).items()}
    drafter = load_drafter(tmp_path)
    with open(file, "r+b") as opened:  # in place, as a download or an export over the old file would do
        opened.write(bytes(file.stat().st_size))
    assert all(torch.equal(tensor, stored[name]) for name, tensor in drafter.state_dict().items())
    write_speculators(tmp_path)
    for parameter in load_drafter(tmp_path).parameters():
        parameter.zero_()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in load_file(file).items())


def test_a_loaded_drafter_is_ready_for_inference(tmp_path):
    drafter = load_drafter(write_deepspec(tmp_path))
    assert not drafter.training
    assert not any(parameter.requires_grad for parameter in drafter.parameters())


def test_open_choices_are_logged_as_warnings_and_stated_ones_are_not(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="dspark"):
        load_drafter(write_deepspec(tmp_path / "unstated-layout"))
        load_drafter(write_speculators(tmp_path / "declared-layout"))
    levels = {record.levelname for record in caplog.records if "unstated-layout" in record.getMessage()}
    assert levels == {"WARNING"}
    assert {record.levelname for record in caplog.records if "declared-layout" in record.getMessage()} == {"INFO"}
