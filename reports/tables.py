"""Error tables: per architecture and stage, worst cases, in a terminal and as Markdown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .against import changes_per_stage, run_against_run
from .aggregate import aggregate, overall_verdict, sort_rows
from .columns import JUDGED, RowsError
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
    replay_of,
    shown,
    to_markdown,
)
from .schema import validate
from .ulps import ulp_histograms, within_one_step
from .worst import failing_cases, worst_cases

__all__ = [
    "environment", "evidence", "failing_cases", "not_judged", "per_arch", "per_arch_stage", "print_rich",
    "print_run_against_run", "to_markdown", "worst_cases", "write_markdown",
]  # fmt: skip

STAGE_KEYS = ("arch", "stage", "oracle", "engine", "implementation")
_STAGE_COLUMNS = [
    "arch", "stage", "oracle", "verdict", "margin_max", "mismatched", "compared", "cases", "not_judged",
    "margin_p999", "rms_rel_error", "signed_bias", "calc_diff", "within_1_ulp", "ulp_max", "evidence", "engine",
    "implementation", "nan_margins",
]  # fmt: skip
_ARCH_COLUMNS = [
    "arch", "engine", "verdict", "margin_max", "mismatched", "compared", "cases", "rows", "not_judged", "evidence",
    "nan_margins",
]  # fmt: skip
CHANGE_COLUMNS = [
    "arch", "stage", "oracle", "family", "tp_size", "tokens", "case_id", "change", "margin_max_a", "margin_max_b",
    "mismatched_a", "mismatched_b", "signed_bias_a", "signed_bias_b",
]  # fmt: skip
_LEAST_NEEDED = (
    "not_judged", "calc_diff", "margin_p999", "ulp_max", "signed_bias", "rms_rel_error", "within_1_ulp",
    "implementation", "evidence",
)  # fmt: skip
_PLAIN_WIDTH = 160
TITLE = "FP8 output projection: error against float64"


def per_arch_stage(df: pd.DataFrame) -> pd.DataFrame:
    """One row per arch, stage and oracle - and per engine and implementation, where several ran.

    Columns: arch, stage, oracle, verdict ('pass', 'fail', 'nothing compared', or 'not applicable' where the
    oracle applies to none of the cases), margin_max, mismatched, compared, cases and not_judged (counts of
    rows), margin_p999, rms_rel_error, signed_bias, calc_diff, within_1_ulp (share of the elements that have a
    distance in steps), ulp_max, evidence, engine, implementation. Figures are added up as `aggregate.py` says.

    Raises: RowsError where `df` is not a frame of rows.
    """
    return stage_table(df, ulp_histograms(validate(df), STAGE_KEYS))


def stage_table(df: pd.DataFrame, histograms: pd.DataFrame) -> pd.DataFrame:
    """`per_arch_stage` of rows whose `ulp_histograms` by `STAGE_KEYS` are known already."""
    shares = within_one_step(histograms, STAGE_KEYS)
    return aggregate(validate(df), STAGE_KEYS).merge(shares, on=list(STAGE_KEYS), how="left")[_STAGE_COLUMNS]


def per_arch(df: pd.DataFrame) -> pd.DataFrame:
    """One row per arch and engine over all stages and oracles, columns as in `per_arch_stage`, but that `cases` counts
    different Cases with a judged row, and `rows` the judged rows."""
    keys = ["arch", "engine"]
    judged = validate(df)[df["verdict"].isin(JUDGED)]
    cases = judged.groupby(keys, observed=True)["case_id"].nunique().rename("cases").reset_index()
    table = aggregate(df, keys).rename(columns={"cases": "rows"})
    table = table.merge(cases.astype(dict.fromkeys(keys, object)), on=keys, how="left")
    return table.assign(cases=table["cases"].fillna(0).astype("int64"))[_ARCH_COLUMNS]


def evidence(df: pd.DataFrame) -> pd.DataFrame:
    """What stands behind each stage's model per arch: one row per arch, one column per stage ('' where not run)."""
    pairs = validate(df)[["arch", "stage", "evidence"]].astype(object).drop_duplicates()
    joined = pairs.groupby(["arch", "stage"])["evidence"].agg(lambda words: ", ".join(sorted(words)))
    table = joined.unstack(fill_value="").reset_index()
    stages = list(sort_rows(pairs[["stage"]].drop_duplicates(), ["stage"])["stage"])
    return sort_rows(table[["arch", *stages]], ["arch"])


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
    return f"{text}\n\n```sh\n{replay_line(**replay_of(record))}\n```"


def print_rich(df: pd.DataFrame, console: Console | None = None) -> None:
    """Print a table per arch, the verdict, and the replay lines of the 5 worst failures."""
    console = console or _console()
    table = per_arch_stage(df)
    for arch in table["arch"].unique():
        console.print(_fitting(console, table[table["arch"] == arch]))
    for line in dict.fromkeys(replay_line(**replay_of(record)) for record in records(_failed(df, 5))):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(MARKS[overall_verdict(df)], style="bold"))


def print_run_against_run(
    df_a: pd.DataFrame, df_b: pd.DataFrame, console: Console | None = None, n: int = 20
) -> pd.DataFrame:
    """Print what changed from run a to run b per stage, and the `n` rows that most ask for attention, with a replay
    line of each Case that fails now; returns the frame of `run_against_run`.

    Raises: RowsError as `run_against_run`.
    """
    console = console or _console()
    joined = run_against_run(df_a, df_b)
    counts = changes_per_stage(joined)
    console.print(_rich_table(counts, list(counts.columns), "from run a to run b", []))
    changed = joined[joined["change"] != "equal"].head(n)
    if len(changed):
        title = f"{len(changed)} of {(joined['change'] != 'equal').sum():,} rows that changed"
        console.print(_rich_table(changed, CHANGE_COLUMNS, title, []))
    ids = changed.loc[changed["change"] == "now fails", "case_id"]
    failed = df_b[df_b["case_id"].isin(ids)].drop_duplicates(["case_id", "spec", "engine"])
    for record in records(failed):
        console.print(Text(replay_line(**replay_of(record))), soft_wrap=True)
    return joined


def _console() -> Console:
    console = Console()
    # A log has no width of its own.
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


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
