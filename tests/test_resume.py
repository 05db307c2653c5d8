"""Stopped runs: a killed or terminated one goes on to the same rows, and never behind rows of another run."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

import conformance.resume as resume
import conformance.run_command as run_command
import conformance.runner as runner
from conformance.cli import app
from conformance.resume import Earlier, finished_cases, look_back
from conformance.runner import Run, Target, judged_by, run_case
from planted import case
from reports.store import RowWriter, load

ROOT = Path(__file__).parents[1]
PROGRAM = """
from conformance import progress, resume, run_command, runner
from conformance.cli import main
run_command._FLUSH_EVERY = {flush}
progress.LogLines.__init__.__kwdefaults__["every"] = 0.0
resume.git_revision = runner.git_revision = lambda: "abc"
if __name__ == "__main__":
    main()
"""
ASKED = ("--arch", "sm90,sm100", "--preset", "v4-flash", "--tp", "8", "--tokens", "2", "--examples", "2")
CASES = 4
OF_THE_TIME = ["run_id", "time_utc", "seconds"]


def start(folder: Path, *more: str, flush: int = 500) -> subprocess.Popen[str]:
    """`oproj run` in a process of its own that writes a part after ``flush`` rows and a log line after each Case."""
    program = folder.parent / f"program{flush}.py"
    program.write_text(PROGRAM.format(flush=flush))
    command = [sys.executable, str(program), "run", *ASKED, "--out", str(folder), *more]
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=where)


def finish(process: subprocess.Popen[str]) -> str:
    """All that a run says, which must pass."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, out + errors
    return out + errors


def rows_of(folder: Path) -> pd.DataFrame:
    """What a run says of each Case, in one order, without what is of the time and the processes it ran in."""
    df = load(folder).drop(columns=OF_THE_TIME).sort_values(["case_id", "stage", "oracle"], ignore_index=True)
    return df.assign(versions=df["versions"].astype(object).str.replace(r'"threads": "\d+"', "", regex=True))


def oproj(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def revision(monkeypatch: pytest.MonkeyPatch) -> str:
    """That of ``PROGRAM``, whatever is edited meanwhile."""
    for module in (resume, runner):
        monkeypatch.setattr(module, "git_revision", lambda: "abc")
    return "abc"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert oproj("run", *ASKED, "--out", folder).exit_code == 0
    return rows_of(folder).assign(git_revision="abc").astype({"git_revision": "category"})


def test_a_run_killed_halfway_goes_on_to_the_rows_of_a_whole_run(tmp_path: Path, whole: pd.DataFrame) -> None:
    folder = tmp_path / "run"
    process = start(folder, flush=1)
    while len(list(folder.glob("*.parquet"))) < 2 and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (folder / ".rows-x-0003.parquet.abc.tmp").write_bytes(b"PAR1 half a part")
    before = load(folder)
    assert 2 <= before["case_id"].nunique() < CASES and set(before["case_id"]) == finished_cases(folder)

    said = finish(start(folder, "--resume", flush=1))
    assert f"{before['case_id'].nunique() + 1} of {CASES} Cases" in said and f"of {CASES} Cases, tables" in said
    after = load(folder)
    assert set(after["run_id"]) == set(before["run_id"]) and set(after["time_utc"]) == set(before["time_utc"])
    pd.testing.assert_frame_equal(after.iloc[: len(before)], before, check_categorical=False)
    pd.testing.assert_frame_equal(rows_of(folder), whole)
    assert len(load(folder / "rows.csv")) == len(after) and not list(folder.glob(".*"))


def test_a_terminated_run_keeps_its_rows_says_how_to_go_on_and_goes_on(
    tmp_path: Path, whole: pd.DataFrame, revision: str
) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--workers", "2")
    assert process.stderr is not None
    lines = iter(process.stderr)
    assert any("1 of 4 Cases, 0 failed, 1 min left" in line for line in lines)
    process.terminate()
    said = " ".join(lines)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert f"rows in {folder} are valid" in said and f"--resume --out {folder} goes on" in said
    assert 1 <= len(finished_cases(folder)) < CASES
    assert not (folder / "report.html").exists()
    assert oproj("run", *ASKED, "--out", folder, "--resume").exit_code == 0
    pd.testing.assert_frame_equal(rows_of(folder), whole)


SMALL = {"tp_size": 1, "tp_rank": 0, "tokens": 1, "n_groups": 1, "o_lora_rank": 512, "hidden_size": 128}
TARGET = Target("software")


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    """The rows of a Case."""
    return run_case(case(**SMALL), TARGET, Run("r1", "2026-01-31T12:00:00Z", runner.git_revision()))


def left(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    """A folder with ``rows``, of which the last is changed."""
    changed = [*rows[:-1], {**rows[-1], **changes}]
    for run_id in dict.fromkeys(row["run_id"] for row in changed):
        with RowWriter(folder, run_id) as writer:
            writer.extend(row for row in changed if row["run_id"] == run_id)
    return folder


def look(folder: Path, *more: dict[str, Any]) -> Earlier | None:
    cases = [case(**SMALL), *(case(**{**SMALL, **fields}) for fields in more)]
    return look_back(folder, cases, TARGET, {"sm90": judged_by(TARGET, "sm90")})


def without_git(monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]]) -> None:
    """The revision stays what it was, whatever is edited meanwhile."""
    monkeypatch.setattr(resume, "git_revision", lambda: made[0]["git_revision"])


def test_what_is_there_is_taken_up(tmp_path: Path, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    without_git(monkeypatch, made)
    versions = json.dumps({**json.loads(made[0]["versions"]), "threads": "7"})
    left(tmp_path, made, versions=versions, verdict="fail", margin_max=math.nan)
    earlier = look(tmp_path, {"seed": 9})
    run = Run("r1", "2026-01-31T12:00:00Z", made[0]["git_revision"])
    assert earlier == Earlier(run, frozenset([made[0]["case_id"]]), 1)
    assert finished_cases(tmp_path) == set(earlier.finished)


def test_no_rows_are_no_run(tmp_path: Path) -> None:
    assert look(tmp_path) is None and look(tmp_path / "absent") is None
    assert finished_cases(tmp_path / "absent") == set()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": "deep_gemm"}, "sm90: engine is 'deep_gemm' in its rows and 'software' here"),
        ({"implementation": "Mine"}, "sm90: implementation is 'Mine' in its rows and 'software' here"),
        ({"spec": "mine.py:Mine"}, "sm90: spec is 'mine.py:Mine' in its rows and '' here"),
        ({"versions": '{"torch": "1.0"}'}, "torch is '1.0' in its rows and '2."),
        ({"case_id": "c9"}, "holds 1 Case(s) that this run does not have, the first c9"),
        ({"arch": "sm100", "case_id": "c9"}, "holds 1 Case(s) that this run does not have, the first c9"),
        ({"run_id": "r2"}, "holds rows of 2 runs: r1, r2"),
        ({"git_revision": "0ld"}, "holds rows of 2 runs: r1"),
    ],
)
def test_rows_of_another_run_are_refused(
    tmp_path: Path,
    made: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    says: str,
) -> None:
    without_git(monkeypatch, made)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}: .*{re.escape(says)}"):
        look(left(tmp_path, made, **changes))


def test_rows_of_another_revision_are_refused(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    revision = made[0]["git_revision"]
    with pytest.raises(ValueError, match=f"git_revision is '0ld' in its rows and '{runner.git_revision()}' here"):
        look(left(tmp_path, [{**row, "git_revision": "0ld"} for row in made]))
    assert revision != "0ld"


def test_rows_that_cannot_be_used_are_refused_and_named(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    (path,) = left(tmp_path, made).iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"--resume cannot go on .*{path.name}: truncated"):
        finished_cases(tmp_path)


def test_the_command_goes_on_only_where_it_may(tmp_path: Path, revision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("run", "--arch", "sm90", "--preset", "v4-flash", "--tp", "8", "--family", "exact", "--resume")
    assert "name it with --out DIR" in oproj(*asked).stderr
    folder = tmp_path / "new"
    assert oproj(*asked, "--tokens", "2", "--out", folder).exit_code == 0
    first = load(folder)

    def nothing(cases: Any, *arguments: Any, **options: Any) -> Any:
        assert list(cases) == []
        yield from ()

    with monkeypatch.context() as idle:
        idle.setattr(run_command, "run_cases", nothing)
        (folder / "report.html").unlink()
        assert oproj(*asked, "--tokens", "2", "--out", folder).exit_code == 0
    pd.testing.assert_frame_equal(load(folder), first)
    assert (folder / "report.html").exists()

    refused = oproj(*asked, "--tokens", "3", "--out", folder)
    assert refused.exit_code == 2 and "Case(s) that this run does not have" in refused.stderr
    pd.testing.assert_frame_equal(load(folder), first)
    longer = oproj(*asked, "--tokens", "2,3", "--out", folder)
    assert longer.exit_code == 0 and set(load(folder)["tokens"]) == {2, 3}
    assert set(load(folder)["run_id"]) == set(first["run_id"])
