"""The first use of a checkout: what is missing is said in one line with the remedy; a ready one is left alone.

Python is played by small shell scripts, so nothing is installed here.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]
READY_PYTHON = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p "$(eval echo \\${$#})/bin"; cp "$0" "$(eval echo \\${$#})/bin/python" ;;
    *"pip install"*) echo "installing" "$@" ;;
    *"pip --version"*) exit 0 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with nothing in it but the programs, in a folder whose name has a space."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("environment.sh", "dspark", "constraints.txt"):
        shutil.copy(SOURCE / "scripts" / name, root / "scripts" / name)
    shutil.copy(SOURCE / "pyproject.toml", root / "pyproject.toml")
    return root


def play_python(folder: Path, text: str) -> Path:
    python = folder / "python"
    python.write_text(text)
    python.chmod(0o755)
    return python


def call(checkout: Path, python: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    command = [str(checkout / "scripts" / "dspark"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        pytest.param(None, "no /nowhere/python found", id="no-python"),
        pytest.param('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n', "too old", id="old-python"),
        pytest.param(
            '#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; esac\n',
            "apt install python3-venv",
            id="debian-without-venv",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line(python: str | None, message: str, checkout: Path, tmp_path: Path):
    ran = call(checkout, "/nowhere/python" if python is None else play_python(tmp_path, python), "--help")
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert message in ran.stderr.splitlines()[-1]
    assert not (checkout / ".venv").exists()


def test_the_first_call_installs_and_the_second_does_not(checkout: Path, tmp_path: Path):
    python = play_python(tmp_path, READY_PYTHON)
    first = call(checkout, python)
    command = checkout / ".venv" / "bin" / "dspark"
    assert "installing -m pip install" in first.stderr
    command.write_text('#!/bin/sh\necho "$#" "$@"\n')
    command.chmod(0o755)
    second = call(checkout, python, "generate", "--prompt", "two words")
    assert second.stderr == ""
    assert second.stdout == "3 generate --prompt two words\n"
    (checkout / "pyproject.toml").write_text("changed")
    assert "installing" in call(checkout, python).stderr


def test_a_failed_installation_is_tried_again(checkout: Path, tmp_path: Path):
    python = play_python(tmp_path, READY_PYTHON.replace('echo "installing" "$@"', "exit 1"))
    for _ in range(2):
        ran = call(checkout, python)
        assert ran.returncode == 2
        assert "goes on from there" in ran.stderr
