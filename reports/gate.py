"""The gate: a run against its baselines, one-sided, and unable to pass by accident.

Worse, missing, unknown, failed or not comparable is a problem; better is an improvement that asks for a new
baseline. Nothing compared is a failure.

The software engine is deterministic, so each of its figures must equal the recorded one (up to the last bits of the
float64 reference, `significance.py`) or be better. On hardware the order of a reduction may be free, so margins, RMS
error and bias move from run to run: there a row is judged by its own margin, which the derived bound holds to at most
1, and against the baseline by its counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .aggregate import row_faults
from .baseline import KEYS, Line, baseline_lines, combinations
from .columns import JUDGED, NoRowsError, RowsError
from .findings import Finding, GateResult, exit_code
from .schema import validate
from .significance import COUNTS, FLOATS, direction
from .store import load

__all__ = ["GateResult", "exit_code", "gate", "gate_folder"]

_ONE_ROW = ["arch", "engine", "implementation", "stage", "oracle", "case_id"]

Key = tuple[Any, ...]
Row = dict[str, Any]
Base = dict[Key, Line]


def gate(
    df: pd.DataFrame,
    baseline_dir: str | os.PathLike[str],
    expected_engine: str | None = None,
    expected_archs: Sequence[str] | None = None,
) -> GateResult:
    """Judge a run against `baseline_dir`, a folder of baseline files or one such file.

    expected_engine: the engine that was asked for. Rows of another engine are a problem, and the baselines of
        this engine alone must be met; without it, those of the engines that ran.
    expected_archs: the architectures that were asked for. Each must have run, and only their baselines must be
        met; without it, every architecture that has a baseline of these engines.

    Raises nothing for bad data: unusable rows and baselines are `bad_input` of the result.
    """
    try:
        validate(df)
        engines = set(df["engine"].unique()) if expected_engine is None else {expected_engine}
        base = _read_baselines(Path(baseline_dir), engines, expected_archs)
    except RowsError as error:
        return GateResult([], [], bad_input=[Finding("unusable", str(error))])
    faults = row_faults(df)
    compared = int(df.loc[df["verdict"].isin(JUDGED), "compared"].sum())
    groups = combinations(df)
    problems = [] if compared else [Finding("empty", "nothing was compared")]
    problems += [
        _of(row, "empty", "nothing compared") for row in _rows(groups[groups["verdict"] == "nothing compared"])
    ]
    problems += _failed_rows(df, faults)
    problems += _repeated_rows(df)
    problems += _other_engine(df, expected_engine)
    problems += _absent_archs(df, expected_archs)
    asked = df if expected_engine is None else df[df["engine"] == expected_engine]
    ran = {_key(row): row for row in _rows(groups) if row["engine"] in engines}
    against, improvements = _against_baselines(ran, base, asked)
    failed = int((faults != "").sum())
    checked = [_of(row, "", "") for row in {**{k: line.row for k, line in base.items()}, **ran}.values()]
    return GateResult(problems + against, improvements, compared=compared, failed=failed, checked=checked)


def gate_folder(
    path: str | os.PathLike[str],
    baseline_dir: str | os.PathLike[str],
    expected_engine: str | None = None,
    expected_archs: Sequence[str] | None = None,
) -> GateResult:
    """`gate` of the rows at `path` (a folder of parts or a file), unreadable and absent ones included.

    What cannot be read is `bad_input`; a place without rows has compared nothing.
    """
    try:
        df = load(path)
    except NoRowsError as error:
        return GateResult([Finding("empty", str(error))], [])
    except RowsError as error:
        return GateResult([], [], bad_input=[Finding("unusable", str(error))])
    return gate(df, baseline_dir, expected_engine, expected_archs)


def _read_baselines(source: Path, engines: Iterable[str], archs: Sequence[str] | None) -> Base:
    if not source.exists():
        raise RowsError(f"{source}: no such baseline file or folder")
    paths = sorted(source.glob("*.csv")) if source.is_dir() else [source]
    found = [line for path in paths for line in baseline_lines(path)]
    wanted = set(engines)
    kept = [line for line in found if line.row["engine"] in wanted and (archs is None or line.row["arch"] in archs)]
    return {_key(line.row): line for line in kept}


def _rows(table: pd.DataFrame) -> list[Row]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _key(row: Row) -> Key:
    return tuple(row[name] for name in KEYS)


def _of(row: Row, kind: str, text: str, case: pd.Series | None = None, **more: Any) -> Finding:
    """A finding about the combination of `row`, shown by the row `case` of the run."""
    keys = {name: row[name] for name in KEYS}
    if case is not None:
        more |= {name: str(case[name]) for name in ("case_id", "case", "spec")} | {"tokens": int(case["tokens"])}
    return Finding(kind, text, **keys, **more)


def _failed_rows(df: pd.DataFrame, faults: pd.Series) -> list[Finding]:
    """One per combination and fault, so that a broken kernel gives a line and not a thousand."""
    bad = df[faults != ""].assign(fault=faults[faults != ""])
    found = []
    for _, rows in bad.groupby([*KEYS, "fault"], observed=True, sort=False):
        first = rows.iloc[0]
        text = (
            f"{first['fault']} in {len(rows)} row(s), the first case {first['case_id']} of {first['tokens']} token(s)"
        )
        figure, run = "mismatched", float(rows["mismatched"].sum())
        if not run:
            figure, run = "margin_max", float(first["margin_max"])
        found.append(_of(first.to_dict(), "failed", text, first, figure=figure, run=run))
    return found


def _repeated_rows(df: pd.DataFrame) -> list[Finding]:
    repeated = df[df.duplicated(_ONE_ROW)]
    if repeated.empty:
        return []
    first = repeated.iloc[0]
    text = f"{len(repeated)} row(s) occur twice, the first of case {first['case_id']}"
    return [_of(first.to_dict(), "repeated", text, first)]


def _other_engine(df: pd.DataFrame, expected: str | None) -> list[Finding]:
    if expected is None:
        return []
    pairs = df.loc[df["engine"] != expected, ["arch", "engine"]].drop_duplicates().to_numpy()
    return [
        Finding("engine", f"ran on engine {engine}, asked for was {expected}", arch=arch, engine=engine)
        for arch, engine in pairs
    ]


def _absent_archs(df: pd.DataFrame, expected: Sequence[str] | None) -> list[Finding]:
    ran = set(df["arch"].unique())
    return [Finding("absent", "asked for, and did not run", arch=arch) for arch in expected or () if arch not in ran]


def _against_baselines(run: dict[Key, Row], base: Base, df: pd.DataFrame) -> tuple[list[Finding], list[Finding]]:
    """Problems and improvements of a run's combinations against those of the baselines."""
    ran, recorded = {key[:2] for key in run}, {key[:2] for key in base}
    problems = [
        Finding("absent", f"no baseline file {arch}-{engine}.csv", arch=arch, engine=engine)
        for arch, engine in sorted(ran - recorded)
    ]
    problems += [
        Finding("absent", f"has a baseline on engine {engine}, and did not run on it", arch=arch, engine=engine)
        for arch, engine in sorted(recorded - ran)
    ]
    for key, line in base.items():
        if key not in run and key[:2] in ran:
            problems.append(_of(line.row, "missing", "missing in the run", file=line.file, line=line.number))
    problems += [_of(run[k], "unknown", "has no baseline row") for k in run if k not in base and k[:2] in recorded]
    worse, better = _compare_all([(run[key], line) for key, line in base.items() if key in run], df)
    return problems + worse, better


def _compare_all(pairs: list[tuple[Row, Line]], df: pd.DataFrame) -> tuple[list[Finding], list[Finding]]:
    places = df.groupby(list(KEYS), observed=True, sort=False).indices
    problems, improvements = [], []
    for new, line in pairs:
        worse, better = compare(new, line.row)
        rows = df.iloc[places[_key(new)]]
        fewer = "compared" in worse
        # An RMS error or a bias of some of the elements says nothing about that of all.
        told = [name for name in worse if not (fewer and name in ("rms_rel_error", "signed_bias"))]
        problems += [_moved("fewer" if name == "compared" else "worse", name, new, line, rows) for name in told]
        # Fewer elements, or a figure that got worse: what looks better beside it may be what was left out.
        improvements += [] if worse else [_moved("better", name, new, line, rows) for name in better]
    return problems, improvements


def compare(new: Row, old: Row) -> tuple[list[str], list[str]]:
    """The figures that are worse and those that are better in one combination."""
    names = (*COUNTS, *FLOATS) if new["engine"] == "software" else COUNTS
    words = {name: direction(name, new, old) for name in names}
    return [n for n in names if words[n] == "worse"], [n for n in names if words[n] == "better"]


def _moved(kind: str, name: str, new: Row, line: Line, rows: pd.DataFrame) -> Finding:
    text = f"{'better' if kind == 'better' else 'worse'} {name} {new[name]!r}, the baseline has {line.row[name]!r}"
    if kind == "better":
        text += "; rebaseline to keep it"
    worst = rows.iloc[int(rows[name].abs().fillna(-1).to_numpy().argmax())]
    place = {"file": line.file, "line": line.number}
    figure = {"figure": name, "run": float(new[name]), "baseline": float(line.row[name])}
    return _of(new, kind, text, worst, **figure, **place)
