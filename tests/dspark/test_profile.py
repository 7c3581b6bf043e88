"""`dspark profile` on a tiny pair: every kind of step is timed as often as was asked for, and the table schedules."""

import json
from dataclasses import replace

import pytest
from pairs import drafter_config, tiny_drafter, tiny_target
from tiny_target import write_counting_pair

from dspark import SamplingParams, generate
from dspark.cli import main
from dspark.cost import CostTable
from dspark.default import default_drafter_path
from dspark.drafter import Drafter
from dspark.profile import PLAIN, Kind, ProfileSettings, SweepOver, _Sweep, profile, step_kinds, time_steps
from dspark.schedule import ThroughputSchedule


@pytest.fixture
def pair():
    target = tiny_target()
    return target, tiny_drafter(drafter_config(), target)


def test_every_kind_of_step_is_timed(pair):
    seconds = time_steps(*pair, 2, 3, ProfileSettings(context=5, repeats=3))
    choosing, settled = [Kind(3, True, k) for k in range(4)], [Kind(k, False, k) for k in (1, 2, 3)]
    assert {kind: len(times) for kind, times in seconds.items()} == dict.fromkeys([PLAIN, *choosing, *settled], 3)
    assert all(time > 0 for times in seconds.values() for time in times)


@pytest.mark.parametrize(("longest", "settled"), [(1, [1]), (4, [1, 2, 4]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8])])
def test_settled_steps_are_timed_at_powers_of_two_and_the_longest(longest, settled):
    kinds = step_kinds(longest)
    assert [kind.verified for kind in kinds if kind.num_drafts and not kind.choose] == settled
    assert [kind.verified for kind in kinds if kind.choose] == list(range(longest + 1))


def test_a_sweep_verifies_what_it_says(pair):
    target, drafter = pair
    order = [Kind(4, True, 4), PLAIN, Kind(4, True, 0), Kind(2, False, 2), Kind(4, True, 1), Kind(1, False, 1)]
    sweep, rows = _Sweep(order, target.device), []
    verify = target.verify
    target.verify = lambda cache, tokens: rows.append(tokens.shape[1]) or verify(cache, tokens)
    params = SamplingParams(temperature=0, max_new_tokens=30)
    with pytest.raises(SweepOver):
        generate(target, drafter, [[1, 2], [3]], params, schedule=sweep)
    assert [kind for kind, _ in sweep.durations()] == order
    assert rows == [5, 1, 1, 3, 2, 2]


def test_the_table_has_quartiles_and_settings_and_is_used(pair):
    target, drafter = pair
    lines = []
    table = profile(target, drafter, ProfileSettings(batch_sizes=(2, 1), context=5, repeats=3), lines.append)
    assert table.num_requests == (1, 2)
    assert len(table.points) == 2 * (1 + 5 + 3)
    assert all(point.low <= point.seconds <= point.high and point.repeats == 3 for point in table.points)
    assert table.settings["context"] == 5
    assert len(lines) == 2
    plain = generate(target, None, [[1, 2, 3]], SamplingParams(temperature=0, max_new_tokens=20))
    scheduled = generate(
        target,
        drafter,
        [[1, 2, 3]],
        SamplingParams(temperature=0, max_new_tokens=20),
        schedule=ThroughputSchedule(table),
    )
    assert scheduled[0].token_ids == plain[0].token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": ()}, "expected different numbers"),
        ({"batch_sizes": (2, 2)}, "expected different numbers"),
        ({"batch_sizes": (0,)}, "expected different numbers"),
        ({"repeats": 2}, "repeats=2 must be at least 3"),
        ({"context": 0}, "context=0 must be at least 1"),
    ],
)
def test_settings_that_time_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ProfileSettings(**changes)


def test_a_context_without_room_is_refused(pair):
    with pytest.raises(ValueError, match="leaves no room for 11 steps of 5 tokens within 252"):
        profile(*pair, ProfileSettings(context=240))


def test_what_cannot_be_timed_is_told_before_it_is_timed(pair):
    with pytest.raises(ValueError, match=r"num_draft_tokens=99 is outside 1\.\.4"):
        profile(*pair, ProfileSettings(num_draft_tokens=99))
    target, drafter = pair
    headless = Drafter(replace(drafter.config, confidence="none"))
    with pytest.raises(ValueError, match="no confidence head"):
        profile(target, headless, ProfileSettings())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "--out", "nowhere/cost.json"], "there is no folder nowhere"),
        (["profile", "a", "b", "c", "--out", "cost.json"], "3 models were named: expected [TARGET] DRAFTER"),
        (["profile", "nowhere", "--out", "cost.json"], "drafter nowhere: no such folder"),
        (["doctor", "nowhere"], "drafter nowhere: no such folder"),
        (["inspect", "nowhere"], "drafter nowhere: no such folder"),
        (["eval", "--out", "file"], "--out file is a file; expected a folder"),
        (["quality", "--out", "file"], "--out file is a file; expected a folder"),
        (["quality", "--states", "file"], "--states file is a file; expected a folder"),
        (["convert", "nowhere", "there", "--to", "deepspec"], "drafter nowhere: no such folder"),
    ],
)
def test_a_wrong_path_is_one_line_and_status_2(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert message in line


def test_the_embedded_drafter_has_a_word(capsys):
    assert main(["inspect", "embedded", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(default_drafter_path())


def test_the_command_writes_a_table_that_generate_and_eval_take(tmp_path, capsys):
    target, drafter = map(str, write_counting_pair(tmp_path))
    out = tmp_path / "cost.json"
    options = ["--out", str(out), "--batch-size", "1", "2", "--context", "4", "--repeats", "3", "--json"]
    assert main(["profile", target, drafter, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["command"] == "profile"
    assert report["settings"]["dtype"] == "float32"
    assert CostTable.load(out).num_requests == (1, 2)

    pair = ["--target", target, "--drafter", drafter, "--json", "--max-new-tokens", "12"]
    for schedule, named in ((str(out), "cost.json (sha256 "), ("threshold:0.1", "threshold:0.1")):
        assert main(["generate", "--prompt", "ab", "--no-chat", "--schedule", schedule, *pair]) == 0
        assert json.loads(capsys.readouterr().out)["schedule"].startswith(named)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n{"prompt": "xyz"}\n')
    run = ["eval", "--dataset", str(prompts), "--temperature", "0", "--out", str(tmp_path / "run"), *pair]
    assert main([*run, "--schedule", "threshold:0.9"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["settings"]["schedule"] == "threshold:0.9"
    assert main(run) == 2  # the same folder, without the schedule
    assert "schedule" in capsys.readouterr().err
    assert main(["generate", "--prompt", "ab", "--no-chat", "--schedule", "threshold:7", *pair]) == 2
    assert "no probability" in capsys.readouterr().err
