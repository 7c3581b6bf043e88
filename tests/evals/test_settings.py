"""What a result says about the code that made it."""

import re
import shutil
import subprocess

import pytest

import dspark
from dspark.evals.settings import library_versions, source_commit


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


def test_a_package_installed_inside_another_checkout_has_no_commit(checkout, monkeypatch):
    installed = checkout / "venv" / "dspark"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    monkeypatch.setattr(dspark, "__file__", str(installed / "__init__.py"))
    assert source_commit() is None


def test_versions_name_what_the_numbers_come_out_of():
    assert {"dspark", "python", "torch", "transformers", "numpy"} == library_versions().keys()
