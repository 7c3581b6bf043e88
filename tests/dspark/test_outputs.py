"""Places that results cannot be written to are refused before the work, in one line with the flag and the reason."""

import os
from pathlib import Path

import pytest

from dspark.cli import main
from dspark.outputs import check_output

CLOSED = "/proc/dspark"  # no file can be made in /proc, not even by root
needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc on this system")


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Fails the test as soon as a command begins to work."""
    for name in ("commands_eval.load_pair", "commands_quality.load_pair", "commands_tools.load_pair"):
        monkeypatch.setattr(f"dspark.{name}", lambda *_: pytest.fail("models were loaded"))
    for name in ("commands_eval.load_runs", "commands_tools.load_named_target", "convert.open_checkpoint"):
        monkeypatch.setattr(f"dspark.{name}", lambda *_: pytest.fail("work began"))


@needs_proc
@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param(["eval", "--out", CLOSED], f"--out {CLOSED}", id="eval"),
        pytest.param(["quality", "--out", f"{CLOSED}/deep"], f"--out {CLOSED}/deep", id="quality"),
        pytest.param(["quality", "--states", CLOSED], f"--states {CLOSED}", id="quality-states"),
        pytest.param(["report", ".", "--out", CLOSED], f"--out {CLOSED}", id="report"),
        pytest.param(["calibrate", ".", "--out", f"{CLOSED}.json"], f"--out {CLOSED}.json", id="calibrate"),
        pytest.param(["profile", "--out", f"{CLOSED}.json"], f"--out {CLOSED}.json", id="profile"),
        pytest.param(
            ["convert", "embedded", CLOSED, "--to", "deepspec", "--target", "owner/name"], f"DST {CLOSED}", id="convert"
        ),
    ],
)
def test_every_command_asks_before_it_works(arguments, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dspark: {named} cannot be written: no file can be made in /proc (")


@pytest.mark.usefixtures("nothing_is_loaded")
def test_quality_does_not_go_into_a_run_of_eval(tmp_path, capsys):
    (tmp_path / "records.jsonl").touch()
    assert main(["quality", "--out", str(tmp_path)]) == 2
    assert "holds a run of dspark eval" in capsys.readouterr().err


def test_what_can_be_written_is_left_as_it_is(tmp_path):
    check_output("--out", tmp_path / "new" / "deeper")
    check_output("--out", tmp_path)
    check_output("--out", tmp_path / "file", is_file=True)
    assert list(tmp_path.iterdir()) == []


@needs_proc
def test_what_is_no_regular_file_is_written_to_whatever_its_folder():
    check_output("--out", Path(f"/proc/self/fd/{os.pipe()[1]}"), is_file=True)


def test_files_and_folders_in_each_others_place(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for path, message in (
        (tmp_path / "file", "file is no folder; expected one"),
        (tmp_path / "file" / "inner", "lies in .*file, which is no folder"),
        (tmp_path / "gone", "gone is no folder; expected one"),
    ):
        with pytest.raises(ValueError, match=message):
            check_output("--out", path)
    with pytest.raises(ValueError, match="is a folder; expected a file"):
        check_output("--out", tmp_path, is_file=True)
    with pytest.raises(ValueError, match=r"there is no folder .*none to write the file to"):
        check_output("--out", tmp_path / "none" / "file", is_file=True)


def test_a_protected_file_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write to any file
    with pytest.raises(ValueError, match="the file that is there is write-protected"):
        check_output("--out", tmp_path / "file", is_file=True)
