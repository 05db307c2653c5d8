"""Figures and names as people read them; the machine-readable forms keep every bit."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

import pandas as pd

from .aggregate import NOTHING
from .columns import MARGINS

LABELS = {
    "not_judged": "not judged",
    "margin_max": "max margin",
    "margin_p999": "p99.9 margin",
    "margin_p50": "p50 margin",
    "rms_rel_error": "RMS rel. error",
    "signed_bias": "signed bias",
    "calc_diff": "calc_diff",
    "ulp_max": "max ULP",
    "case_id": "case",
    "first_bad": "first bad",
}
NOTES = (
    "Oracle bits: the same bits as the model of the hardware. bound: float64 on the very codes and scales that the "
    "stage was given, within the derived bound of the arithmetic. format: float64 on the values before they were "
    "quantised, so that its bound has the cost of FP8 in it. Not applicable: the oracle says nothing there, and why "
    "is under Not judged.",
    "Margin is abs(error) / bound: at most 1 passes. p99.9 is the largest p99.9 of a case.",
    "RMS and bias are weighted by compared elements. RMS, bias, calc_diff and ULP never decide. "
    "A dash means: does not apply.",
)
REPLAY_NOTE = (
    "A replay runs the engine that `auto` takes. To see the failure of another engine or of your own implementation, "
    "add the run's --engine or --implementation."
)
MARKS = {"pass": "✓ pass", "fail": "✗ FAIL", NOTHING: "✗ nothing compared"}
"""A failure differs from a pass by its words, so that it shows in print and without colour."""
DOES_NOT_APPLY = "–"
_HELPERS = ("nan_margins",)


def label(column: str) -> str:
    """The heading of a column."""
    return LABELS.get(column, column)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a small table as dicts."""
    return [{str(name): value for name, value in record.items()} for record in table.to_dict("records")]


def shown(table: pd.DataFrame) -> list[str]:
    """The columns that people see: all but those that only tell how to print another."""
    return [str(name) for name in table.columns if name not in _HELPERS]


def is_figure(table: pd.DataFrame, column: str) -> bool:
    """Whether a column holds figures, and belongs to the right."""
    return bool(pd.api.types.is_numeric_dtype(table[column].dtype))


def is_bad(column: str, record: Mapping[str, Any]) -> bool:
    """Whether the cell `column` of a table row is one that makes the row fail."""
    value = record[column]
    if column == "verdict":
        return value in ("fail", NOTHING)
    if column == "mismatched":
        return bool(value > 0)
    if column in MARGINS:
        return value > 1 or (math.isnan(value) and record["nan_margins"] > 0)
    return False


def cell(column: str, record: Mapping[str, Any]) -> str:
    """The cell as text: 3 significant digits, counts in full.

    'NaN' stands only where a figure is missing that must be there; where none applies there is a dash.
    """
    value = record[column]
    if isinstance(value, str):
        return MARKS.get(value, value) if column == "verdict" else value
    if not isinstance(value, float):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN" if is_bad(column, record) else DOES_NOT_APPLY
    return f"{value:.3g}"


def replay_line(case: str) -> str:
    """The command that runs a case again, ready to paste into a POSIX shell."""
    return f"oproj replay {shlex.quote(case)}"


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub Markdown table of a frame of `tables.py`, with figures rounded for people."""
    columns = shown(table)
    lines = [
        [escape_markdown(label(column)) for column in columns],
        ["---:" if is_figure(table, column) else "---" for column in columns],
        *([escape_markdown(cell(column, record)) for column in columns] for record in records(table)),
    ]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def escape_markdown(text: str) -> str:
    """`text` on one line, with nothing in it that Markdown or HTML would read as a mark or a table border."""
    for char, safe in (("&", "&amp;"), ("<", "&lt;"), ("\\", "\\\\"), ("|", "\\|"), ("`", "\\`")):
        text = text.replace(char, safe)
    return " ".join(text.splitlines())
