"""Prompts to fit a calibration on: distinct, the same for the same seed, and readable by the evaluation."""

import pytest
from write_prompts import distinct_requests, main

from dspark.evals import load_dataset


def test_what_is_written_is_a_prompt_set(tmp_path, capsys):
    path = tmp_path / "fit.jsonl"
    assert main(["--out", str(path), "--count", "60"]) == 0
    prompts = [prompt.text for prompt in load_dataset(path).prompts]
    assert len(set(prompts)) == len(prompts) == 60
    assert capsys.readouterr().out == f"{path}: 60 prompts\n"


def test_a_seed_repeats_and_a_longer_set_begins_with_the_shorter():
    assert distinct_requests(50, seed=1)[:20] == distinct_requests(20, seed=1)
    assert distinct_requests(20, seed=1) != distinct_requests(20, seed=2)


def test_templates_that_are_exhausted_are_said(monkeypatch):
    monkeypatch.setattr("write_prompts.request", lambda rng: f"prompt {rng.randrange(3)}")
    assert sorted(distinct_requests(3, seed=0)) == ["prompt 0", "prompt 1", "prompt 2"]
    with pytest.raises(ValueError, match="--count 4: the templates gave only 3"):
        distinct_requests(4, seed=0)
