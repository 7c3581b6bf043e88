"""The programs that run vLLM engines side by side: how jobs end, and which laws they check when."""

import json
from pathlib import Path

from check_vllm_tp2 import check_together
from kda_laws import GateCheck
from side_by_side import Job, run_jobs

CHILD = """
import json, os, sys, time
kind = sys.argv[1]
if kind == "fails":
    sys.exit("no such head")
if kind == "hangs":
    time.sleep(60)
print(json.dumps({"kind": kind, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "plugins": os.environ["VLLM_PLUGINS"]}))
"""


def test_jobs_say_how_they_ended(tmp_path: Path):
    (tmp_path / "child.py").write_text(CHILD)
    jobs = [Job("good", ["good"]), Job("off", ["off"], plugin=False), Job("bad", ["fails"]), Job("slow", ["hangs"])]
    results = dict(run_jobs(str(tmp_path / "child.py"), jobs, gpus=2, logs=tmp_path / "logs", limit_s=6, at_once=2))
    assert results[0] == {"kind": "good", "gpu": "0", "plugins": "dspark"}
    assert results[1] == {"kind": "off", "gpu": "1", "plugins": ""}
    assert "status 1" in results[2]["error"]
    assert "no such head" in results[2]["error"]
    assert "time limit" in results[3]["error"]


def part(tokens: list[int], accepted: list[int]) -> dict:
    return {"prompts": [[1]], "tokens": [tokens], "accepted": accepted, "cached": [0], "seconds": 1.0}


def engine(replaying: int) -> dict:
    parts = {name: part([5, 6], [100, 60, 30]) for name in ("greedy", "sampled", "sampled again")}
    return {"replaying": replaying, "commits": 200, "block_size": 256, "parts": parts}


def test_laws_are_checked_as_engines_end(tmp_path: Path, capsys):
    scores = {"greedy": {"gaps": [[0.0, 0.01]]}, "sampled": {"logprobs": [[-1.0, -2.0]]}}
    check = GateCheck("low-rank", ["plain", "ours-graph", "vllm-snapshots"], tmp_path, tmp_path / "laws.jsonl")
    (tmp_path / "ours-graph.json").write_text(json.dumps(engine(6)))
    (tmp_path / "ours-graph.scores.json").write_text(json.dumps(scores))
    check.update()
    alone = len(check.laws)
    check.update()
    assert len(check.laws) == alone, "nothing is checked twice"
    (tmp_path / "vllm-snapshots.json").write_text(json.dumps(engine(0)))
    check.update()
    assert [law["law"] for law in check.laws if " accepts as " in law["law"]] == [
        f"ours-graph accepts as vllm-snapshots does, {part}" for part in ("greedy", "sampled")
    ]
    assert not any("plain decoding" in law["law"] for law in check.laws), "its text has not been read yet"
    (tmp_path / "plain.json").write_text(json.dumps(engine(0)))
    (tmp_path / "plain.scores.json").write_text(json.dumps(scores))
    check.update()
    assert all(law["holds"] for law in check.laws), capsys.readouterr().out
    check.ended("vllm-snapshots", 1, 3.0)
    assert (tmp_path / "vllm-snapshots.failed").exists()
    assert not check.laws[-1]["holds"]
    assert len((tmp_path / "laws.jsonl").read_text().splitlines()) == len(check.laws)


def test_a_greedy_text_may_differ_from_the_plain_one_by_rounding_only(capsys):
    plain = {"pair": "k3", "mode": "plain", "tp": 1, "greedy": part([5, 6], []), "gaps": {"plain": 0.0}}
    run = {"pair": "k3", "mode": "vanilla", "tp": 2, "greedy": part([5, 7], [10, 5])}
    for gap, holds in ((0.1, True), (0.5, False), (None, False)):
        assert check_together(plain | {"gaps": {"plain": 0.0, "k3-vanilla-2": gap}}, run) is holds
    assert "0 of 1 requests are equal" in capsys.readouterr().out
