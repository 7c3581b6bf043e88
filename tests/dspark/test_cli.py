"""The command line on a counting pair: a target that continues a token with the next id, a drafter that agrees."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tiny_target import write_counting_pair

from dspark.cli import main
from dspark.cli_parsers import build_parser
from dspark.commands_quality import BATCH_SIZE
from dspark.commands_tools import GPU_BATCH_SIZES
from dspark.default import TARGET_VARIABLE
from dspark.evals import EvalSettings
from dspark.evals.doctor import DoctorSettings
from dspark.profile import ProfileSettings
from dspark.sampling import SamplingParams
from dspark.vllm.backends import ServerBackend
from dspark.vllm.client import ServedModel

PROMPT = ["--prompt", "A", "--no-chat"]  # continued by B, C, D, ...


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, drafter = write_counting_pair(tmp_path_factory.mktemp("pair"))
    return ["--target", str(target), "--drafter", str(drafter)]


@pytest.fixture(autouse=True)
def no_named_target(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)


def run(*arguments: str) -> int:
    """`main`, with argparse's exit turned into its status."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


class TestGenerate:
    def test_text_on_stdout_figures_on_stderr(self, pair: list[str], capsys: pytest.CaptureFixture[str]):
        assert run("generate", *pair, *PROMPT, "--max-new-tokens", "11", "--compare") == 0
        said = capsys.readouterr()
        assert said.out == "BCDEFGHIJKL\n"
        assert "10 tokens in 2 steps: 5.00 per step; 8 of 8 drafts accepted (100%)" in said.err
        assert "output: identical to plain decoding, all 11 tokens" in said.err
        assert "tokens/s with the drafter" in said.err

    def test_json_is_one_line_with_figures_and_settings(self, pair: list[str], capsys: pytest.CaptureFixture[str]):
        assert run("generate", *pair, *PROMPT, "--max-new-tokens", "11", "--compare", "--json") == 0
        said = capsys.readouterr()
        assert said.out.count("\n") == 1
        report = json.loads(said.out)
        assert (report["text"], report["num_tokens"], report["finish_reason"]) == ("BCDEFGHIJKL", 11, "length")
        assert report["acceptance"]["tokens_per_step"]["value"] == 5.0
        assert report["plain"]["identical"] is True
        assert report["plain"]["num_identical_tokens"] == 11
        assert report["target"] == f"local folder {pair[1]}"
        assert report["sampling"]["temperature"] == 0.0
        assert (report["dtype"], report["prompt_format"]) == ("float32", "raw")
        assert (report["num_draft_tokens"], report["drafting"]) == (4, "probabilistic")

    def test_the_length_of_a_draft_can_be_chosen(self, pair: list[str], capsys: pytest.CaptureFixture[str]):
        assert run("generate", *pair, *PROMPT, "--max-new-tokens", "9", "--num-draft-tokens", "1", "--json") == 0
        assert json.loads(capsys.readouterr().out)["acceptance"]["tokens_per_step"]["value"] == 2.0

    def test_the_chat_template_is_applied_by_default(self, pair: list[str], capsys: pytest.CaptureFixture[str]):
        assert run("generate", *pair, "--prompt", "A", "--max-new-tokens", "2", "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert report["prompt_format"] == "chat"
        assert report["num_prompt_tokens"] > 50

    def test_a_seed_repeats_a_sampled_text(self, pair: list[str], capsys: pytest.CaptureFixture[str]):
        texts = []
        for seed in ("1", "1", "2"):
            flags = ["--temperature", "99", "--max-new-tokens", "16", "--seed", seed, "--json"]
            assert run("generate", *pair, *PROMPT, *flags) == 0
            texts.append(json.loads(capsys.readouterr().out)["token_ids"])
        assert texts[0] == texts[1]
        assert texts[0] != texts[2]  # nearly uniform over 259 tokens: equal by chance with odds below 1e-20

    def test_sampled_outputs_are_not_called_different(self, pair: list[str], capsys: pytest.CaptureFixture[str]):
        assert run("generate", *pair, *PROMPT, "--temperature", "9", "--compare", "--max-new-tokens", "4") == 0
        assert "not expected to be the same" in capsys.readouterr().err

    def test_the_prompt_can_come_from_stdin(
        self, pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("A"))
        assert run("generate", *pair, "--prompt", "-", "--no-chat", "--max-new-tokens", "2") == 0
        assert capsys.readouterr().out == "BC\n"


class TestEval:
    def test_a_table_with_one_row_per_temperature(
        self, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        prompts = tmp_path / "mine.jsonl"
        prompts.write_text('{"prompt": "A"}\n{"prompt": "B"}\n{"prompt": "C"}\n')
        flags = ["--dataset", str(prompts), "--limit", "2", "--max-new-tokens", "6", "--temperature", "0"]
        assert run("eval", *pair, *flags, "--temperature", "0.5", "--out", str(tmp_path / "out")) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("mine ")]
        assert [row[:3] for row in rows] == [["mine", "0", "2"], ["mine", "0.5", "2"]]
        assert (tmp_path / "out" / "results.json").is_file()

    def test_json_and_the_plain_base_line(self, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        prompts = tmp_path / "mine.jsonl"
        prompts.write_text('{"prompt": "A"}\n')
        flags = ["--dataset", str(prompts), "--max-new-tokens", "6", "--temperature", "0", "--json"]
        figures = {}
        for extra in ([], ["--plain"]):
            assert run("eval", *pair, *flags, *extra) == 0
            out = capsys.readouterr().out
            assert out.count("\n") == 1
            (row,) = json.loads(out)["rows"]
            assert row["settings"]["target_name"] == f"local folder {pair[1]}"
            figures[bool(extra)] = row["acceptance"]["tokens_per_step"]["value"]
        assert figures == {False: 5.0, True: 1.0}

    def test_what_plain_decoding_does_not_use_is_said(
        self, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        prompts = tmp_path / "mine.jsonl"
        prompts.write_text('{"prompt": "A"}\n')
        flags = ["--dataset", str(prompts), "--max-new-tokens", "2", "--temperature", "0", "--num-draft-tokens", "2"]
        assert run("eval", *pair, *flags, "--plain") == 0
        said = capsys.readouterr().err
        for flag in ("--drafter", "--num-draft-tokens"):
            assert f"{flag} has no effect with --plain" in said

    def test_a_run_with_other_settings_is_refused_in_one_line_that_names_them(
        self, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        prompts = tmp_path / "mine.jsonl"
        prompts.write_text('{"prompt": "A"}\n')
        flags = ["--dataset", str(prompts), "--max-new-tokens", "2", "--temperature", "0", "--out", str(tmp_path / "o")]
        assert run("eval", *pair, *flags) == 0
        capsys.readouterr()
        assert run("eval", *pair, *flags, "--seed", "3") == 2
        assert "settings.seed: stored 0, now 3" in capsys.readouterr().err.splitlines()[-1]


class TestEvalOnVllm:
    """The flags that choose vLLM, with a server that a few lines of http.server play; the real one: tests/vllm."""

    @pytest.fixture
    def server(self, pair: list[str]) -> Iterator[str]:
        """A server of `pair`'s target that reports the steps of each request: drafts of 2, the first accepted."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(
                    {
                        "/v1/models": {"data": [{"id": "counting", "root": pair[1]}]},
                        "/version": {"version": "0.32.0"},
                        "/metrics": {},
                    }[self.path]
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                first = body["prompt"][-1] + 1
                metrics = {"per_step_drafted": [2, 2], "per_step_accepted": [1, 1]}
                tokens = {"token_ids": list(range(first, first + 5)), "finish_reason": "length"}
                self.answer({"choices": [tokens], "metrics": {"speculative_decoding": metrics}})

            def answer(self, value: object) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
            thread = Thread(target=running.serve_forever, daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{running.server_port}"
            running.shutdown()
            thread.join()

    def test_a_server_gives_the_same_report(self, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        prompts = tmp_path / "mine.jsonl"
        prompts.write_text('{"prompt": "A"}\n{"prompt": "B"}\n')
        flags = ["--dataset", str(prompts), "--max-new-tokens", "5", "--temperature", "0", "--out", str(tmp_path / "o")]
        for _ in range(2):  # the second continues the first, and has nothing left to ask
            assert run("eval", "--endpoint", server, *flags) == 0
            out = capsys.readouterr().out
            (cells,) = [line.split() for line in out.splitlines() if line.startswith("mine ")]
            assert cells[:5] == ["mine", "0", "2", "4", "2.00"]
            assert cells[-2:] == ["-", "0%"]  # no calibration without confidences
            assert "by vLLM 0.32.0 server, which does not report accept_probs and confidence" in out
            assert f"target: counting at {server}" in out
        assert len((tmp_path / "o" / "records.jsonl").read_text().splitlines()) == 2
        assert run("eval", "--endpoint", server, *flags, "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["settings"]["backend"]["not_reported"] == ["accept_probs", "confidence"]
        assert row["settings"]["num_draft_tokens"] is None

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            pytest.param(["--backend", "vllm", "--endpoint", "http://a"], "so --backend vllm says nothing", id="both"),
            pytest.param(["--endpoint", "localhost:8000"], "no address such as http://", id="no-address"),
            pytest.param(["--endpoint", "http://127.0.0.1:9"], "Is the server running?", id="no-server"),
            pytest.param(["--endpoint", "http://a", "--plain"], "--plain does not go with --endpoint", id="plain"),
            pytest.param(["--endpoint", "http://a", "--num-draft-tokens", "2"], "--num-draft-tokens does not", id="K"),
            pytest.param(["--endpoint", "http://a", "--drafter", "d"], "--drafter does not go with", id="drafter"),
            pytest.param(["--backend", "vllm", "--device", "cpu"], "--device does not go with --backend", id="device"),
            pytest.param(["--backend", "vllm", "--dtype", "float64"], "no such models", id="float64"),
            pytest.param(["--backend", "onnx"], "onnx", id="unknown"),
        ],
    )
    def test_flags_that_contradict_are_refused_in_one_line(
        self, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ):
        assert run("eval", *flags) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
        assert message in said.err

    def test_without_vllm_it_is_said_what_to_install(self, capsys: pytest.CaptureFixture[str], monkeypatch):
        monkeypatch.setattr("dspark.vllm.backends.find_spec", lambda name: None)
        assert run("eval", "--backend", "vllm") == 2
        assert "pip install 'vllm==0.32.0'" in capsys.readouterr().err


class TestInspect:
    def test_a_good_checkpoint(self, pair: list[str], capsys: pytest.CaptureFixture[str]):
        assert run("inspect", pair[3], "--target", pair[1]) == 0
        assert "would load" in capsys.readouterr().out

    def test_a_bad_one_gives_status_1_and_its_problems(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        assert run("inspect", str(tmp_path), "--json") == 1
        report = json.loads(capsys.readouterr().out)
        assert report["loadable"] is False
        assert report["refusals"]

    def test_the_target_is_named_where_a_drafter_is_held_against_it(
        self, pair: list[str], capsys: pytest.CaptureFixture[str]
    ):
        assert run("inspect", pair[3], "--target", pair[1], "--json") == 0
        target = json.loads(capsys.readouterr().out)["target"]
        assert (target["name"], target["fits"]) == (f"local folder {pair[1]}", True)


class TestStatedLayout:
    """A checkpoint that states its layout is not read in the other one."""

    @pytest.fixture
    def stating(self, pair: list[str], tmp_path: Path) -> str:
        folder = tmp_path / "stating"
        shutil.copytree(pair[3], folder)
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"sample_from_anchor": True}))
        return str(folder)

    @pytest.mark.parametrize("command", ["generate", "eval", "quality", "profile", "doctor", "inspect", "convert"])
    def test_the_other_layout_is_refused(
        self, command: str, stating: str, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        models = {
            "generate": [*pair[:2], "--drafter", stating, *PROMPT],
            "eval": [*pair[:2], "--drafter", stating],
            "profile": [pair[1], stating, "--out", str(tmp_path / "table.json")],
            "inspect": [stating],
            "convert": [stating, str(tmp_path / "converted"), "--to", "speculators"],
        }
        status = run(command, *models.get(command, [pair[1], stating]), "--layout", "fill")
        assert status == (1 if command in ("doctor", "inspect") else 2)
        said = capsys.readouterr()
        assert "the checkpoint states sample_from_anchor=True" in said.out + said.err
        assert "Leave --layout out" in said.out + said.err

    def test_the_same_layout_is_fine(self, stating: str, pair: list[str], capsys: pytest.CaptureFixture[str]):
        flags = ["--layout", "anchor", "--max-new-tokens", "2"]
        assert run("generate", *pair[:2], "--drafter", stating, *PROMPT, *flags) == 0
        assert capsys.readouterr().out == "BC\n"


class TestEmbedded:
    """The word `embedded` names a model of the embedded pair wherever one is named; here a counting pair is it."""

    @pytest.fixture(autouse=True)
    def local_pair(self, pair: list[str], monkeypatch: pytest.MonkeyPatch):
        def unreachable(*_: object, **__: object):
            raise AssertionError("looked up on the Hub")

        monkeypatch.setenv(TARGET_VARIABLE, pair[1])
        monkeypatch.setattr("dspark.cli_paths.default_drafter_path", lambda: Path(pair[3]))
        monkeypatch.setattr("dspark.target.HFTarget.from_pretrained", unreachable)

    @pytest.mark.parametrize(
        "drafter", [[], ["--drafter", "embedded"], ["--drafter", "DRAFTER"]], ids=["none", "word", "folder"]
    )
    def test_generate(self, drafter: list[str], pair: list[str], capsys: pytest.CaptureFixture[str]):
        drafter = [pair[3] if word == "DRAFTER" else word for word in drafter]
        assert run("generate", "--target", "embedded", *drafter, *PROMPT, "--max-new-tokens", "2") == 0
        said = capsys.readouterr()
        assert said.out == "BC\n"
        assert "no target was named" not in said.err

    @pytest.mark.parametrize(
        "arguments",
        [
            pytest.param(["inspect", "embedded", "--target", "embedded"], id="inspect"),
            pytest.param(["eval", "--target", "embedded", "--drafter", "embedded"], id="eval"),
            pytest.param(["quality", "--target", "embedded"], id="quality-target"),
            pytest.param(["quality", "embedded", "embedded"], id="quality-by-position"),
            pytest.param(["quality", "embedded", "DRAFTER"], id="quality-target-by-position"),
            pytest.param(["convert", "embedded", "DST", "--to", "speculators", "--target", "embedded"], id="convert"),
        ],
    )
    def test_other_commands(
        self, arguments: list[str], pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        paths = {"DST": str(tmp_path / "new"), "DRAFTER": pair[3]}
        arguments = [paths.get(word, word) for word in arguments]
        if arguments[0] in ("eval", "quality"):
            prompts = tmp_path / "mine.jsonl"
            prompts.write_text('{"prompt": "A"}\n{"prompt": "B"}\n')
            arguments += ["--dataset", str(prompts), "--max-new-tokens", "4", "--temperature", "0"]
        if arguments[0] == "quality":
            arguments += ["--states", str(tmp_path / "states")]
        assert run(*arguments, "--json") == 0
        said = capsys.readouterr()
        assert said.out.startswith('{"command"')
        assert "no target was named" not in said.err

    @pytest.mark.parametrize("gguf", [False, True])
    def test_the_tokenizer_of_a_server(
        self, gguf: bool, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        if gguf:
            (tmp_path / "model.gguf").write_bytes(b"GGUF")
            monkeypatch.setenv(TARGET_VARIABLE, str(tmp_path / "model.gguf"))
        seen = []
        monkeypatch.setattr("dspark.commands_eval.evaluate", lambda options: seen.append(options.target) or 0)
        assert run("eval", "--endpoint", "http://a", "--target", "embedded") == 0
        assert seen == [str(tmp_path / "model.gguf") if gguf else pair[1]]

    def test_a_servers_tokenizer_from_a_gguf_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "a.gguf").write_bytes(b"GGUF")
        (tmp_path / "b.gguf").write_bytes(b"GGUF")
        monkeypatch.setattr("dspark.vllm.backends.served_model", lambda _: ServedModel("served", "elsewhere", "0"))
        with pytest.raises(ValueError, match=r"from .*b\.gguf: name a copy .*is cut short or no GGUF file"):
            ServerBackend.connect("http://a", str(tmp_path / "b.gguf"), EvalSettings())
        monkeypatch.setattr(
            "transformers.AutoTokenizer.from_pretrained", lambda folder, gguf_file: (Path(folder), gguf_file)
        )
        served = ServerBackend.connect("http://a", str(tmp_path / "b.gguf"), EvalSettings())
        assert served.tokenizer == (tmp_path, "b.gguf")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["eval", "--plain", "--schedule", "threshold:0.5"], "--schedule does not go with --plain", id="p"),
        pytest.param(
            ["generate", "--prompt", "A", "--schedule", "threshold:2"],
            "--schedule threshold:2: '2' is no probability; expected threshold:P with P from 0",
            id="too-large",
        ),
        pytest.param(
            ["generate", "--prompt", "A", "--schedule", "threshold:x"],
            "threshold:x: 'x' is no probability",
            id="no-number",
        ),
    ],
)
def test_schedules_are_refused_in_the_words_of_the_command_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert run(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not any(name in line for name in ("StaticThreshold", "min_survival", "schedule="))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["generate"], "--prompt", id="a-required-flag-is-missing"),
        pytest.param(["generate", "--prompt", "A", "--topk", "3"], "--topk", id="unknown-flag"),
        pytest.param(["generate", "--prompt", "A", "--drafting", "wild"], "wild", id="unknown-value"),
        pytest.param(["generate", "--prompt", "A", "--temperature", "hot"], "hot", id="not-a-number"),
        pytest.param(["generate", "--prompt", "A", "--temperature", "-1"], "temperature must be", id="out-of-range"),
        pytest.param(["generate", "--prompt", "A", "--device", "toaster"], "toaster", id="no-such-device"),
        pytest.param(["generate", "--prompt", "A", "--target", "somewhere"], TARGET_VARIABLE, id="target-alone"),
        pytest.param(["eval", "--dataset", "nowhere.jsonl"], "no data set 'nowhere.jsonl'", id="no-such-prompts"),
        pytest.param(["eval", "--temperature", "0", "--temperature", "0"], "one twice", id="temperature-twice"),
        pytest.param(["eval", "--limit", "0"], "limit must be at least 1", id="limit-zero"),
        pytest.param(["inspect", "x", "--layout", "odd"], "odd", id="unknown-layout"),
        pytest.param(["measure"], "measure", id="unknown-command"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], message: str, pair: list[str], capsys: pytest.CaptureFixture[str]
):
    if arguments[0] == "eval" or "--device" in arguments or "-1" in arguments:
        arguments = [arguments[0], *pair, *arguments[1:]]  # so that nothing of the embedded pair is touched
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if not line.startswith(("target: ", f"{pair[3]}: "))]
    assert len(lines) == 1
    assert message in lines[0]


def test_too_many_draft_tokens_are_refused_in_one_line(pair: list[str], capsys: pytest.CaptureFixture[str]):
    assert run("generate", *pair, *PROMPT, "--num-draft-tokens", "5") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dspark: num_draft_tokens=5 is outside 1..4")


def test_a_drafter_for_another_target_is_refused_with_every_problem(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    raw = json.loads((Path(pair[3]) / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(raw | {"num_target_layers": 9, "target_layer_ids": [0, 7]}))
    (other / "model.safetensors").write_bytes((Path(pair[3]) / "model.safetensors").read_bytes())
    assert run("generate", *pair[:2], "--drafter", str(other), *PROMPT) == 2
    assert "Traceback" not in (said := capsys.readouterr()).err
    assert said.out == ""
    assert str(other) in said.err


@pytest.mark.parametrize("command", [[], ["generate"], ["eval"], ["inspect"]], ids=lambda c: " ".join(c) or "dspark")
def test_help_names_every_flag(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert run(*command, "--help") == 0
    assert "usage: dspark" in capsys.readouterr().out


def help_lines(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The help of each flag that takes a value."""
    monkeypatch.setenv("COLUMNS", "9999")
    assert run(command, "--help") == 0
    text = re.sub(r"\n {6,}", "  ", capsys.readouterr().out)
    return {flag: line for line in text.splitlines() for flag in re.findall(r"^  (--[\w-]+) [A-Z{]", line)}


COMMANDS = ["generate", "eval", "report", "calibrate", "quality", "inspect", "profile", "convert", "doctor"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_holds_without_a_flag(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    required = {"generate": {"--prompt"}, "profile": {"--out"}, "convert": {"--to"}}.get(command, set())
    lines = help_lines(command, capsys, monkeypatch)
    assert {flag for flag, line in lines.items() if "default" not in line} == required


@pytest.mark.parametrize(
    ("command", "settings", "names"),
    [
        ("generate", SamplingParams(), ("top_k", "top_p", "min_p", "max_new_tokens")),
        ("eval", EvalSettings(), ("top_k", "top_p", "min_p", "max_new_tokens", "seed", "batch_size")),
        ("quality", EvalSettings(), ("top_k", "top_p", "min_p", "max_new_tokens", "seed", "batch_size")),
        ("profile", ProfileSettings(), ("context", "temperature", "repeats")),
        ("doctor", DoctorSettings(), ("prompts", "new_tokens", "anchors", "seed")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_help_states_the_defaults_of_the_dataclasses(
    command: str,
    settings: object,
    names: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    lines = help_lines(command, capsys, monkeypatch)
    for name in names:
        assert re.search(rf"default: {getattr(settings, name):g}(?![\d.])", lines[f"--{name.replace('_', '-')}"]), name
    if command == "profile":
        sizes = [" ".join(map(str, values)) for values in (ProfileSettings.batch_sizes, GPU_BATCH_SIZES)]
        assert f"default: {sizes[0]}, on a GPU also {sizes[1].removeprefix(sizes[0]).strip()}" in lines["--batch-size"]
    if command == "quality":
        assert f"default: {BATCH_SIZE['cpu']}, on a GPU {BATCH_SIZE['cuda']}" in lines["--batch-size"]


@pytest.mark.parametrize("arguments", [["--topk", "3"], ["--seed", "x"]], ids=["unknown-flag", "wrong-value"])
def test_usage_errors_point_to_the_help_of_the_command(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert run("generate", "--prompt", "A", *arguments) == 2
    line = capsys.readouterr().err
    assert line.startswith("dspark generate: ")
    assert line.endswith("(see dspark generate --help)\n")


def test_flags_that_take_several_values():
    """Where folders stand without a flag, one value each, so that a flag before them does not take them."""
    parse = build_parser().parse_args
    assert parse(["calibrate", "--temperature", "1", "--temperature", "2", "d"]).temperature == [1, 2]
    assert parse(["report", "--allow-differences", "a", "d", "e"]).runs == ["d", "e"]
    assert parse(["eval", "--temperature", "0", "1", "--temperature", "2"]).temperature == [0, 1, 2]
    assert parse(["profile", "--out", "f", "--batch-size", "1", "--batch-size", "2", "3"]).batch_size == [1, 2, 3]


def test_help_does_not_wait_for_torch():
    program = "import sys, dspark.cli; dspark.cli.build_parser(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "--dataset", "nowhere.jsonl"],
        ["generate", "--prompt", "A", "--target", "./nowhere", "--drafter", "embedded"],
        ["generate", "--prompt", "A", "--schedule", "nowhere.json"],
        ["quality", "nowhere"],
        ["convert", "nowhere", "there", "--to", "deepspec"],
        ["report", "nowhere"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_neither_does_a_wrong_path(arguments: list[str]):
    program = f"import sys, dspark.cli; print(dspark.cli.main({arguments}), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "2 False\n"
    assert "nowhere" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_flags_that_are_not_given_leave_the_defaults_to_the_dataclasses():
    options = vars(build_parser().parse_args(["eval"]))
    assert options == {"command": "eval", "run": ("commands_eval", "evaluate"), "plain": False, "json": False}


def test_a_reader_that_goes_away_ends_the_program_quietly(pair: list[str]):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-P", "-m", "dspark", "generate", *pair, *PROMPT, "--max-new-tokens", "20"]
    ran = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert ran.returncode == 141
    assert "Traceback" not in ran.stderr
    assert "Exception" not in ran.stderr
