"""`oproj run --implementation A --against B`: prints where two implementations part, and the smallest Case of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Table

from conformance.against import Differences, compare_cases, smallest_difference, to_frame
from conformance.case import Case
from conformance.implementation import METHODS
from conformance.runner import Target
from conformance.terminal import FAILED, NOTHING_COMPARED, PASSED, say
from oproj.engines import ENGINES
from reports.files import write_text
from reports.formatting import replay_line

FILE = "against.csv"


def second_target(spec: str) -> Target:
    """The target of `--against`: an engine by name, else an implementation."""
    return Target(engine=spec) if spec in ENGINES else Target(implementation=spec)


def main(
    cases: Iterable[Case],
    first: Target,
    second: Target,
    *,
    folder: Path | None,
    workers: int,
    timeout: float,
    shrink: bool,
    total: int,
) -> int:
    """Run the ``total`` Cases of ``cases`` on both, print table and first difference, write DIR/against.csv. Returns
    the exit code: 0 same bits, 1 different, 4 nothing compared."""
    results = compare_cases(cases, first, second, workers=workers, timeout=timeout)
    console = Console(stderr=True)
    found = list(track(results, "Cases", total, console=console, transient=True, disable=not console.is_terminal))
    df = to_frame(found)
    if folder is not None:
        write_text(folder / FILE, df.to_csv(index=False))
    Console().print(to_table(df, name_of(first), name_of(second)))
    return _conclude(found, df, first, second, timeout, shrink)


def name_of(target: Target) -> str:
    """How ``target`` was named."""
    return target.implementation or target.engine


def to_table(df: pd.DataFrame, first: str, second: str) -> Table:
    """One line per arch and stage."""
    table = Table(title=f"{first} against {second}", title_justify="left")
    for column in ("arch", "stage", "Cases", "that differ", "elements", "that differ", "worst ULP"):
        table.add_column(column, justify="left" if column in ("arch", "stage") else "right")
    for arch, of_arch in df.groupby("arch", sort=False):
        for stage in METHODS:
            rows = of_arch[of_arch["stage"] == stage]
            if rows.empty:
                continue
            differing = int((rows["first"] != "").sum())
            worst = rows["ulp_max"].max()
            figures = [len(rows), differing, int(rows["compared"].sum()), int(rows["differing"].sum())]
            steps = "" if pd.isna(worst) or not differing else f"{worst:g}"
            style = "red" if differing else ""
            table.add_row(str(arch), stage, *(f"{n:,}" for n in figures), steps, style=style)
    return table


def _conclude(
    found: Sequence[Differences], df: pd.DataFrame, first: Target, second: Target, timeout: float, shrink: bool
) -> int:
    lost = [one for one in found if one.lost]
    for one in lost[:3]:
        say(f"Case {one.case.id} on {one.case.arch}: {one.lost}\n  {_line(one.case, first, second)}", style="bold red")
    seconds = {} if shrink else {"seconds": 0.0}
    with Console(stderr=True).status("looking for the smallest Case that differs"):
        smallest = smallest_difference(found, first, second, timeout=timeout, **seconds)
    if smallest is not None and smallest.first is not None:
        stage, comparison = smallest.first
        what = comparison.problem or _element(comparison.first_bad)
        say(f"first stage that differs: {stage} on {smallest.case.arch}: {what}", style="bold red")
        say(f"  {_line(smallest.case, first, second)}")
        return FAILED
    if lost:
        return FAILED
    if not df["compared"].sum():
        say("nothing was compared", style="bold red")
        return NOTHING_COMPARED
    say(f"same bits in {df['compared'].sum():,} elements of {len(found)} Cases", style="bold green")
    return PASSED


def _element(bad: Any) -> str:
    where = f"{bad.tensor}[{', '.join(map(str, bad.at))}]"
    return f"{where}: first {bad.got} ({bad.got_value:g}), second {bad.want} ({bad.want_value:g})"


def _line(case: Case, first: Target, second: Target) -> str:
    """The command that shows this difference again."""
    engine = "" if first.implementation or first == Target() else first.engine
    return f"{replay_line(case.to_json(), first.implementation, engine)} --against {name_of(second)}"
