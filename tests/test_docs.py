"""What the documents say is so: the five questions, the workflow's commands, the exit codes, the table of calc_diff."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
import yaml

from conformance.case import Case
from conformance.cli import app
from conformance.faults.registry import FAULTS
from conformance.implementation import SoftwareImplementation
from conformance.stages import run_stages
from reports import RowWriter, from_rows
from reports.columns import COLUMNS, ORACLES
from reports_rows import row

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
QUESTIONS = runpy.run_path(str(DOCS / "five-questions.py"))


def history() -> pd.DataFrame:
    """Three runs of two architectures; wo_b of sm100 fails from the second on, for 64 tokens of one family."""
    rows = []
    for number in range(3):
        for arch in ("sm90", "sm100"):
            for stage in ("wo_a", "wo_b"):
                for family, tokens in (("normal", 1), ("normal", 64), ("wide", 1), ("wide", 64)):
                    bad = number > 0 and (arch, stage, family, tokens) == ("sm100", "wo_b", "wide", 64)
                    failed = {"verdict": "fail", "mismatched": 7, "margin_max": 2.5, "reason": "x"} if bad else {}
                    place = {"arch": arch, "stage": stage, "family": family, "tokens": tokens}
                    when = {"run_id": f"r{number}", "time_utc": f"2026-01-0{number + 1}T00:00:00Z"}
                    rows.append(
                        row(**place, **when, git_revision=f"rev{number}", case_id=f"{arch}{family}{tokens}", **failed)
                    )
    return from_rows(rows)


def test_the_questions_point_at_the_fault() -> None:
    df = history()
    newest = df[df["run_id"] == "r2"]
    stages = QUESTIONS["which_stage"](newest)
    assert stages[stages["failed"] > 0].index.tolist() == [("wo_b", "bound")]
    assert stages.loc[("wo_b", "bound"), ["failed", "rows", "bad_elements", "margin"]].tolist() == [1, 8, 7, 2.5]
    archs = QUESTIONS["which_arch"](newest)
    assert archs.loc["wo_b", "sm100"] == 1 / 4 and archs.to_numpy().sum() == 1 / 4
    (since,) = QUESTIONS["since_when"](df).to_dict("records")
    assert (since["arch"], since["stage"]) == ("sm100", "wo_b")
    assert since["last that passed"].startswith("rev0 ") and since["first that fails"].startswith("rev1 ")
    inputs = QUESTIONS["which_inputs"](newest)
    assert set(inputs.index[:2]) == {"family = wide", "tokens = 64"} and inputs["times overall"].iloc[0] == 2.0
    assert inputs.loc["family = normal", "failed"] == 0


def test_how_bad_separates_the_arithmetic_from_the_format() -> None:
    rows = [row(oracle="bound", rms_rel_error=0.25, compared=300, signed_bias=-0.5)]
    rows += [row(oracle="bound", rms_rel_error=0.5, compared=100, signed_bias=0.5, case_id="c1")]
    rows += [row(oracle="format", rms_rel_error=0.75, compared=400)]
    (answer,) = QUESTIONS["how_bad"](from_rows(rows)).to_dict("records")
    expected = ((300 * 0.25**2 + 100 * 0.5**2) / 400) ** 0.5
    assert answer["arithmetic"] == pytest.approx(expected) and answer["with format"] == pytest.approx(0.75)
    assert answer["arithmetic / format"] == pytest.approx(expected / 0.75) and answer["bias"] == pytest.approx(-0.25)


def test_the_script_answers_all_five_for_folders_of_runs(tmp_path: Path) -> None:
    df = history()
    for run_id in ("r0", "r1", "r2"):
        with RowWriter(tmp_path / run_id, run_id) as writer:
            writer.extend(df[df["run_id"] == run_id].to_dict("records"))  # type: ignore[arg-type]
    command = [sys.executable, str(DOCS / "five-questions.py"), *(str(tmp_path / name) for name in ("r2", "r1", "r0"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^.*\?$", done.stdout, re.MULTILINE) == list(QUESTIONS["QUESTIONS"])
    assert re.search(r"sm100 +software +software +wo_b +rev0 .* +rev1 ", done.stdout)


def workflow() -> dict[str, Any]:
    return yaml.safe_load((DOCS / "workflow.yml").read_text(encoding="utf-8"))


def commands() -> list[list[str]]:
    """Each `run` of the workflow as words, with every value of its job's matrix in turn."""
    found = []
    for job in workflow()["jobs"].values():
        archs = job.get("strategy", {}).get("matrix", {}).get("arch", [""])
        for step in job["steps"]:
            for arch in archs if "run" in step else []:
                found.append(shlex.split(step["run"].replace("${{ matrix.arch }}", arch)))
    return found


def test_the_workflow_has_a_job_without_a_gpu_and_one_per_gpu_architecture() -> None:
    jobs = workflow()["jobs"]
    assert jobs["software"]["runs-on"] == "ubuntu-latest"
    assert jobs["gpu"]["strategy"]["matrix"]["arch"] == ["sm90", "sm100", "sm120"]
    assert "self-hosted" in jobs["gpu"]["runs-on"]
    assert all(
        re.fullmatch(r"[\w-]+/[\w/-]+@v\d+", s["uses"]) for j in jobs.values() for s in j["steps"] if "uses" in s
    )


def test_the_workflows_commands_exist_with_their_options() -> None:
    sessions = set(re.findall(r"@nox\.session\ndef (\w+)\(", (ROOT / "noxfile.py").read_text()))
    click = typer.main.get_command(app)
    gates = 0
    for words in commands():
        if words[:2] == ["pip", "install"]:
            continue
        assert words[:2] == ["nox", "-s"] and words[2] in sessions, words
        if "--" in words:
            known = {name for parameter in click.commands[words[2]].params for name in parameter.opts}  # type: ignore[attr-defined]
            options = {word for word in words[words.index("--") + 1 :] if word.startswith("--")}
            assert options <= known, options - known
            gates += words[2] == "gate"
    assert gates == 4


def test_the_documents_name_every_exit_code_oracle_and_figure_of_a_row() -> None:
    ci, tables = ((DOCS / name).read_text(encoding="utf-8") for name in ("ci.md", "reading-the-tables.md"))
    assert set(re.findall(r"^\| (\d) \|", ci, re.MULTILINE)) == {"1", "2", "4"}
    assert all(f"| `{oracle}` |" in tables for oracle in ORACLES)
    figures = [c.name for c in COLUMNS if c.dtype == "float64" and c.name != "seconds"]
    assert [name for name in figures if f"`{name}`" not in tables] == []


def described() -> dict[str, list[str]]:
    text = (DOCS / "reading-the-tables.md").read_text(encoding="utf-8")
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if "e-0" in line]
    return {cells[0]: cells[1:] for cells in rows if len(cells) == 5}


@pytest.mark.parametrize("name", ["right", "k-tail-one-row", "no-promotion"])
def test_the_table_of_calc_diff_has_the_figures_of_a_run(name: str) -> None:
    case = Case("sm90", "v4-pro", 32, family="normal", tp_size=8, o_lora_rank=256, hidden_size=256)
    faults = {fault.name: fault for fault in FAULTS}
    judged = faults[name].implementation("sm90") if name in faults else SoftwareImplementation("sm90")
    found = {r.oracle: r.comparison for r in run_stages(case, judged) if r.stage == "wo_a"}
    calc_diff, passes, margin, _ = described()[name]
    assert f"{found['format'].calc_diff:.2e}" == calc_diff and f"{found['bound'].margin_max:.3g}" == margin
    assert (found["format"].calc_diff < 1e-3) == (passes == "passes")
    assert (found["bound"].margin_max <= 1) == (name == "right")
