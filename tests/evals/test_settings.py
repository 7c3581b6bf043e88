"""What a result says about the code that made it."""

import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

import dspark
from dspark.evals import settings as settings_module
from dspark.evals.settings import EvalSettings, library_versions, source_commit, source_digest


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout with one commit that holds dspark/__init__.py, from which `dspark` seems to be imported."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    package = tmp_path / "dspark"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "dspark")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.setattr(dspark, "__file__", str(package / "__init__.py"))
    return tmp_path


def test_commit_of_a_clean_and_of_a_changed_checkout(checkout):
    clean = source_commit()
    assert re.fullmatch("[0-9a-f]{40}", clean)
    (checkout / "dspark" / "__init__.py").write_text("changed = True")
    assert source_commit() == f"{clean}-dirty"


def test_the_digest_is_of_all_code_and_of_nothing_else(tmp_path, monkeypatch):
    """The same in a checkout, where the four packages stand side by side, and installed, where three are in dspark."""
    for name in ("dspark/loop.py", "dspark/vllm/v1.py", "sampling/params.py", "kernels/kda.py", "evals/run.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    where = {"dspark": tmp_path / "dspark"} | {f"dspark.{n}": tmp_path / n for n in ("sampling", "kernels", "evals")}
    monkeypatch.setattr(settings_module, "import_module", lambda name: SimpleNamespace(__path__=[str(where[name])]))
    digest = source_digest()
    (tmp_path / "dspark" / "README.md").write_text("text")
    assert source_digest() == digest
    for name in ("sampling", "kernels", "evals"):
        shutil.move(tmp_path / name, tmp_path / "dspark" / name)
        where[f"dspark.{name}"] = tmp_path / "dspark" / name
    assert source_digest() == digest
    (tmp_path / "dspark" / "vllm" / "v1.py").write_text("changed")
    assert source_digest() != digest


def test_a_package_installed_inside_another_checkout_has_no_commit(checkout, monkeypatch):
    installed = checkout / "venv" / "dspark"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    monkeypatch.setattr(dspark, "__file__", str(installed / "__init__.py"))
    assert source_commit() is None


def test_versions_name_what_the_numbers_come_out_of():
    assert {"dspark", "python", "torch", "transformers", "numpy"} == library_versions().keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"datasets": ()}, "datasets is empty", id="no-data-set"),
        pytest.param({"temperatures": ()}, "temperatures is empty", id="no-temperature"),
        pytest.param({"temperatures": (1, 1.0)}, "names one twice", id="a-temperature-twice"),
        pytest.param({"batch_size": 0}, "batch_size must be at least 1, got 0", id="batch-size"),
        pytest.param({"batch_size": True}, "batch_size must be at least 1, got True", id="batch-size-bool"),
        pytest.param({"limit": 0}, "limit must be at least 1, got 0; leave it out", id="limit"),
        pytest.param({"num_draft_tokens": 0}, "num_draft_tokens must be at least 1, got 0", id="K-zero"),
        pytest.param({"num_draft_tokens": 2.0}, "num_draft_tokens must be at least 1, got 2.0", id="K-float"),
        pytest.param({"max_new_tokens": 0}, "max_new_tokens must be at least 1", id="no-tokens"),
        pytest.param({"drafting": "wild"}, "drafting must be one of .*greedy.*, got 'wild'", id="drafting"),
        pytest.param({"prompt_mode": "html"}, "prompt_mode must be one of auto, chat, raw, got 'html'", id="mode"),
        pytest.param({"thinking": "yes"}, "thinking must be one of True, False, None, got 'yes'", id="thinking"),
        pytest.param({"draft_truncation": None}, "draft_truncation must be one of True, False", id="truncation"),
        pytest.param({"ignore_eos": 1}, "ignore_eos must be one of True, False, got 1", id="ignore-eos"),
        pytest.param({"seed": 1.5}, "seed must be an integer, got 1.5", id="seed"),
        pytest.param({"temperatures": (-1.0,)}, "temperature", id="negative-temperature"),
        pytest.param({"top_p": 1.5}, "top_p", id="top-p"),
    ],
)
def test_settings_that_name_no_run_are_refused_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        EvalSettings(**changes)
