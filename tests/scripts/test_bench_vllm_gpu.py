"""The GPU benchmark's matrix, its resumption and its tables, with engines that answer at once."""

import pytest
from bench_vllm_gpu import EngineEnded, Group, graph_sizes, measure, parse_args
from vllm_tables import gains, table

PAIR = ["--target", "target", "--drafter", "drafter"]


RATES = {"plain": 100.0, "ours": 300.0, "ours@2": 200.0, "ours-adaptive": 330.0, "stock": 250.0}
ENDS_AFTER = {"stock": 2}
STARTED = []


class Engine:
    """Answers with a rate of its mode's; may be gone at the start, or after some runs."""

    def __init__(self, mode, args):
        self.mode, self.runs = mode, 0
        STARTED.append(mode)

    def wait_until_ready(self):
        if self.mode == "ours-topk":
            raise EngineEnded("no memory")

    def run(self, job):
        self.runs += 1
        if self.runs > ENDS_AFTER.get(self.mode, 1000):
            raise EngineEnded("gone")
        drafted = self.mode != "plain"
        tokens = [[1, 2, 3, 4 + (drafted and request == 1)] for request in range(4)]
        seconds = 16 / RATES[self.mode]
        return {"seconds": seconds, "steps": 8 * drafted, "accepted": 8 * drafted, "tokens": tokens}

    def close(self):
        pass


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.setattr("bench_vllm_gpu.Engine", Engine)
    STARTED.clear()
    groups = ["--group", "plain,stock,ours,ours-topk/0/2/2", "--group", "ours,ours@2,ours-adaptive/1/1,8/2"]
    return parse_args([*PAIR, *groups, "--out", str(tmp_path / "runs.jsonl")])


def test_an_engine_that_ends_costs_only_its_own_runs(args, capsys):
    runs, complete = measure(args)
    assert not complete
    assert STARTED == ["plain", "stock", "ours", "ours-topk", "ours@2", "ours-adaptive"]
    assert [run["mode"] for run in runs].count("stock") == 2
    said = capsys.readouterr().err
    assert "no memory" in said
    assert "gone" in said
    text = table(runs).splitlines()
    assert text[2] == "| 0 | 2 | plain | 100 (100 to 100) | 1.00 | 1.00 | 20.00 |  |"
    assert text[4] == "| 0 | 2 | ours | 300 (300 to 300) | 3.00 | 2.00 | 13.33 | 3 of 4, first differences at [3] |"
    assert gains(runs).splitlines() == [
        f"T=1, concurrency {load}: ours-adaptive over the best fixed (ours) 1.100 (1.100 to 1.100)" for load in (1, 8)
    ]


def test_what_is_in_the_file_is_not_run_again(args):
    first, _ = measure(args)
    STARTED.clear()
    again, _ = measure(args)
    assert set(STARTED) == {"stock", "ours-topk"}
    assert [run["mode"] for run in again] == [run["mode"] for run in first] + ["stock"]


def test_time_is_up(args):
    args.seconds = -1.0
    assert measure(args) == ([], False)


def test_a_matrix_without_groups_is_one():
    args = parse_args([*PAIR, "--modes", "plain,ours@4", "--concurrency", "1,16", "--temperature", "0"])
    assert args.groups == [Group(("plain", "ours@4"), (0.0,), (1, 16), 3)]
    assert args.most_requests == 16
    assert [(mode, job["repeat"]) for mode, job in args.groups[0].jobs()][:4] == [
        *(("plain", 0), ("ours@4", 0)),
        *(("plain", 1), ("ours@4", 1)),
    ]


@pytest.mark.parametrize("group", ["our/0/1/1", "plain/0/1", "plain/hot/1/1", "ours@0/0/1/1"])
def test_mistakes_in_a_group(group, capsys):
    with pytest.raises(SystemExit):
        parse_args([*PAIR, "--group", group])
    assert "--modes or --group: " in capsys.readouterr().err


def test_sizes_of_graphs_are_vllms_and_the_plug_ins():
    pytest.importorskip("vllm")
    sizes = graph_sizes(9, 64)
    assert sizes[:6] == [1, 2, 4, 8, 9, 16]
    assert {18, 360, 504, 512} < set(sizes)
    assert sizes[-1] == 64 * 9
