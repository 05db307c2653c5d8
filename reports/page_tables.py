"""Tables of the page: frames as HTML by pandas Styler, and the rows of the big table as data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup, escape
from pandas.io.formats.style import Styler

from .columns import JUDGED, MARGIN_ORACLES
from .formatting import MARKS, cell, is_bad, is_figure, label, records, replay_line, replay_of, shown
from .worst import row_sample

ROW_COLUMNS = (
    "arch", "stage", "oracle", "verdict", "margin_max", "mismatched", "compared", "preset", "tp_size", "tokens",
    "family", "case_id",
)  # fmt: skip


def html_table(table: pd.DataFrame, name: str, columns: Sequence[str] | None = None) -> Markup | None:
    """A table as HTML, or None where it has no rows. Every text in it is escaped here, cell by cell.

    name: its id. columns: those to show, all where left out. A figure stands in a span whose `data-value` sorts and
    whose title has every digit.
    """
    if table.empty:
        return None
    chosen, rows = list(columns or shown(table)), records(table)
    cells = pd.DataFrame([[_cell(name, row) for name in chosen] for row in rows], columns=chosen)
    classes = pd.DataFrame([[_class(table, name, row) for name in chosen] for row in rows], columns=chosen)
    # A uuid of our own: the same rows make the same file.
    styler = Styler(cells, cell_ids=False, uuid=name)
    styler = styler.hide(axis="index").set_td_classes(classes)
    styler = styler.format_index(lambda column: _heading(table, column), axis=1)
    named = escape(json.dumps(chosen))
    return Markup(styler.to_html(table_attributes=f'class="figures" data-names="{named}"', doctype_html=False))


def _heading(table: pd.DataFrame, column: str) -> str:
    text = str(escape(label(column)))
    return f'<span class="number">{text}</span>' if is_figure(table, column) else text


def _cell(column: str, record: Mapping[str, Any]) -> str:
    text, value = cell(column, record), record[column]
    if isinstance(value, str):
        return str(escape(text))
    template = '<span data-value="{0}" title="{0}">{1}</span>' if text != repr(value) else "<span>{1}</span>"
    return str(Markup(template).format(repr(value), text))


def _class(table: pd.DataFrame, column: str, record: Mapping[str, Any]) -> str:
    names = ["number"] if is_figure(table, column) else []
    if is_bad(column, record):
        names.append("bad")
    elif column.partition(" ")[0] == "verdict" and record[column] == "pass":
        names.append("good")
    return " ".join(names)


def row_data(df: pd.DataFrame, most: int) -> dict[str, Any]:
    """The big table: `columns` (name, heading, is it a figure), `rows` in the order of `row_sample`, `replay` lines,
    to which the last entry of a row points, and how many judged rows there are.

    A margin that is not there is null, and "NaN" where it must be; "inf" stands for itself.
    """
    sample = row_sample(df, most)
    lines: dict[str, int] = {}
    rows = []
    for record in records(sample[[*ROW_COLUMNS, "spec", "engine", "case"]]):
        line = replay_line(**replay_of(record))
        values = [_plain(name, record) for name in ROW_COLUMNS]
        rows.append([*values, lines.setdefault(line, len(lines))])
    columns = [[name, label(name), pd.api.types.is_numeric_dtype(sample[name].dtype)] for name in ROW_COLUMNS]
    return {"columns": columns, "rows": rows, "replay": list(lines), "judged": int(df["verdict"].isin(JUDGED).sum())}


def _plain(name: str, record: Mapping[str, Any]) -> Any:
    value = record[name]
    if name == "verdict":
        return MARKS[value]
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        must = record["oracle"] in MARGIN_ORACLES and record["compared"] > 0
        return "NaN" if must else None
    return value if math.isfinite(value) else str(value)


def options(df: pd.DataFrame, names: Sequence[str]) -> dict[str, list[str]]:
    """What each filter of the page offers."""
    return {name: sorted({str(value) for value in df[name].unique()}) for name in names}
