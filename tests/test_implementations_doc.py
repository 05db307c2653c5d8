"""What docs/implementations.md shows is what one sees: its commands run, and their output has its lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import conformance
from conformance import attainable, special
from conformance.case import Case
from conformance.cli import app
from conformance.implementation import METHODS, REDUCTIONS
from conformance.runner import Target, implementation_of
from conformance.stages import run_stages

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "implementations.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / "docs" / "examples" / "my_kernel.py").read_text(encoding="utf-8")
# each command of the example with the output that the page shows behind it
SHOWN = re.findall(r"```sh\n(oproj [^\n]*my_kernel[^\n]*)\n```.*?```text\n(.*?)```", PAGE, re.DOTALL)


def words(line: str) -> str:
    """A line of a table without its spaces of layout."""
    return " ".join(line.split())


@pytest.mark.parametrize("number, extra", [(0, ["--no-shrink"]), (1, []), (2, ["--no-shrink"])])
def test_the_example_fails_as_the_page_shows(
    number: int, extra: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command, output = SHOWN[number]
    arguments = shlex.split(command)[1:]
    if "--out" in arguments:
        arguments[arguments.index("--out") + 1] = str(tmp_path / "out")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "180")
    result = CliRunner().invoke(app, [*arguments, *extra])
    seen = [words(line) for line in result.stdout.splitlines()]
    lines = [words(line) for line in output.splitlines()]
    missing = [line for line in lines if not any(found.startswith(line) for found in seen)]
    assert missing == [] and len(lines) >= 1, result.stdout
    assert result.exit_code == 1


def without_the_fault() -> str:
    lines = EXAMPLE.splitlines(keepends=True)
    kept = [line for line in lines if "# the fault" not in line]
    assert len(kept) == len(lines) - 1
    return "".join(kept)


@pytest.mark.parametrize("arch, preset", [("sm90", "v4-flash"), ("sm100", "v4-flash"), ("sm120", "v4.1-flash")])
def test_without_its_fault_the_example_passes(tmp_path: Path, arch: str, preset: str) -> None:
    path = tmp_path / f"right_{arch}.py"
    path.write_text(without_the_fault())
    right = implementation_of(Target(implementation=f"{path}:MyKernel"), arch)
    for family in ("wide", "boundary", "half-way", "tiny"):
        case = Case(arch, preset, 5, n_groups=2, o_lora_rank=256, hidden_size=128, family=family, padded_heads=20)
        wrong = [r.verdict.reason for r in run_stages(case, right) if r.verdict.status == "fail"]
        assert wrong == []


@pytest.mark.parametrize("declared", [True, False])
def test_the_rounding_passes_where_it_is_declared(tmp_path: Path, declared: bool) -> None:
    path = tmp_path / f"declared_{declared}.py"
    line = '    nan_policy = "kept"'
    assert line in EXAMPLE
    path.write_text(EXAMPLE.replace(line, f'    o_known = "rounded"\n{line}') if declared else EXAMPLE)
    mine = implementation_of(Target(implementation=f"{path}:MyKernel"), "sm90")
    case = Case("sm90", "v4-flash", 5, n_groups=1, o_lora_rank=256, hidden_size=128, position_family="small")
    wrong = {(r.stage, r.oracle) for r in run_stages(case, mine) if r.verdict.status == "fail"}
    assert wrong == (set() if declared else {("quantize", "attainable")})


def test_the_example_has_about_thirty_lines() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 32


def table(heading: str) -> dict[str, list[str]]:
    block = PAGE.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return {cells[1].strip(" `").partition("(")[0]: cells[2:-1] for cells in (line.split("|") for line in block)}


def test_every_method_and_attribute_is_described() -> None:
    assert tuple(table("method")) == METHODS
    described = table("attribute")
    assert {"name", "arch", "device", "engine", "bitwise", "nan_policy", "o_known"} <= described.keys()
    sources = [Path(conformance.__file__).parent / name for name in ("attainable.py", "stages.py", "special.py")]
    read: Callable[[str], list[str]] = re.compile(r'getattr\((?:self\.)?(?:bench\.)?implementation, "(\w+)"').findall
    honoured = {name for path in sources for name in read(path.read_text(encoding="utf-8"))}
    assert honoured and honoured <= described.keys()
    words_of = {"reduction": REDUCTIONS, "scale_rule": attainable.SCALE_RULES, "nan_policy": special.NAN_POLICIES}
    for name, known in words_of.items():
        assert all(f'"{word}"' in " ".join(described[name]) for word in known)
