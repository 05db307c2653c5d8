"""An implementation is built in other processes only: what its constructor does cannot end the run without a word."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conformance.cli import app
from conformance.isolation import run_isolated
from conformance.runner import Run, Target, judged_by, run_cases
from oproj.engines import EngineUnavailable
from planted import case

RUN = Run("test", "2026-01-31T12:00:00Z", "abc")
BROKEN = """
import ctypes, os, time
from pathlib import Path
import conformance
from oproj.engines import EngineUnavailable

class Crashes(conformance.SoftwareImplementation):
    def __init__(self, arch): ctypes.string_at(0)

class Hangs(conformance.SoftwareImplementation):
    def __init__(self, arch): time.sleep(600)

class Missing(conformance.SoftwareImplementation):
    def __init__(self, arch): raise EngineUnavailable("no such card")

class Dies(conformance.SoftwareImplementation):
    device = "cpu:0"
    def __init__(self, arch):
        super().__init__(arch)
        with Path(__file__).with_name("pids").open("a") as file:
            print(os.getpid(), file=file)
    def wo_a(self, x, weights, *, config):
        ctypes.string_at(0)
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    return path


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("Crashes", 2, "cannot be built for sm90: its process died in construction: SIGSEGV"),
        ("Hangs", 2, "cannot be built for sm90: no result after 8 s in construction; its process was ended"),
        ("Missing", 3, "no such card"),
    ],
)
def test_a_constructor_that_ends_or_hangs_is_one_line_and_an_exit_code(
    broken: Path, tmp_path: Path, name: str, code: int, message: str
) -> None:
    arguments = ["--arch", "sm90", "--implementation", f"{broken}:{name}", "--case-timeout", "8"]
    result = CliRunner().invoke(app, ["run", *arguments, "--out", str(tmp_path / "out")])
    assert (result.exit_code, (tmp_path / "out").exists()) == (code, False)
    assert message in " ".join(result.stderr.split())


def test_a_case_whose_process_died_in_wo_a_is_a_row_of_wo_a_without_a_build_in_this_process(broken: Path) -> None:
    target = Target(implementation=f"{broken}:Dies")
    ((row,),) = run_cases([case()], target, RUN, timeout=60)
    assert (row["stage"], row["reason"]) == ("wo_a", "its process died in wo_a: SIGSEGV")
    assert (row["implementation"], row["engine"], row["spec"]) == ("Dies", "software", target.implementation)
    assert json.loads(row["versions"])["oproj"] and judged_by(target, "sm90").device == "cpu:0"
    built_in = [int(line) for line in broken.with_name("pids").read_text().split()]
    assert len(built_in) == len(set(built_in)) == 2 and os.getpid() not in built_in


def test_what_is_missing_is_said_as_where_it_was_found(broken: Path) -> None:
    with pytest.raises(EngineUnavailable, match="no such card"):
        judged_by(Target(implementation=f"{broken}:Missing"), "sm90")
    with pytest.raises(ValueError, match="has no 'Nobody'"):
        judged_by(Target(implementation=f"{broken}:Nobody"), "sm90")


def dies(item: str) -> None:
    os._exit(5)


def test_a_process_that_dies_outside_of_every_stage_names_none() -> None:
    ((_, lost),) = run_isolated(["x"], dies, workers=1, timeout=60)
    assert (lost.reason, lost.stage) == ("its process died: exit code 5", "")  # type: ignore[union-attr]
