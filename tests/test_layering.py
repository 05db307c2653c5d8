"""Who may import whom: the contracts of pyproject.toml, each seen broken by a planted import."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("oproj", "reference", "conformance", "reports")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REFERENCE, PRODUCTION, REPORTS = (each["name"] for each in PROJECT["tool"]["importlinter"]["contracts"])
OURS = set(PACKAGES)
FORBIDDEN = [
    (REFERENCE, "reference", OURS - {"reference"} | {"numpy", "pandas", "numba", "scipy", "triton"}),
    (PRODUCTION, "oproj", OURS - {"oproj"}),
    (REPORTS, "reports", OURS - {"reports"} | {"torch"}),
]


def imported(source: str) -> set[str]:
    """The top-level names of all absolute imports, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def lint_planted(folder: Path, package: str, names: set[str]) -> tuple[int, str]:
    """import-linter with the project's contracts, over empty packages but for one planted import per name."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    for each in PACKAGES:
        (folder / each).mkdir()
        (folder / each / "__init__.py").touch()
    for name in names:
        (folder / package / f"plant_{name}.py").write_text(f"def late():\n    import {name}\n")
    lint = "from importlinter.cli import lint_imports_command as lint; lint()"
    command = [sys.executable, "-c", lint, "--no-cache"]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return answer.returncode, answer.stdout + answer.stderr


@pytest.mark.parametrize(("contract", "package", "names"), FORBIDDEN)
def test_each_planted_import_breaks_its_contract(tmp_path: Path, contract: str, package: str, names: set[str]) -> None:
    code, output = lint_planted(tmp_path, package, names)
    assert code != 0
    assert f"{contract} BROKEN" in output
    for name in names:
        assert f"{package} is not allowed to import {name}" in output


def test_what_the_design_allows_breaks_no_contract(tmp_path: Path) -> None:
    allowed = OURS - {"conformance"} | {"torch", "numpy", "pandas"}
    code, output = lint_planted(tmp_path, "conformance", allowed)
    assert code == 0, output
    assert "3 kept, 0 broken" in output


def test_reference_imports_torch_and_the_standard_library_only() -> None:
    allowed = {"torch", "reference"} | set(sys.stdlib_module_names)
    sources = list((ROOT / "reference").rglob("*.py"))
    assert sources
    for path in sources:
        assert imported(path.read_text()) <= allowed, path
    assert imported("def f():\n    import numpy.linalg as la") - allowed == {"numpy"}


def test_every_import_of_the_packages_is_a_declared_dependency() -> None:
    # the engines look for these and say so where one is missing
    optional = {"cuda", "deep_gemm", "flashinfer", "fsspec", "ray", "triton", "tvm_ffi", "vllm"}
    # halves of numba and jinja2: one without the other does not exist
    brought = {"llvmlite", "markupsafe"}
    declared = {Requirement(r).name for r in PROJECT["project"]["dependencies"]}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            foreign = imported(path.read_text()) - set(sys.stdlib_module_names) - set(PACKAGES)
            assert foreign <= declared | optional | brought, path
