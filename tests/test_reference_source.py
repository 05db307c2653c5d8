"""reference/ stays what an auditor is promised: it imports torch and nothing of ours, and it is short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reference

FOLDER = Path(reference.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
ALLOWED = {"torch", "math", "typing", "dataclasses", "__future__", "reference"}
RUNS_TEXT = {"__import__", "eval", "exec", "compile"}  # ways around an import statement
LINES_BELOW = 300


def foreign_imports(source: str) -> list[str]:
    """What a source imports beyond ALLOWED, and calls that could import without saying so."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level < 2:
            found.append("reference" if node.level else str(node.module))
        elif isinstance(node, ast.ImportFrom):
            found.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Name) and node.id in RUNS_TEXT:
            found.append(node.id)
    return [name for name in found if name.split(".")[0] not in ALLOWED]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_imports_torch_and_nothing_of_ours(path: Path) -> None:
    assert foreign_imports(path.read_text()) == []


@pytest.mark.parametrize(
    "planted, name",
    [
        ("import oproj", "oproj"),
        ("import torch, numpy as np", "numpy"),
        ("from conformance.bounds import wo_a_bound", "conformance.bounds"),
        ("def f():\n    from oproj.rope import cos_sin_cache", "oproj.rope"),
        ("if True:\n    import reports.rows", "reports.rows"),
        ("import importlib", "importlib"),
        ("from .. import oproj", ".."),
        ("from ..oproj import rope", "..oproj"),
        ("__import__('oproj')", "__import__"),
        ("exec('import oproj')", "exec"),
        ("import torchvision", "torchvision"),
    ],
)
def test_a_planted_import_is_seen(planted: str, name: str) -> None:
    clean = (FOLDER / "rope.py").read_text()
    assert foreign_imports(clean + "\n" + planted) == [name]


def test_imports_within_the_package_are_no_finding() -> None:
    assert foreign_imports("from . import rope\nfrom .formats import x\nimport torch.nn.functional") == []


def test_the_whole_package_is_read_in_one_sitting() -> None:
    assert {path.name for path in FILES} == {"__init__.py", "formats.py", "o_proj.py", "rope.py"}
    assert 0 < sum(len(path.read_text().splitlines()) for path in FILES) < LINES_BELOW


def test_the_package_exports_what_it_says() -> None:
    assert sorted(reference.__all__) == list(reference.__all__)
    for name in reference.__all__:
        value = getattr(reference, name)
        assert callable(value) and value.__module__.startswith("reference.")
