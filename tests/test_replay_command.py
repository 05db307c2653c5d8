"""Replay by id: on what the rows say judged the Case, in a process of its own where that is not ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from conformance.cli import app
from conformance.replay_command import _look_up
from conformance.runner import Run, Target, run_case
from planted import case
from reports.store import RowWriter

SMALL = case(tp_size=1, tp_rank=0, tokens=2, n_groups=1, o_lora_rank=512, hidden_size=128)
MINE = """
import os, time, conformance
class Mine(conformance.SoftwareImplementation):
    def wo_b(self, z, weights, *, config):
        {}
        return super().wo_b(z, weights, config=config)
"""


def oproj(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def text(result: Result) -> str:
    return " ".join((result.output + result.stderr).split())


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    """The rows of the Case on the software engine."""
    return run_case(SMALL, Target("software"), Run("r1", "2026-01-31T12:00:00Z", "abc"))


def recorded(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    with RowWriter(folder, "r1") as writer:
        writer.extend({**row, **changes} for row in rows)
    return folder


def mine(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(MINE.format(body))
    return f"{path}:Mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so nothing is missing")
def test_the_recorded_engine_is_restored_and_another_may_be_named(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    folder = recorded(tmp_path, made, engine="deep_gemm", implementation="deep_gemm")
    missing = oproj("replay", SMALL.id, "--in", folder)
    assert missing.exit_code == 3
    assert f"{folder} recorded it for this Case; --engine software replays it" in text(missing)
    other = oproj("replay", SMALL.id, "--in", folder, "--engine", "software")
    assert other.exit_code == 0
    assert f"note: {folder} judged deep_gemm; this replays software" in text(other)


def test_a_crash_and_a_hang_are_failed_rows(tmp_path: Path) -> None:
    for body, says in (("os._exit(7)", "exit code 7"), ("time.sleep(600)", "no result after 9 s")):
        spec = mine(tmp_path, body)
        result = oproj("replay", SMALL.to_json(), "--implementation", spec, "--case-timeout", "9")
        assert result.exit_code == 1, text(result)
        assert says in text(result) and "wo_b bits: fail" in text(result)


def test_a_debugger_gets_the_code_in_its_own_process(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    spec = mine(tmp_path, f"open({str(path)!r}, 'w').write(str(os.getpid()))")
    for more in ([], ["--here"]):
        assert oproj("replay", SMALL.to_json(), "--implementation", spec, *more).exit_code == 0
        assert (int(path.read_text()) == os.getpid()) == bool(more)


def test_of_several_the_one_that_failed_is_replayed(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    spec = mine(tmp_path, "z = z * 2")
    folder = recorded(tmp_path, made)
    failed = {"spec": spec, "implementation": "Mine", "verdict": "fail", "reason": "x"}
    recorded(folder, made[-1:], **failed)
    result = oproj("replay", SMALL.id, "--in", folder)
    assert result.exit_code == 1 and "wo_b bits: fail" in text(result)
    assert f"note: {folder} judged software; this replays {spec}" in text(result)


def test_two_implementations_are_compared_on_the_case(tmp_path: Path) -> None:
    spec = mine(tmp_path, "z = z * 2")
    differs = oproj("replay", SMALL.to_json(), "--implementation", spec, "--against", "software")
    assert differs.exit_code == 1 and "first stage that differs: wo_b" in text(differs)
    assert oproj("replay", SMALL.to_json(), "--against", "software").exit_code == 0


@given(st.lists(st.tuples(st.sampled_from(["software", "own"]), st.sampled_from(["", "a:A", "b:B"]), st.booleans())))
def test_what_failed_comes_first_and_each_once(
    tmp_path_factory: pytest.TempPathFactory, made: list[dict[str, Any]], drawn: list[tuple[str, str, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    with RowWriter(folder, "r1") as writer:
        writer.append({**made[-1], "engine": "software", "spec": "c:C"})
        for engine, spec, fails in drawn:
            verdict = {"verdict": "fail" if fails else "pass"}
            writer.append({**made[-1], "engine": engine, "spec": spec, **verdict})
    found, targets = _look_up(SMALL.id, folder)
    assert found == SMALL and len(set(targets)) == len(targets)

    def target(engine: str, spec: str) -> Target:
        return Target(implementation=spec) if spec else Target("software" if engine == "software" else "auto")

    assert set(targets) == {target(*one[:2]) for one in drawn} | {Target(implementation="c:C")}
    failed = {target(*one[:2]) for one in drawn if one[2]}
    assert set(targets[: len(failed)]) == failed
