"""`oproj gate` and `rebaseline` on inputs broken in every way: the documented exit code, and the thing by name."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import junitparser
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from conformance.cli import app
from reports import RowWriter, from_rows, load, write_baselines
from reports.gate import gate_folder
from reports.gate_output import print_gate
from reports.schema import ARROW_SCHEMA
from reports_rows import GOOD, SKIPPED, frame, run

WIDE = "wo_a bound, preset v4-pro, TP 8, family wide"


def oproj(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def text(result: Result) -> str:
    return " ".join((result.output + result.stderr).split())


def save(df: pd.DataFrame, folder: Path) -> Path:
    with RowWriter(folder, "r1") as writer:
        writer.extend(df.to_dict("records"))  # type: ignore[arg-type]
    return folder


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with the run GOOD, and one with its baselines."""
    write_baselines(frame(*GOOD), tmp_path / "baselines", "first")
    return save(run(), tmp_path / "run"), tmp_path / "baselines"


def part(folder: Path) -> Path:
    (path,) = folder.glob("*.parquet")
    return path


def rows(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[[Path, Path], object]:
    """The run with its frame changed, written without the checks of a writer."""

    def plant(folder: Path, baselines: Path) -> None:
        df = change(load(folder))
        if list(df.columns) == ARROW_SCHEMA.names:
            pq.write_table(pa.Table.from_pylist(df.to_dict("records"), schema=ARROW_SCHEMA), part(folder))
        else:
            df.to_parquet(part(folder), index=False)

    return plant


def instead(**changes: Any) -> Callable[[Path, Path], object]:
    """The run with other values in the row of family wide."""

    def change(df: pd.DataFrame) -> pd.DataFrame:
        first = df["family"] == "wide"
        return df.assign(**{name: df[name].astype(object).where(~first, value) for name, value in changes.items()})

    return rows(change)


def rewrite(name: str, pattern: str, replacement: str) -> Callable[[Path, Path], object]:
    def plant(folder: Path, baselines: Path) -> None:
        before = (baselines / name).read_text()
        (baselines / name).write_text(re.sub(pattern, replacement, before, count=1))
        assert (baselines / name).read_text() != before

    return plant


def truncated(folder: Path, baselines: Path) -> None:
    part(folder).write_bytes(part(folder).read_bytes()[:-50])


def emptied(folder: Path, baselines: Path) -> None:
    part(folder).unlink()


def foreign(folder: Path, baselines: Path) -> None:
    (folder / "other.parquet").write_bytes(part(folder).read_bytes())


def skipped(folder: Path, baselines: Path) -> None:
    emptied(folder, baselines)
    save(from_rows({**row, **SKIPPED} for row in run().to_dict("records")), folder)


def no_baseline_file(folder: Path, baselines: Path) -> None:
    (baselines / "sm90-software.csv").unlink()


def no_baselines(folder: Path, baselines: Path) -> None:
    for path in [*baselines.iterdir()]:
        path.unlink()
    baselines.rmdir()


def foreign_baseline(folder: Path, baselines: Path) -> None:
    (baselines / "notes.csv").write_text("a,b\n1,2\n")


BROKEN: dict[str, tuple[Callable[[Path, Path], object], int, str]] = {
    "row dropped": (rows(lambda df: df[df["family"] != "wide"]), 1, "sm90: has a baseline on engine software, and did"),
    "row of one oracle dropped": (
        rows(lambda df: df[df["oracle"] != "attainable"]), 1, "attainable, .* family normal: missing in the run"
    ),
    "column dropped": (rows(lambda df: df.drop(columns="margin_max")), 2, r"r1-0000\.parquet: missing .*margin_max"),
    "column added": (rows(lambda df: df.assign(colour="red")), 2, r"foreign column\(s\): colour"),
    "other version": (rows(lambda df: df.assign(schema_version=1)), 2, "schema_version must be 2, found 1"),
    "NaN margin": (instead(margin_max=math.nan), 1, f"{WIDE}: a margin is NaN"),
    "worse margin": (instead(margin_max=0.8), 1, "sm90 +software +wo_a +bound +v4-pro +8 +3 +wide +margin_max +0.8 "),
    "new mismatch": (instead(mismatched=1), 1, f"{WIDE}: passed with mismatched elements"),
    "failed row": (instead(verdict="fail", mismatched=2, reason="x"), 1, f"{WIDE}: the comparison failed in 1 row"),
    "more bias": (instead(signed_bias=2.0**-10), 1, "wide +signed_bias +0.000976562"),
    "fewer elements": (instead(compared=10), 1, f"{WIDE}: worse compared 10, the baseline has 1000"),
    "renamed arch": (instead(arch="sm91"), 1, "sm91: no baseline file sm91-software.csv"),
    "other engine": (instead(engine="deep_gemm"), 1, "sm90: ran on engine deep_gemm, asked for was software"),
    "row twice": (rows(lambda df: pd.concat([df, df.iloc[:1]])), 1, r"1 row\(s\) occur twice, the first of case c0"),
    "empty run": (emptied, 4, r"run: holds no rows-<run_id>-<nnnn>\.parquet"),
    "nothing judged": (skipped, 4, "nothing was compared"),
    "truncated Parquet": (truncated, 2, r"rows-r1-0000\.parquet: truncated or not a Parquet file"),
    "foreign file": (foreign, 2, r"other\.parquet: foreign file"),
    "no baseline file": (no_baseline_file, 1, "sm90: no baseline file sm90-software.csv"),
    "no baselines": (no_baselines, 2, "baselines: no such baseline file or folder"),
    "foreign baseline": (foreign_baseline, 2, r"notes\.csv: missing column\(s\): arch"),
    "baseline column": (rewrite("sm90-software.csv", "margin_max", "margin"), 2, r"sm90-software\.csv: missing .*_max"),
    "baseline cell": (rewrite("sm90-software.csv", r"0\.75", "x"), 2, "line 2: margin_max must be a number, got 'x'"),
}  # fmt: skip


def test_a_run_that_holds_exits_with_0(places: tuple[Path, Path]) -> None:
    result = oproj("gate", places[0], "--baseline", places[1], "--engine", "software", "--arch", "sm90,sm100")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "gate passed; 3,000 elements compared"


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_input_exits_with_its_code_and_names_the_thing(places: tuple[Path, Path], name: str) -> None:
    plant, code, message = BROKEN[name]
    plant(*places)
    out = places[0].parent / "junit.xml"
    result = oproj(
        "gate", places[0], "--baseline", places[1], "--engine", "software", "--arch", "sm90,sm100", "--junit", out
    )
    assert result.exit_code == code, result.output
    assert re.search(message, text(result)), result.output
    counts = junitparser.JUnitXml.fromfile(str(out))
    assert counts.failures + counts.errors > 0


def test_a_partial_run_is_told_in_a_few_lines_and_asks_for_no_rebaseline(tmp_path: Path) -> None:
    whole = [{"family": f"f{i}", "stage": stage, "margin_max": 0.75} for i in range(50) for stage in ("wo_a", "wo_b")]
    write_baselines(frame(*whole), tmp_path / "baselines", "first")
    fewer = {"family": "f0", "stage": "wo_a", "compared": 10, "margin_max": 0.5}
    save(frame(fewer), tmp_path / "run")
    short = oproj("gate", tmp_path / "run", "--baseline", tmp_path / "baselines")
    assert short.exit_code == 1
    assert len(short.output.splitlines()) < 12
    assert "sm90 software: 99 times: a row of the baseline is missing in the run; the first 3:" in short.output
    assert "better" not in short.output and "rebaseline" not in short.output
    whole_text = oproj("gate", tmp_path / "run", "--baseline", tmp_path / "baselines", "--verbose").output
    assert whole_text.count("missing in the run") == 99


def test_a_better_run_passes_and_asks_for_a_rebaseline_which_then_says_what_changed(places: tuple[Path, Path]) -> None:
    folder, baselines = places
    instead(margin_max=0.5)(folder, baselines)
    result = oproj("gate", folder, "--baseline", baselines)
    assert result.exit_code == 0
    assert "1 figure(s) better than the baseline: `oproj rebaseline DIR --reason ...` keeps them" in text(result)
    written = oproj("rebaseline", folder, "--baseline", baselines, "--reason", "a better sum")
    assert written.exit_code == 0, written.output
    assert re.search(r"margin_max better \| *1 \| 0\.75 -> 0\.5 \| v4-pro, TP 8, wide", written.output)
    assert "a better sum" in (baselines / "CHANGES.md").read_text()
    assert "better" not in oproj("gate", folder, "--baseline", baselines).output


def test_a_rebaseline_of_a_partial_run_is_refused_unless_fewer_rows_are_meant(places: tuple[Path, Path]) -> None:
    folder, baselines = places
    instead(family="new")(folder, baselines)
    refused = oproj("rebaseline", folder, "--baseline", baselines, "--reason", "partial")
    assert refused.exit_code == 2
    assert "the run lacks 1 row(s) of the baselines, the first: sm90 software software: wo_a bound" in text(refused)
    assert "partial" not in (baselines / "CHANGES.md").read_text()
    meant = oproj("rebaseline", folder, "--baseline", baselines, "--reason", "partial", "--fewer")
    assert meant.exit_code == 0, meant.output


def test_a_rebaseline_of_a_failed_run_is_refused(places: tuple[Path, Path]) -> None:
    folder, baselines = places
    instead(verdict="fail", mismatched=2, reason="x")(folder, baselines)
    result = oproj("rebaseline", folder, "--baseline", baselines, "--reason", "it is red")
    assert result.exit_code == 2 and "1 failed row(s); the first" in text(result)


@pytest.mark.parametrize("width", [40, 80, 110, 200])
def test_no_terminal_is_too_narrow_for_the_names(places: tuple[Path, Path], width: int) -> None:
    instead(margin_max=0.8)(*places)
    out = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    print_gate(gate_folder(*places), console=out)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert all(word in shown for word in ("sm90", "wo_a", "bound", "v4-pro", "wide", "margin_max", "0.8", "0.75"))


def test_an_engine_that_did_not_run_is_asked_for_in_plain_words(places: tuple[Path, Path]) -> None:
    result = oproj("gate", places[0], "--baseline", places[1], "--engine", "deep_gemm")
    assert result.exit_code == 1
    assert "sm90: ran on engine software, asked for was deep_gemm" in result.output
    assert "or leave --engine out to gate the engine that ran" in text(result)
    assert "no baseline file" not in result.output
