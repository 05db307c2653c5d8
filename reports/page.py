"""One self-contained HTML file: what is off, where, on which architecture, and how to run it again.

The file loads nothing: its style is inside, and it has no script. Figures are rounded for people; the `title`
of a cell has every digit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape
from pandas.io.formats.style import Styler

from .aggregate import overall_verdict
from .files import write_text
from .formatting import MARKS, NOTES, REPLAY_NOTE, cell, is_bad, is_figure, label, records, replay_line, shown
from .tables import TITLE, environment, not_judged, per_arch, per_arch_stage, worst_cases

_TEMPLATE = "page.html.j2"


def write_page(df: pd.DataFrame, path: str | os.PathLike[str], title: str = TITLE, worst: int = 20) -> Path:
    """Write the page of the rows `df`, with at most `worst` worst cases; returns the path.

    Raises: RowsError where `df` is not a frame of rows, ValueError for a negative `worst`.
    """
    stages = per_arch_stage(df)
    by_arch = {arch: stages[stages["arch"] == arch].drop(columns="arch") for arch in stages["arch"].unique()}
    verdict = overall_verdict(df)
    page = _environment().get_template(_TEMPLATE)
    html = page.render(
        title=title,
        verdict=MARKS[verdict],
        passed=verdict == "pass",
        notes=NOTES,
        replay_note=REPLAY_NOTE,
        summary=_html(per_arch(df), "summary"),
        stages={arch: _html(table, f"stages{i}") for i, (arch, table) in enumerate(by_arch.items())},
        worst=[_worst_case(record) for record in records(worst_cases(df, worst))],
        not_judged=_html(not_judged(df), "not_judged"),
        environment=environment(df),
    )
    return write_text(path, html)


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _html(table: pd.DataFrame, name: str) -> Markup | None:
    """A table as HTML, or None where it has no rows. Every text in it is escaped here, cell by cell."""
    if table.empty:
        return None
    columns, rows = shown(table), records(table)
    cells = pd.DataFrame([[_cell(name, row) for name in columns] for row in rows], columns=columns)
    classes = pd.DataFrame([[_class(table, name, row) for name in columns] for row in rows], columns=columns)
    # A uuid of our own: the same rows make the same file.
    styler = Styler(cells, cell_ids=False, uuid=name)
    styler = styler.hide(axis="index").set_td_classes(classes)
    styler = styler.format_index(lambda column: _heading(table, column), axis=1)
    return Markup(styler.to_html(table_attributes='class="figures"', doctype_html=False))


def _heading(table: pd.DataFrame, column: str) -> str:
    text = str(escape(label(column)))
    return f'<span class="number">{text}</span>' if is_figure(table, column) else text


def _cell(column: str, record: Mapping[str, Any]) -> str:
    """The cell's text, with every digit in its title where the text is rounded."""
    text, value = cell(column, record), record[column]
    if isinstance(value, float) and text != repr(value):
        return str(Markup('<span title="{}">{}</span>').format(repr(value), text))
    return str(escape(text))


def _class(table: pd.DataFrame, column: str, record: Mapping[str, Any]) -> str:
    names = ["number"] if is_figure(table, column) else []
    if is_bad(column, record):
        names.append("bad")
    elif column == "verdict" and record[column] == "pass":
        names.append("good")
    return " ".join(names)


def _worst_case(record: Mapping[str, Any]) -> dict[str, Any]:
    figures = ("mismatched", "compared", "margin_max", "ulp_max")
    return {
        **record,
        "mark": MARKS["fail"] if record["fault"] else MARKS["pass"],
        "figures": [(label(name), Markup(_cell(name, record)), is_bad(name, record)) for name in figures],
        "replay": replay_line(record["case"]),
    }
