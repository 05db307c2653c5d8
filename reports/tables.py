"""Error tables: per architecture and stage, worst cases, in a terminal and as Markdown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .aggregate import FAULT_NAN, aggregate, overall_verdict, row_faults, sort_rows
from .columns import JUDGED, MARGIN_ORACLES, RowsError
from .files import write_text
from .formatting import (
    MARKS,
    NOTES,
    REPLAY_NOTE,
    cell,
    escape_markdown,
    is_bad,
    is_figure,
    label,
    records,
    replay_line,
    shown,
    to_markdown,
)
from .schema import validate

__all__ = [
    "environment", "not_judged", "per_arch", "per_arch_stage", "print_rich", "to_markdown", "worst_cases",
    "write_markdown",
]  # fmt: skip

STAGE_KEYS = ("arch", "stage", "oracle", "engine", "implementation")
_STAGE_COLUMNS = [
    "arch", "stage", "oracle", "verdict", "margin_max", "mismatched", "compared", "cases", "not_judged",
    "margin_p999", "rms_rel_error", "signed_bias", "calc_diff", "ulp_max", "evidence", "engine",
    "implementation", "nan_margins",
]  # fmt: skip
_ARCH_COLUMNS = [
    "arch", "engine", "verdict", "margin_max", "mismatched", "compared", "cases", "not_judged", "evidence",
    "nan_margins",
]  # fmt: skip
_WORST_COLUMNS = [
    "arch", "engine", "implementation", "stage", "oracle", "family", "preset", "tp_size", "tokens", "case_id",
    "verdict", "fault", "margin_max", "mismatched", "compared", "ulp_max", "first_bad", "reason", "case",
    "nan_margins",
]  # fmt: skip
_LEAST_NEEDED = (
    "not_judged", "calc_diff", "margin_p999", "signed_bias", "rms_rel_error", "ulp_max", "implementation",
    "evidence",
)  # fmt: skip
_PLAIN_WIDTH = 160
TITLE = "FP8 output projection: error against float64"


def per_arch_stage(df: pd.DataFrame) -> pd.DataFrame:
    """One row per arch, stage and oracle - and per engine and implementation, where several ran.

    Columns: arch, stage, oracle, verdict ('pass', 'fail', 'nothing compared', or 'not applicable' where the
    oracle applies to none of the cases), margin_max, mismatched, compared, cases and not_judged (counts of
    rows), margin_p999, rms_rel_error, signed_bias, calc_diff, ulp_max, evidence, engine, implementation.
    Figures are added up as `aggregate.py` says.

    Raises: RowsError where `df` is not a frame of rows.
    """
    return aggregate(validate(df), STAGE_KEYS)[_STAGE_COLUMNS]


def per_arch(df: pd.DataFrame) -> pd.DataFrame:
    """One row per arch and engine over all stages and oracles, columns as in `per_arch_stage`."""
    return aggregate(validate(df), ("arch", "engine"))[_ARCH_COLUMNS]


def worst_cases(df: pd.DataFrame, n: int = 20) -> pd.DataFrame:
    """The `n` worst judged rows: failures first, among them NaN margins, then by margin, share of mismatched
    elements, and ULP. `fault` says why a row fails and is '' where it does not.

    Raises: ValueError for a negative n, RowsError where `df` is not a frame of rows.
    """
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    judged = validate(df)[df["verdict"].isin(JUDGED)]
    fault = row_faults(judged)
    missing = judged["oracle"].isin(MARGIN_ORACLES) & judged["margin_max"].isna()
    # lexsort takes its most significant key last, and sorts upward.
    keys = [
        judged["ulp_max"].fillna(-np.inf),
        judged["mismatched"] / judged["compared"].clip(lower=1),
        judged["margin_max"].fillna(-np.inf),
        missing,
        fault != "",
    ]
    order = np.lexsort([-key.to_numpy(dtype=float) for key in keys])[:n]
    nan_margins = (fault == FAULT_NAN).astype("int64")
    out = judged.assign(fault=fault, nan_margins=nan_margins)[_WORST_COLUMNS]
    return out.iloc[order].reset_index(drop=True)


def not_judged(df: pd.DataFrame) -> pd.DataFrame:
    """How many rows were not judged and why: arch, stage, oracle, verdict, reason, rows."""
    keys = ["arch", "stage", "oracle", "verdict", "reason"]
    left = validate(df)[~df["verdict"].isin(JUDGED)]
    counts = left[keys].astype(object).value_counts().reset_index(name="rows")
    return sort_rows(counts, keys)


def environment(df: pd.DataFrame) -> dict[str, str]:
    """What made the rows: run, time, git revision, and each named version, several joined by ', '.

    Raises: RowsError where a `versions` text is not a JSON object.
    """
    found: dict[str, set[str]] = {
        "run": set(df["run_id"].unique()),
        "time (UTC)": {df["time_utc"].min(), df["time_utc"].max()} if len(df) else set(),
        "git revision": set(df["git_revision"].unique()),
    }
    for text in df["versions"].unique():
        versions = _json(text)
        if not isinstance(versions, dict):
            raise RowsError(f"column versions must hold JSON objects, it also has {text!r}")
        for name, value in versions.items():
            found.setdefault(name, set()).add(_version_text(value))
    return {name: ", ".join(sorted(values)) for name, values in found.items()}


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _version_text(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def write_markdown(df: pd.DataFrame, path: str | os.PathLike[str], title: str = TITLE) -> Path:
    """Write one Markdown file: title, verdict, environment, a table per arch, the 10 worst failures.

    Raises: RowsError where `df` is not a frame of rows.
    """
    table = per_arch_stage(df)
    made_by = " · ".join(f"{name} {value}" for name, value in environment(df).items())
    verdict = MARKS[overall_verdict(df)]
    parts = [f"# {escape_markdown(title)}", f"**{verdict}**", escape_markdown(made_by), *NOTES]
    for arch in table["arch"].unique():
        of_arch = table[table["arch"] == arch].drop(columns="arch")
        parts += [f"## {escape_markdown(arch)}", to_markdown(of_arch)]
    left_out = not_judged(df)
    if len(left_out):
        parts += ["## Not judged", to_markdown(left_out)]
    failed = _failed(df, 10)
    if len(failed):
        parts += ["## Failed cases, worst first", REPLAY_NOTE, *map(_failed_case, records(failed))]
    return write_text(path, "\n\n".join(part.strip("\n") for part in parts) + "\n")


def _failed(df: pd.DataFrame, n: int) -> pd.DataFrame:
    worst = worst_cases(df, n)
    return worst[worst["fault"] != ""]


def _failed_case(record: dict[str, Any]) -> str:
    where = " ".join(record[name] for name in ("arch", "engine", "implementation", "stage", "oracle"))
    figures = f"{cell('mismatched', record)} of {cell('compared', record)} elements mismatched"
    said = [record["fault"], figures, f"max margin {cell('margin_max', record)}"]
    if record["reason"]:  # it names the first bad element
        said.append(record["reason"])
    elif record["first_bad"]:
        said.append(f"first bad {record['first_bad']}")
    text = escape_markdown(f"{where}, family {record['family']}: {'; '.join(said)}")
    return f"{text}\n\n```sh\n{replay_line(record['case'])}\n```"


def print_rich(df: pd.DataFrame, console: Console | None = None) -> None:
    """Print a table per arch, the verdict, and the replay lines of the 5 worst failures."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            # A log has no width of its own.
            console = Console(width=_PLAIN_WIDTH)
    table = per_arch_stage(df)
    for arch in table["arch"].unique():
        console.print(_fitting(console, table[table["arch"] == arch]))
    for case in _failed(df, 5)["case"].drop_duplicates():
        console.print(Text(replay_line(case)), soft_wrap=True)
    console.print(Text(MARKS[overall_verdict(df)], style="bold"))


def _fitting(console: Console, table: pd.DataFrame) -> Table:
    """The table of one arch, less the columns that have no room: a figure cut off is a wrong figure."""
    one = [name for name in ("arch", "engine", "implementation", "evidence") if table[name].nunique() == 1]
    title = " · ".join(dict.fromkeys(table[name].iloc[0] for name in one))
    columns = [name for name in shown(table) if name not in one]
    left_out: list[str] = []
    out = _rich_table(table, columns, title, left_out)
    unlimited = console.options.update(width=10_000)
    for name in _LEAST_NEEDED:
        if console.measure(out, options=unlimited).maximum <= console.width:
            break
        if name in columns:
            columns.remove(name)
            left_out.append(label(name))
        out = _rich_table(table, columns, title, left_out)
    return out


def _rich_table(table: pd.DataFrame, columns: list[str], title: str, left_out: list[str]) -> Table:
    # Text objects, not strings: a name with brackets must not be taken for markup.
    caption = Text(f"not shown for want of width: {', '.join(left_out)}") if left_out else None
    out = Table(title=Text(title), caption=caption, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        figure = is_figure(table, column)
        heading = Text(label(column).replace(" ", "\n"))
        out.add_column(heading, justify="right" if figure else "left", no_wrap=figure, overflow="fold")
    for record in records(table):
        styles = ["bold red" if is_bad(name, record) else "" for name in columns]
        out.add_row(*(Text(cell(name, record), style=style) for name, style in zip(columns, styles)))
    return out
