"""Runs: rows of every Case in one order for any number of processes, and what raises is a row with its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.case import Case
from conformance.runner import Run, Target, git_revision, run_case, run_cases
from planted import case

RUN = Run("test", "2026-01-31T12:00:00Z", "abc")


def test_a_failure_of_the_implementation_is_a_row_with_its_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    target = Target(implementation=mine(tmp_path, "Raises"))
    cases = [case(seed=seed) for seed in range(2)]
    rows = [row for of_case in run_cases(cases, target, RUN) for row in of_case]
    bad = [row for row in rows if row["stage"] == "wo_b"]
    assert [row["verdict"] for row in bad] == ["fail", "fail", "fail", "not applicable"] * 2
    assert "wo_b raised RuntimeError at " in bad[0]["reason"] and "device-side assert" in bad[0]["reason"]
    assert {row["case_id"] for row in rows} == {c.id for c in cases}
    assert {row["implementation"] for row in rows} == {"Raises"}
    assert Case.from_json(rows[0]["case"]) == cases[0]


def mine(folder: Path, name: str) -> str:
    """A file of its own with the class of that name."""
    path = folder / "mine.py"
    path.write_text(f"from planted import {name}\n")
    return f"{path}:{name}"


def without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "versions")} for row in rows]


def test_rows_are_the_same_in_the_same_order_for_any_number_of_workers() -> None:
    cases = [case(tokens=tokens, family="exact", hidden_size=128, n_groups=2) for tokens in (4, 1, 0)]
    alone = [without_seconds(rows) for rows in run_cases(cases, Target(), RUN)]
    together = [without_seconds(rows) for rows in run_cases(iter(cases), Target(), RUN, workers=2)]
    assert repr(alone) == repr(together)
    assert [rows[0]["tokens"] for rows in together] == [4, 1, 0]
    with pytest.raises(ValueError, match="workers=0"):
        next(run_cases(cases, Target(), RUN, workers=0))


def test_row_says_what_ran_and_where_it_comes_from() -> None:
    row = run_case(case(), Target("software"), Run.now())[0]
    assert (row["engine"], row["implementation"], row["arch"]) == ("software", "software", "sm90")
    versions = json.loads(row["versions"])
    assert versions["torch"] == torch.__version__ and "numba" in versions
    assert row["git_revision"] == git_revision()


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        "import os, sys, time\n"
        "from conformance.runner import Run, Target, run_cases\n"
        "from planted import case\n"
        "if __name__ == '__main__':\n"
        "    cases = [case(tokens=1, seed=seed) for seed in range(9)]\n"
        "    rows = run_cases(cases, Target('software'), Run.now(), workers=2)\n"
        "    next(rows)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        # Its workers hold the other end of the pipe: it ends with the last of them.
        reader = threading.Thread(target=parent.stdout.read, daemon=True)
        reader.start()
        reader.join(30)
        assert not reader.is_alive()
