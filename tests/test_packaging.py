"""What a wheel installs. A second top-level name would shadow, or overwrite, packages that other code imports."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent
IMPORT_NAMES = {"dspark": "dspark", "sampling": "dspark/sampling", "kernels": "dspark/kernels", "evals": "dspark/evals"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that no earlier build leaves files in it."""
    copy = tmp_path_factory.mktemp("source")
    for folder in IMPORT_NAMES:
        shutil.copytree(SOURCE / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SOURCE / name, copy / name)
    command = [
        sys.executable,
        "-P",
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(copy / "out"),
        str(copy),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next((copy / "out").glob("*.whl"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_only_top_level_name_is_dspark(names: set[str]):
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"dspark"}


def test_every_module_is_in_it(names: set[str]):
    modules = {
        f"{installed}/{path.relative_to(SOURCE / folder).as_posix()}"
        for folder, installed in IMPORT_NAMES.items()
        for path in (SOURCE / folder).rglob("*.py")
    }
    assert modules
    assert modules <= names, f"missing from the wheel (is their package listed in pyproject.toml?): {modules - names}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dspark/assets/smollm2-135m-dspark/config.json", id="drafter-config"),
        pytest.param("dspark/assets/smollm2-135m-dspark/model.safetensors", id="drafter-weights"),
        pytest.param("dspark/assets/smollm2-135m-dspark/confidence_calibration.json", id="drafter-calibration"),
        pytest.param("dspark/evals/data/default.jsonl", id="prompts"),
        pytest.param("dspark/py.typed", id="type-marker"),
    ],
)
def test_data_is_in_it(name: str, names: set[str]):
    assert name in names


def test_license_command_and_plugin_are_declared(wheel: Path, names: set[str]):
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    folder = metadata.removesuffix("/METADATA")
    assert f"{folder}/licenses/LICENSE" in names
    with zipfile.ZipFile(wheel) as archive:
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
        entry_points = archive.read(f"{folder}/entry_points.txt").decode()
    assert "[console_scripts]\ndspark = dspark.cli:main" in entry_points
    assert "[vllm.general_plugins]\ndspark = dspark.vllm.plugin:register" in entry_points


def test_the_installed_package_imports_without_the_checkout(wheel: Path, tmp_path: Path):
    """The subpackages are found under `dspark`, from the wheel's own files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = "import dspark.cli, dspark.sampling, dspark.kernels, dspark.evals; print(dspark.evals.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(tmp_path / "site" / "dspark" / "evals" / "__init__.py")
