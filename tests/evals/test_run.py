"""Evaluation runs: what they write, how they continue, and what they refuse."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pairs import counting_pair, drafter_config, tiny_drafter
from step_records import coin_steps
from tiny_target import tiny_model, tiny_tokenizer

from dspark.evals import EvalSettings, evaluate, format_table
from dspark.evals import backends as backends_module
from dspark.evals import settings as settings_module
from dspark.evals.datasets import load_dataset
from dspark.evals.records import RecordStore
from dspark.evals.settings import request_seed, weights_sha256
from dspark.records import Generation
from dspark.target import HFTarget


@pytest.fixture(autouse=True)
def fixed_commit(monkeypatch):
    """A change of this checkout while a test runs would be a real change of settings."""
    monkeypatch.setattr(settings_module, "source_commit", lambda: "0" * 40)
    monkeypatch.setattr(settings_module, "source_digest", lambda: "0" * 64)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(f'{{"prompt": "question {i}", "domain": "math"}}\n' for i in range(6)), encoding="utf-8")
    return path


class FakeGenerate:
    """Stands in for `generate`: its steps depend on the request's seed alone, and it dies after `die_after`
    requests."""

    def __init__(self, die_after=None):
        self.die_after, self.calls = die_after, []

    def __call__(self, target, drafter, prompts, params, *, on_finish, **options):
        self.calls.append({"prompts": prompts, "params": params, **options})
        generations = []
        for index, (prompt_ids, request) in enumerate(zip(prompts, params, strict=True)):
            if self.die_after is not None and index == self.die_after:
                raise KeyboardInterrupt
            steps = coin_steps(np.random.default_rng(request.seed), 10, 3)
            num_tokens = 1 + sum(step.num_committed for step in steps)
            generations.append(Generation(prompt_ids, list(range(num_tokens)), steps, "length"))
            on_finish(index, generations[-1])
        return generations


@pytest.fixture
def fake(monkeypatch):
    def install(**options):
        generate = FakeGenerate(**options)
        monkeypatch.setattr(backends_module, "generate", generate)
        return generate

    return install


@pytest.fixture
def target():
    return HFTarget(tiny_model().double(), tiny_tokenizer())


@pytest.fixture
def drafter(target):
    changes = {"hidden_size": 32, "mask_token_id": 258, "tap_ids": (1, 2), "max_position_embeddings": 512}
    return tiny_drafter(drafter_config(target.vocab_size, **changes), target)


def settings_for(prompts, **changes):
    return EvalSettings(**{"datasets": (str(prompts),), "temperatures": (0.0, 0.7), "max_new_tokens": 24, **changes})


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_requests_get_their_own_seeds_and_the_settings(target, drafter, prompts, fake):
    generate = fake()
    sampling, drafting = {"top_k": 5, "ignore_eos": True}, {"drafting": "greedy", "draft_truncation": False}
    settings = settings_for(prompts, **sampling, **drafting, num_draft_tokens=2, batch_size=3)
    evaluate(target, drafter, settings, progress=False)
    assert len(generate.calls) == 2
    call = generate.calls[1]
    assert [p.seed for p in call["params"]] == [request_seed(0, "small", i) for i in range(6)]
    assert len({p.seed for p in call["params"]}) == 6
    assert {(p.temperature, p.top_k, p.max_new_tokens, p.ignore_eos) for p in call["params"]} == {(0.7, 5, 24, True)}
    assert drafting.items() <= call.items()
    assert (call["num_draft_tokens"], call["max_batch_size"]) == (2, 3)


def test_request_seeds_depend_on_all_three_and_fit_int64():
    seeds = {request_seed(s, d, i) for s in (0, 1) for d in ("a", "b") for i in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("finished", [0, 1, 4])
def test_an_interrupted_run_continues_to_the_same_rows(target, drafter, prompts, tmp_path, fake, finished, caplog):
    settings = settings_for(prompts)
    fake()
    whole = evaluate(target, drafter, settings, tmp_path / "whole", progress=False)
    fake(die_after=finished)
    with pytest.raises(KeyboardInterrupt):
        evaluate(target, drafter, settings, tmp_path / "cut", progress=False)
    assert not (tmp_path / "cut" / "results.json").exists()
    generate = fake()
    with caplog.at_level("INFO"):
        continued = evaluate(target, drafter, settings, tmp_path / "cut", progress=False)
    said = f"{finished} of 12 requests are already there in {tmp_path / 'cut'}: the run continues"
    assert caplog.messages == ([said] if finished else [])
    assert [len(call["prompts"]) for call in generate.calls] == [6 - finished, 6]
    assert continued == whole
    assert results(tmp_path / "cut")["rows"] == results(tmp_path / "whole")["rows"]


def test_a_finished_run_is_read_and_not_run_again(target, drafter, prompts, tmp_path, fake, caplog):
    fake()
    first = evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)
    generate = fake()
    with caplog.at_level("INFO"):
        assert evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False) == first
    assert generate.calls == []
    (said,) = caplog.messages
    assert said.endswith(": the run was complete, and nothing is run again")


def test_a_torn_last_line_is_dropped_and_its_request_runs_again(target, drafter, prompts, tmp_path, fake, caplog):
    fake()
    whole = evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)
    records = tmp_path / "out" / "records.jsonl"
    data = records.read_bytes()
    records.write_bytes(data[:-40])
    generate = fake()
    with caplog.at_level("INFO"):
        assert evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False) == whole
    assert caplog.messages[0].startswith(f"{records}: its last line was torn")
    assert [len(call["prompts"]) for call in generate.calls] == [1]
    assert records.read_bytes() == data


def test_other_settings_are_refused_with_both_values(target, drafter, prompts, tmp_path, fake):
    fake()
    evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)
    before = (tmp_path / "out" / "records.jsonl").read_bytes()
    with pytest.raises(ValueError, match="mixing the two") as error:
        evaluate(target, drafter, settings_for(prompts, top_p=0.9, seed=3), tmp_path / "out", progress=False)
    assert "settings.top_p: stored 1.0, now 0.9" in str(error.value)
    assert "settings.seed: stored 0, now 3" in str(error.value)
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == before


def test_another_drafter_and_another_file_are_other_settings(target, drafter, prompts, tmp_path, fake):
    fake()
    evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match=r"drafter: stored .*, now null"):
        evaluate(target, None, settings_for(prompts), tmp_path / "out", progress=False)
    with torch.no_grad():
        drafter.fc.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"drafter\.weights_sha256: stored"):
        evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)
    with prompts.open("a") as file:
        file.write('{"prompt": "one more"}\n')
    with pytest.raises(ValueError, match="datasets: stored"):
        evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)


def test_another_tokenizer_is_seen_by_what_it_does(target, drafter, prompts, tmp_path, fake):
    fake()
    settings = settings_for(prompts, prompt_mode="raw")
    evaluate(target, drafter, settings, tmp_path / "out", progress=False)
    target.tokenizer.add_tokens(["question"])
    with pytest.raises(ValueError, match="the tokenizer has changed"):
        evaluate(target, drafter, settings, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda lines: [lines[0], "{}", *lines[2:]], r"records\.jsonl:2: not a record", id="other-fields"),
        pytest.param(lambda lines: ["half", *lines[1:]], r"records\.jsonl:1: not a record", id="torn-in-the-middle"),
        pytest.param(lambda lines: [*lines, lines[3]], r"records\.jsonl:13: a second record of request", id="twice"),
    ],
)
def test_damaged_records_are_named(target, drafter, prompts, tmp_path, fake, edit, message):
    fake()
    evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)
    records = tmp_path / "out" / "records.jsonl"
    records.write_text("\n".join(edit(records.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match=message):
        evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)


def test_records_without_settings_are_refused(target, drafter, prompts, tmp_path, fake):
    fake()
    evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)
    (tmp_path / "out" / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"records\.jsonl but no settings\.json"):
        evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)


def test_two_files_of_one_name_are_refused(target, prompts, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "small.jsonl").write_bytes(prompts.read_bytes())
    settings = EvalSettings(datasets=(str(prompts), str(other / "small.jsonl")))
    with pytest.raises(ValueError, match="two data sets have the same name"):
        evaluate(target, None, settings, progress=False)


def test_every_row_carries_the_settings_that_its_figures_hold_for(target, drafter, prompts, tmp_path, fake):
    fake()
    evaluate(target, drafter, settings_for(prompts), tmp_path / "out", progress=False)
    for row, temperature in zip(results(tmp_path / "out")["rows"], (0.0, 0.7), strict=True):
        settings = row["settings"]
        assert settings["dataset"] == {"name": "small", "sha256": load_dataset(prompts).sha256, "num_prompts": 6}
        assert settings["temperature"] == row["temperature"] == temperature
        assert settings["num_draft_tokens"] == 4  # resolved, not null
        assert settings["prompt_format"]["mode"] == "chat"
        assert settings["drafter"]["layout"] == "anchor-first"
        assert settings["drafter"]["weights_sha256"] == weights_sha256(drafter)
        assert settings["target"]["dtype"] == "float64"
        fields = {"top_k", "top_p", "min_p", "drafting", "draft_truncation", "verification", "seed", "versions"}
        assert fields | {"commit", "code"} <= settings.keys()
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text()


def test_weights_digest_sees_names_values_and_dtypes():
    layer = torch.nn.Linear(3, 2)
    digests = {weights_sha256(layer), weights_sha256(layer.bfloat16()), weights_sha256(torch.nn.Sequential(layer))}
    with torch.no_grad():
        layer.bias[1] += 1
    assert len(digests | {weights_sha256(layer)}) == 4


def test_tables_show_every_row_and_its_settings(target, drafter, prompts, fake):
    fake()
    rows = evaluate(target, drafter, settings_for(prompts), progress=False)
    text = format_table(rows)
    header, *body = text.splitlines()[:3]
    for column, row_cells in (("temperature", ("0", "0.7")), ("requests", ("6", "6")), ("steps", ("60", "60"))):
        start = header.index(column)
        assert tuple(line[start:].split()[0] for line in body) == row_cells
        assert all(line[start - 1] == " " for line in body)
    assert "K=4, block 4 anchor-first, probabilistic drafting, standard rejection sampling" in text


def test_progress_goes_to_stderr(target, drafter, prompts, fake, capsys):
    fake()
    evaluate(target, drafter, settings_for(prompts), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "small T=0.7" in captured.err


def test_real_models_end_to_end(target, drafter, prompts, tmp_path):
    """Random weights in float64: every figure is consistent with the tokens, and plain decoding gives the same greedy
    texts."""
    settings = settings_for(prompts, limit=4, batch_size=3, ignore_eos=True)
    drafted = evaluate(target, drafter, settings, tmp_path / "drafted", progress=False)
    plain = evaluate(target, None, settings, tmp_path / "plain", progress=False)
    for row in drafted:
        figures = row.acceptance
        assert row.label == "measured"
        assert figures.num_committed == row.num_tokens - figures.num_requests == 4 * 23
        assert row.finish_reasons == {"length": 4}
        assert figures.calibration.num_positions == figures.num_offered > 0
        assert row.timing.tokens_per_s > 0
    for row in plain:
        assert row.label == "plain decoding"
        assert row.acceptance.tokens_per_step.value == 1.0
        assert row.settings["num_draft_tokens"] == 0
    assert greedy_tokens(tmp_path / "drafted") == greedy_tokens(tmp_path / "plain")
    assert "plain decoding" in format_table(plain)


def greedy_tokens(folder):
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return {record["index"]: record["token_ids"] for record in records if record["temperature"] == 0.0}


def test_a_pair_that_agrees_always_accepts_everything(prompts):
    """Target and drafter both count upwards: every step commits K + 1 tokens, but for what the length limit leaves."""
    target, drafter = counting_pair(vocab_size=32)
    target.tokenizer = CountingTokenizer()
    settings = settings_for(prompts, temperatures=(0.0,), max_new_tokens=21, ignore_eos=True)
    (row,) = evaluate(target, drafter, settings, progress=False)
    assert row.acceptance.acceptance_rate.value == 1.0
    assert row.acceptance.tokens_per_step.value == 5.0  # 20 tokens after the first in 4 steps of 4 + 1
    assert [rates.expected.value for rates in row.acceptance.positions] == pytest.approx([1.0] * 4)


class CountingTokenizer:
    """Encodes a text as its length, over a vocabulary of numbers; no chat template."""

    chat_template = None
    eos_token_id = None

    def __call__(self, text):
        return SimpleNamespace(input_ids=[len(text)]).__dict__


def test_a_run_of_other_code_is_told_how_it_continues(tmp_path):
    RecordStore(tmp_path, {"commit": "a", "code": "1", "seed": 0})
    with pytest.raises(ValueError, match=r'code: stored "1", now "2"\..*, with commit a checked out, or choose'):
        RecordStore(tmp_path, {"commit": "b", "code": "2", "seed": 0})
    with pytest.raises(ValueError, match=r"seed: stored 0, now 1\. Continue with the stored values, or choose"):
        RecordStore(tmp_path, {"commit": "a", "code": "1", "seed": 1})
    RecordStore(tmp_path, {"commit": "b", "code": "1", "seed": 0})  # only the commit moved on


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "settings.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"settings\.json is damaged: no JSON"):
        RecordStore(tmp_path, {"seed": 0})
    (tmp_path / "settings.json").write_text('{"seed": 0}')
    (tmp_path / "records.jsonl").write_text('{"steps": [1]}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl:1: not a record of this version"):
        RecordStore(tmp_path, {"seed": 0})
