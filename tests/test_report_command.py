"""`oproj report` against another run and with a kill matrix, `oproj export`, and `oproj --version`."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import oproj as package
from conformance import cli
from conformance.cli import app
from reports.store import RowWriter
from reports_rows import row

KILLS = {
    "version": 1,
    "faults": [{"fault": "k-tail", "arch": "sm90", "killed": True, "checks": ["wo_a/bits"]}],
    "variants": [],
}


def oproj(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def text(result: Result) -> str:
    return " ".join((result.output + result.stderr).split())


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """An earlier run, and one in which a Case fails, one is better, one is new and one is as it was."""
    worse = {"case_id": "c1", "verdict": "fail", "mismatched": 3, "margin_max": 1.5, "spec": "mine.py:Mine"}
    rows = {
        "earlier": [{"case_id": f"c{n}"} for n in range(3)],
        "now": [{"case_id": "c0", "margin_max": 0.25}, worse, {"case_id": "c2"}, {"case_id": "c3"}],
    }
    for name, changes in rows.items():
        with RowWriter(tmp_path / name, name) as writer:
            writer.extend(row(run_id=name, **change) for change in changes)
    return tmp_path / "earlier", tmp_path / "now"


def test_a_run_is_reported_against_another(runs: tuple[Path, Path], tmp_path: Path) -> None:
    earlier, now = runs
    page = tmp_path / "page.html"
    said = oproj("report", now, "--against", earlier, "--html", page)
    assert said.exit_code == 0
    assert "from run a to run b" in text(said) and "3 of 3 rows that changed" in text(said)
    assert said.output.count("--implementation mine.py:Mine") == 2  # in the table's lines, and in those of the changes
    html = page.read_text(encoding="utf-8")
    assert "From run earlier (a) to this one (b): 1 now fails, 1 better, 1 only in b, 1 equal." in html
    assert 'href="#since"' in html and "3 of 3 rows that changed" in html

    markdown = oproj("report", now, "--against", earlier, "--format", "md").output
    assert markdown.startswith("| arch | stage | oracle | now fails | better | only in b | equal |")
    lines = list(csv.DictReader(io.StringIO(oproj("report", now, "--against", earlier, "--format", "csv").output)))
    assert [line["change"] for line in lines] == ["now fails", "better", "only in b", "equal"]


def test_a_page_without_another_run_has_nothing_of_it(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert oproj("report", runs[0], "--html", tmp_path / "page.html").exit_code == 0
    assert 'id="since"' not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_another_run_that_is_none_is_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert oproj("report", runs[0], "--against", tmp_path / "none").exit_code == 2
    (tmp_path / "empty").mkdir()
    assert oproj("report", runs[0], "--against", tmp_path / "empty").exit_code == 4


def test_the_kill_matrix_is_put_on_the_page(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page, kills = tmp_path / "page.html", tmp_path / "kills.json"
    kills.write_text(json.dumps(KILLS))
    assert oproj("report", runs[0], "--html", page, "--faults", kills).exit_code == 0
    assert "1 of 1 faults caught on every architecture" in page.read_text(encoding="utf-8")
    without = oproj("report", runs[0], "--faults", kills)
    assert without.exit_code == 2 and "say with --html FILE where to write it" in text(without)
    kills.write_text("{}")
    foreign = oproj("report", runs[0], "--html", page, "--faults", kills)
    assert foreign.exit_code == 2 and "kills.json: not a file of `oproj faults --json`" in text(foreign)


def test_stages_are_exported(tmp_path: Path) -> None:
    result = oproj("export", "--out", tmp_path / "set", "--preset", "v4-flash", "--family", "exact", "--tokens", "1")
    assert result.exit_code == 0, text(result)
    names = {path.parent.parent.name for path in (tmp_path / "set").rglob("*.json")}
    assert names == {"definitions"} and f"definitions in {tmp_path / 'set'}" in text(result)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    assert oproj("export", "--out", tmp_path / "other").exit_code == 2


def test_the_version_names_the_revision_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "git_revision", lambda: "abc-dirty")
    assert oproj("--version").output == f"oproj {package.__version__}, git abc-dirty\n"
    monkeypatch.setattr(cli, "git_revision", lambda: "")
    assert re.fullmatch(r"oproj \d+\.\d+\.\d+\n", oproj("--version").output)
