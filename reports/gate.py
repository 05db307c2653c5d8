"""The gate: a run against its baselines, one-sided, and unable to pass by accident.

Worse, missing, unknown, failed or not comparable is a problem; better is an improvement that asks for a new
baseline. Nothing compared is a failure.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Context, Decimal
from pathlib import Path
from typing import Any

import pandas as pd

from .aggregate import row_faults
from .baseline import FLOATS, KEYS, combinations, nothing_compared, read_baseline, where
from .columns import JUDGED, RowsError
from .schema import validate

PASSED, REGRESSED, BAD_INPUT, NOTHING_COMPARED = 0, 1, 2, 4
_SIGNIFICANT = 6
# Between the largest float64 and the last digit of the smallest.
_EVERY_DIGIT = Context(prec=700)
_ONE_ROW = ["arch", "engine", "implementation", "stage", "oracle", "case_id"]

Row = dict[str, Any]
Rows = dict[tuple[Any, ...], Row]


@dataclass(frozen=True)
class GateResult:
    """What the gate found, each entry one line that names arch, engine, stage and figure.

    `compared` and `failed` count elements and rows of the run; a result that compared nothing never passes.
    """

    problems: list[str]
    improvements: list[str]
    bad_input: list[str] = field(default_factory=list)
    compared: int = 0
    failed: int = 0


def exit_code(result: GateResult) -> int:
    """0 passed, 1 failed or regressed, 2 unusable rows or baselines, 4 nothing was compared."""
    if result.bad_input:
        return BAD_INPUT
    if result.compared == 0 and result.failed == 0:
        return NOTHING_COMPARED
    return REGRESSED if result.problems else PASSED


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
        return GateResult([], [], bad_input=[str(error)])
    faults = row_faults(df)
    compared = int(df.loc[df["verdict"].isin(JUDGED), "compared"].sum())
    problems = [] if compared else ["nothing was compared"]
    groups = combinations(df)
    problems += [f"{text}: nothing compared" for text in nothing_compared(groups)]
    problems += _failed_rows(df, faults)
    problems += _repeated_rows(df)
    problems += _other_engine(df, expected_engine)
    problems += _absent_archs(df, expected_archs)
    against, improvements = _against_baselines(_by_key(groups), base)
    return GateResult(problems + against, improvements, compared=compared, failed=int((faults != "").sum()))


def _read_baselines(source: Path, engines: Iterable[str], archs: Sequence[str] | None) -> Rows:
    if not source.exists():
        raise RowsError(f"{source}: no such baseline file or folder")
    paths = sorted(source.glob("*.csv")) if source.is_dir() else [source]
    found: Rows = {}
    for path in paths:
        found.update(_by_key(read_baseline(path)))
    wanted = set(engines)
    return {k: r for k, r in found.items() if r["engine"] in wanted and (archs is None or r["arch"] in archs)}


def _failed_rows(df: pd.DataFrame, faults: pd.Series) -> list[str]:
    """A line per combination and fault, so that a broken kernel gives a line and not a thousand."""
    bad = df[[*KEYS, "case_id"]].assign(fault=faults)[faults != ""]
    lines = []
    for _, rows in bad.groupby([*KEYS, "fault"], observed=True, sort=False):
        first = rows.iloc[0]
        lines.append(f"{where(first)}: {first['fault']} in {len(rows)} row(s), the first case {first['case_id']}")
    return lines


def _repeated_rows(df: pd.DataFrame) -> list[str]:
    repeated = df[df.duplicated(_ONE_ROW)]
    if repeated.empty:
        return []
    first = repeated.iloc[0]
    return [f"{where(first)}: {len(repeated)} row(s) occur twice, the first of case {first['case_id']}"]


def _other_engine(df: pd.DataFrame, expected: str | None) -> list[str]:
    if expected is None:
        return []
    pairs = df.loc[df["engine"] != expected, ["arch", "engine"]].drop_duplicates()
    return [f"{arch}: ran on engine {engine}, asked for was {expected}" for arch, engine in pairs.to_numpy()]


def _absent_archs(df: pd.DataFrame, expected: Sequence[str] | None) -> list[str]:
    ran = set(df["arch"].unique())
    return [f"{arch}: asked for, and did not run" for arch in expected or () if arch not in ran]


def _by_key(rows: pd.DataFrame) -> Rows:
    records = [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]
    return {tuple(row[name] for name in KEYS): row for row in records}


def _against_baselines(run: Rows, base: Rows) -> tuple[list[str], list[str]]:
    """Problems and improvements of a run's combinations against those of the baselines."""
    run_files, base_files = {key[:2] for key in run}, {key[:2] for key in base}
    problems = [f"{arch}: no baseline file {arch}-{engine}.csv" for arch, engine in sorted(run_files - base_files)]
    problems += [
        f"{arch}: has a baseline on engine {engine}, and did not run on it"
        for arch, engine in sorted(base_files - run_files)
    ]
    problems += [f"{where(base[k])}: missing in the run" for k in base if k not in run and k[:2] in run_files]
    problems += [f"{where(run[k])}: has no baseline row" for k in run if k not in base and k[:2] in base_files]
    improvements: list[str] = []
    for key in run:
        if key in base:
            worse, better = _compare(run[key], base[key])
            problems += [f"{where(run[key])}: {text}" for text in worse]
            improvements += [f"{where(run[key])}: {text}; rebaseline to keep it" for text in better]
    return problems, improvements


def _compare(new: Row, old: Row) -> tuple[list[str], list[str]]:
    """What is worse and what is better in one combination."""
    worse: list[str] = []
    better: list[str] = []
    # On hardware the order of a reduction may be free, so its figures move from run to run: there the rows'
    # own rule (each margin at most 1) and the counts decide. The software engine is deterministic.
    floats = FLOATS if new["engine"] == "software" else ()
    for name in ("mismatched", "compared", *floats):
        sign = _sign(name, new, old)
        # More compared is better, more of anything else is worse.
        word = {0: "", 1: "worse", -1: "better"}[-sign if name == "compared" else sign]
        if word:
            line = f"{word} {name} {new[name]!r}, the baseline has {old[name]!r}"
            (worse if word == "worse" else better).append(line)
    return worse, better


def _sign(name: str, new: Row, old: Row) -> int:
    """1 where the size of a figure grew, -1 where it shrank, 0 where it is the same; NaN on one side is growth.

    The software engine gives the same bits everywhere, but the float64 reference beside it is a BLAS product,
    whose summation order differs by machine and thread count and moves its last bits. So figures are compared
    by their decimal text with 6 significant digits of the baseline's; a bias, which may be the small rest of
    errors that cancel, down to the place of the sixth digit of the RMS error, the size of what cancelled.

    Both the rounded and the truncated text must have moved: a figure at the edge of one of them (a power of two
    often is) would change it by its last bit, and it cannot be at the edge of both.
    """
    a, b = new[name], old[name]
    if math.isnan(a) or math.isnan(b):
        return int(math.isnan(a) != math.isnan(b))
    a, b = abs(a), abs(b)
    if name in FLOATS and math.isfinite(b):
        sizes = [old["rms_rel_error"], b] if name == "signed_bias" else [b]
        size = next((size for size in sizes if size > 0 and math.isfinite(size)), None)
        if size is not None and math.isfinite(a):
            signs = {_text_sign(a, b, size, rounding) for rounding in (ROUND_HALF_EVEN, ROUND_DOWN)}
            return signs.pop() if len(signs) == 1 else 0
    return int(a > b) - int(a < b)


def _text_sign(a: float, b: float, size: float, rounding: str) -> int:
    unit = Decimal(1).scaleb(Decimal(size).adjusted() - _SIGNIFICANT + 1)
    a_text, b_text = (Decimal(value).quantize(unit, rounding, _EVERY_DIGIT) for value in (a, b))
    return int(a_text > b_text) - int(a_text < b_text)
