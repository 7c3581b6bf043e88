"""What kernel modules import: torch, Triton and one another. Sampling builds on kernels, never the reverse."""

import ast
import sys
from pathlib import Path

import pytest

import dspark.kernels

MODULES = sorted(Path(dspark.kernels.__file__).parent.glob("**/*.py"))
ALLOWED = {"torch", "triton", "numpy"}  # numpy: Philox on a CPU


def imported(source: str) -> set[str]:
    """Absolute names of the modules that a file imports, wherever in it; relative ones as they are written."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def foreign(names: set[str]) -> set[str]:
    """Those that a kernel module may not import."""
    return {
        name
        for name in names
        if not (name == "dspark.kernels" or name.startswith("dspark.kernels."))
        and name.split(".")[0] not in ALLOWED | sys.stdlib_module_names
    }


@pytest.mark.parametrize("path", MODULES, ids=[path.name for path in MODULES])
def test_a_kernel_module_imports_no_other_package_of_the_project(path):
    assert not foreign(imported(path.read_text()))


def test_every_way_to_import_is_seen():
    source = (
        "import dspark.sampling\n"
        "def f():\n"
        "    from dspark.evals import law\n"
        "    from dspark import generate\n"
        "    from .. import x\n"
    )
    assert foreign(imported(source)) == {"dspark.sampling", "dspark.evals", "dspark", ".."}
    assert not foreign({"dspark.kernels", "dspark.kernels.markov", "torch", "triton.language", "math"})
    assert foreign({"sampling", "dspark.kernels_of_others"}) == {"sampling", "dspark.kernels_of_others"}
