"""Finished runs for tests: records of coin flips, and the folders that an evaluation would have written."""

import json
from dataclasses import asdict

import numpy as np
from step_records import coin_steps

from dspark.evals.compare import Run
from dspark.evals.records import RequestRecord

DRAFTER = {
    "family": "deepspec_qwen3",
    "block_size": 3,
    "layout": "anchor-first",
    "markov_kind": "vanilla",
    "confidence": "hidden+markov",
    "draft_vocab_size": 16,
    "weights_sha256": "d" * 64,
    "confidence_scaling": None,
    "dtype": "float32",
}


def description(datasets=("math",), temperatures=(0.0, 1.0), num_prompts=8, drafter=(), **settings) -> dict:
    """What `describe_run` gives; keyword arguments replace settings, `drafter` fields of the drafter."""
    options = {
        "limit": None,
        "temperatures": list(temperatures),
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "num_draft_tokens": 3,
        "drafting": "probabilistic",
        "draft_truncation": True,
        "max_new_tokens": 64,
        "ignore_eos": False,
        "seed": 0,
        "batch_size": 8,
        "prompt_mode": "auto",
        "thinking": None,
        "target_name": "a target",
        "drafter_name": "a drafter",
    }
    return {
        "datasets": [{"name": name, "sha256": "a" * 64, "num_prompts": num_prompts} for name in datasets],
        "turns": "first",
        "prompt_format": {"mode": "chat", "template_sha256": "c" * 64, "thinking": None},
        "settings": {**options, **settings},
        "backend": {"name": "dspark", "not_reported": []},
        "verification": "standard rejection sampling",
        "target": {"model_type": "llama", "config_sha256": "b" * 64, "dtype": "float32", "device": "cpu"},
        "drafter": None if drafter is None else {**DRAFTER, **dict(drafter)},
        "versions": {"dspark": "0.1.0", "torch": "2.13.0"},
        "commit": "0" * 40,
    }


def record(dataset, temperature, index, steps, domain=None) -> RequestRecord:
    """One finished request."""
    num_tokens = 1 + sum(step.num_committed for step in steps)
    tokens = tuple(range(num_tokens))
    return RequestRecord(
        dataset, temperature, index, domain, index, f"{index:064x}", 5, num_tokens, "length", tokens, tuple(steps)
    )


def coin_run(name="run", coins=0, num_steps=40, report=lambda c: c, domains=None, **settings) -> Run:
    """A run of coin flips; request i of every cell has its own flips, set by `coins`."""
    described = description(**settings)
    num_drafts = described["settings"]["num_draft_tokens"]
    cells = {}
    for number, dataset in enumerate(described["datasets"]):
        for temperature in described["settings"]["temperatures"]:
            cells[(dataset["name"], temperature)] = [
                record(
                    dataset["name"],
                    temperature,
                    i,
                    coin_steps(
                        np.random.default_rng((coins, number, int(10 * temperature), i)), num_steps, num_drafts, report
                    ),
                    domains[i % len(domains)] if domains else None,
                )
                for i in range(dataset["num_prompts"])
            ]
    return Run(name, described, cells)


def write_run(folder, run: Run):
    """The folder of a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(run.description))
    records = (record for records in run.cells.values() for record in records)
    (folder / "records.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in records))
    return folder
