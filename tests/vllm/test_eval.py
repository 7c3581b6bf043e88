"""`dspark eval` on vLLM, engine and server, gives the report of the library's own loop."""

import json

import pytest
from soak_vllm import serving

from dspark.cli import main

PROMPTS = ["hello", "two words", "a longer line of text that says nothing", "x"]


@pytest.fixture(scope="module")
def models(target, drafter):
    return ["--target", str(target), "--drafter", str(drafter())]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return ["--dataset", str(path), "--max-new-tokens", "40", "--temperature", "0", "--batch-size", "4"]


@pytest.fixture(scope="module")
def expected(models, flags, tmp_path_factory):
    """The library's own report and texts."""
    return evaluate([*models, *flags, "--num-draft-tokens", "4"], tmp_path_factory.mktemp("library"))


def evaluate(arguments, folder):
    assert main(["eval", *arguments, "--out", str(folder)]) == 0
    (row,) = json.loads((folder / "results.json").read_text())["rows"]
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return row, {record["index"]: record["token_ids"] for record in records}


def check(report, expected):
    (row, texts), (library, library_texts) = report, expected
    assert texts == library_texts
    for name in ("tokens_per_step", "tokens_per_step_macro", "num_steps", "num_committed"):
        assert row["acceptance"][name] == library["acceptance"][name]
    assert row["finish_reasons"] == library["finish_reasons"]
    assert row["settings"]["prompt_format"] == library["settings"]["prompt_format"]
    assert row["acceptance"]["calibration"] is None
    assert row["settings"]["backend"]["not_reported"] == ["accept_probs", "confidence"]


def test_engine(models, flags, expected, tmp_path, capsys):
    flags = ["--backend", "vllm", *models, *flags, "--num-draft-tokens", "4"]
    report = evaluate(flags, tmp_path)
    check(report, expected)
    assert report[0]["settings"]["num_draft_tokens"] == 4
    assert report[0]["settings"]["target"]["config_sha256"]
    assert "by vLLM" in capsys.readouterr().out


def test_engine_without_a_drafter(models, flags, expected, tmp_path):
    row, texts = evaluate(["--backend", "vllm", *models, *flags, "--plain"], tmp_path)
    assert texts == expected[1]
    assert row["label"] == "plain decoding"


@pytest.mark.parametrize("reported", [True, False], ids=["steps-reported", "steps-from-counters"])
def test_server(target, drafter, flags, expected, tmp_path, reported):
    options = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"]
    if reported:
        options += ["--per-request-spec-decode-metrics", "detailed"]
    with serving(str(target), str(drafter()), 4, options) as url:
        check(evaluate(["--endpoint", url, *flags], tmp_path), expected)


def test_what_vllm_refuses_is_one_line(models, flags, capsys):
    assert main(["eval", "--backend", "vllm", *models, *flags, "--num-draft-tokens", "99"]) == 2
    assert "num_speculative_tokens=99" in capsys.readouterr().err.splitlines()[-1]


def test_a_gguf_target_is_refused(models, flags, tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main(["eval", "--backend", "vllm", "--target", str(tmp_path), *models[2:], *flags]) == 2
    assert "needs a Hugging Face folder" in capsys.readouterr().err.splitlines()[-1]
