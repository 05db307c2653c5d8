"""`oproj report`: the tables and the page of a finished run, alone or against another run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from conformance.options import Rows
from conformance.terminal import guarded
from reports.against import changes_per_stage, run_against_run
from reports.page import write_page
from reports.store import load
from reports.tables import per_arch_stage, print_rich, print_run_against_run, to_markdown

FORMATS = ("table", "md", "csv")


def report(
    directory: Rows,
    html: Annotated[Path | None, typer.Option(help="Write the page there.")] = None,
    format: Annotated[str, typer.Option(help=f"What to print: {', '.join(FORMATS)}.")] = "table",
    against: Annotated[
        Path | None, typer.Option(help="Folder or file of rows of an earlier run: print what has changed since.")
    ] = None,
    faults: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File of `oproj faults --json`: its kill matrix, on the page.")
    ] = None,
) -> None:
    """Print the tables of a finished run; write its page."""

    def show() -> None:
        if format not in FORMATS:
            raise ValueError(f"format={format!r} is unknown; known: {', '.join(FORMATS)}")
        if faults is not None and html is None:
            raise ValueError(f"--faults {faults} goes onto the page; say with --html FILE where to write it")
        df = load(directory)
        before = None if against is None else load(against)
        if html is not None:
            write_page(df, html, faults=faults, against=before)
        _print(df, before, format)

    guarded(show)


def _print(df: pd.DataFrame, before: pd.DataFrame | None, format: str) -> None:
    if format == "table":
        print_rich(df)
        if before is not None:
            print_run_against_run(before, df)
    elif before is None:
        table = per_arch_stage(df)
        sys.stdout.write(to_markdown(table) if format == "md" else table.to_csv(index=False))
    else:
        joined = run_against_run(before, df)
        sys.stdout.write(to_markdown(changes_per_stage(joined)) if format == "md" else joined.to_csv(index=False))
