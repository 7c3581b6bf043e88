"""The store of target states: what is in it, how it continues and grows, and what it refuses."""

import json

import pytest
import torch
from tiny_target import tiny_model, tiny_tokenizer

from dspark.evals import EvalSettings
from dspark.evals import target_states as states_module
from dspark.evals.datasets import load_dataset, resolve_prompt_format
from dspark.evals.settings import request_seed, weights_sha256
from dspark.evals.target_states import (
    DIGEST_SAMPLES,
    HIDDEN,
    StateStore,
    TargetPath,
    TextSet,
    compute_states,
    continue_prompts,
    describe_states,
    states_key,
    tap_layers,
    target_logits,
)
from dspark.loop import generate
from dspark.sampling import SamplingParams
from dspark.target import HFTarget


@pytest.fixture
def target():
    return HFTarget(tiny_model().double(), tiny_tokenizer())


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(f'{{"prompt": "ask {"x" * i}"}}\n' for i in range(5)), encoding="utf-8")
    return load_dataset(path)


SETTINGS = EvalSettings(max_new_tokens=9, seed=3, batch_size=4)


def open_store(target, dataset, folder, settings=SETTINGS, temperature=1.0):
    prompt_format = resolve_prompt_format(target)
    store = StateStore(folder, describe_states(target, settings, dataset, prompt_format, temperature))
    texts = TextSet(dataset, temperature, store)
    continue_prompts(target, [texts], settings, prompt_format, progress=False)
    return store, texts.paths


def test_the_continuation_is_the_targets_own(target, dataset, tmp_path):
    _, paths = open_store(target, dataset, tmp_path / "s")
    params = [SamplingParams(temperature=1.0, max_new_tokens=9, seed=s) for s in seeds(dataset)]
    plain = generate(target, None, [path.prompt_ids for path in paths], params)
    assert [list(path.token_ids) for path in paths] == [generation.token_ids for generation in plain]


def seeds(dataset):
    return [request_seed(3, dataset.name, prompt.index) for prompt in dataset.prompts]


def test_states_are_those_of_a_pass_over_the_text(target, dataset, tmp_path):
    store, paths = open_store(target, dataset, tmp_path / "s")
    compute_states(target, store, paths, [2, 0], progress=False)
    for path in paths:
        ((hidden, first, second),) = store.load([path.index], [HIDDEN, *tap_layers([2, 0])])
        text = torch.tensor([[*path.prompt_ids, *path.token_ids]])
        output = target.model(text, output_hidden_states=True)
        start, end = len(path.prompt_ids), text.shape[1]
        expected = output.logits[0, start : end - 1]
        torch.testing.assert_close(target_logits(target, hidden), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(second, output.hidden_states[0][0, : end - 2], rtol=0, atol=1e-12)
        assert first.shape == second.shape
        assert not torch.equal(first, second)
        assert hidden.dtype == torch.float64


def test_an_interrupted_run_continues_to_the_same_bytes(target, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(states_module, "REQUESTS_PER_SHARD", 2)
    store, paths = open_store(target, dataset, tmp_path / "whole")
    compute_states(target, store, paths, [1], progress=False)
    cut, paths = open_store(target, dataset, tmp_path / "cut")
    add, shards = cut.add, []

    def die_at_the_second(tensors):
        if shards:
            raise KeyboardInterrupt
        shards.append(tensors)
        add(tensors)

    monkeypatch.setattr(cut, "add", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        compute_states(target, cut, paths, [1], progress=False)
    continued, paths = open_store(target, dataset, tmp_path / "cut")
    compute_states(target, continued, paths, [1], progress=False)
    layers = [HIDDEN, "tap.1"]
    for path in paths:
        for first, second in zip(*(s.load([path.index], layers)[0] for s in (store, continued)), strict=True):
            assert torch.equal(first, second)


def test_what_is_there_is_not_computed_again(target, dataset, tmp_path, monkeypatch):
    store, paths = open_store(target, dataset, tmp_path / "s")
    compute_states(target, store, paths, [1], progress=False)
    monkeypatch.setattr(target, "prefill", None)
    again, paths = open_store(target, dataset, tmp_path / "s")
    compute_states(target, again, paths, [1], progress=False)
    assert again.load([0], ["tap.1"])[0][0].shape[0] == len(paths[0].prompt_ids) + paths[0].num_anchors - 1


def test_other_taps_and_more_prompts_are_added(target, dataset, tmp_path):
    first = load_dataset(tmp_path / "small.jsonl", limit=2)
    store, paths = open_store(target, first, tmp_path / "s")
    compute_states(target, store, paths, [1], progress=False)
    before = store.load([0], [HIDDEN])[0][0]
    store, paths = open_store(target, dataset, tmp_path / "s")
    compute_states(target, store, paths, [1, 2], progress=False)
    assert [store.missing_layers(path.index, [HIDDEN, "tap.1", "tap.2"]) for path in paths] == [[]] * 5
    assert torch.equal(store.load([0], [HIDDEN])[0][0], before)
    keys = [key for shard in sorted((tmp_path / "s").glob("*.safetensors")) for key in shard_keys(shard)]
    assert len(keys) == len(set(keys)) == 15


def shard_keys(path):
    with states_module._open_shard(path) as file:
        return list(file.keys())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 4}, "sampling.seed: stored 3, now 4"),
        ({"max_new_tokens": 8}, "sampling.max_new_tokens: stored 9, now 8"),
        ({"top_k": 5}, "sampling.top_k: stored 0, now 5"),
    ],
)
def test_other_settings_are_refused_by_name(target, dataset, tmp_path, changes, field):
    open_store(target, dataset, tmp_path / "s")
    changed = EvalSettings(**{"max_new_tokens": 9, "seed": 3, **changes})
    with pytest.raises(ValueError, match=field.replace(".", r"\.")):
        open_store(target, dataset, tmp_path / "s", changed)


def test_another_target_temperature_or_data_set_is_refused_by_name(target, dataset, tmp_path):
    open_store(target, dataset, tmp_path / "s")
    other = HFTarget(tiny_model(seed=1).double(), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"target\.weights_sha256: stored"):
        open_store(other, dataset, tmp_path / "s")
    with pytest.raises(ValueError, match=r"target\.dtype: stored \"float64\", now \"float32\""):
        open_store(HFTarget(tiny_model(), tiny_tokenizer()), dataset, tmp_path / "s")
    with pytest.raises(ValueError, match=r"sampling\.temperature: stored 1\.0, now 0\.5"):
        open_store(target, dataset, tmp_path / "s", temperature=0.5)
    (tmp_path / "small.jsonl").write_text('{"prompt": "something else"}\n')
    with pytest.raises(ValueError, match=r"dataset\.sha256: stored"):
        open_store(target, load_dataset(tmp_path / "small.jsonl"), tmp_path / "s")


def test_a_changed_tokenizer_is_noticed(target, dataset, tmp_path):
    open_store(target, dataset, tmp_path / "s")
    record = json.loads((tmp_path / "s" / "records.jsonl").read_text().splitlines()[0])
    record["prompt_sha256"] = "0" * 64
    (tmp_path / "s" / "records.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="the tokenizer has changed"):
        open_store(target, dataset, tmp_path / "s")


def test_a_damaged_shard_is_named(target, dataset, tmp_path):
    store, paths = open_store(target, dataset, tmp_path / "s")
    compute_states(target, store, paths, [1], progress=False)
    (shard,) = (tmp_path / "s").glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors cannot be read .* Delete it"):
        open_store(target, dataset, tmp_path / "s")


def test_a_path_of_one_token_has_no_states(target, dataset, tmp_path):
    store = StateStore(tmp_path / "s", {})
    compute_states(target, store, [TargetPath(0, (3, 4), (5,), 9)], [1], progress=False)
    assert not list((tmp_path / "s").glob("*.safetensors"))


def test_logits_that_the_head_does_not_explain_are_refused(target, dataset, tmp_path):
    store, paths = open_store(target, dataset, tmp_path / "s")
    target.model.register_forward_hook(lambda module, args, output: scale_logits(output))
    with pytest.raises(ValueError, match="the model changes them in a way that is not known here"):
        compute_states(target, store, paths, [1], progress=False)


def scale_logits(output):
    output.logits = 0.5 * output.logits
    return output


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("logits_scaling", 8.0, lambda logits: logits / 8),
        ("logit_scale", 0.25, lambda logits: logits * 0.25),
        ("final_logit_softcapping", 2.0, lambda logits: torch.tanh(logits / 2) * 2),
    ],
)
def test_known_changes_of_logits_are_applied(target, dataset, tmp_path, name, value, change):
    def hook(module, args, output):
        output.logits = change(output.logits)
        return output

    setattr(target.config, name, value)
    target.model.register_forward_hook(hook)
    store, paths = open_store(target, dataset, tmp_path / "s")
    compute_states(target, store, paths, [1], progress=False)
    assert not store.missing_layers(0, [HIDDEN, "tap.1"])


def test_the_digest_of_weights_sees_a_change_anywhere_it_samples(target):
    before = weights_sha256(target.model, DIGEST_SAMPLES)
    assert weights_sha256(HFTarget(tiny_model().double()).model, DIGEST_SAMPLES) == before
    with torch.no_grad():
        target.layers[1].mlp.up_proj.weight[0, 0] += 1e-9
    assert weights_sha256(target.model, DIGEST_SAMPLES) != before


def test_keys_stand_for_all_settings(target, dataset):
    prompt_format = resolve_prompt_format(target)
    keys = {
        states_key(describe_states(target, settings, dataset, prompt_format, temperature))
        for settings in (SETTINGS, EvalSettings(max_new_tokens=9), EvalSettings(max_new_tokens=9, top_p=0.5))
        for temperature in (0.0, 1.0)
    }
    assert len(keys) == 6
    assert all(len(key) == 16 for key in keys)
