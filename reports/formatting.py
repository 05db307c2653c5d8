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
    "within_1_ulp": "≤ 1 ULP",
    "ulp_max": "max ULP",
    "tp_size": "TP",
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
    "≤ 1 ULP is the share of elements at most one step of the output format from the right number. Max ULP counts "
    "the steps of the farthest one: between two numbers of different sign they lead across zero, so a tiny value "
    "with the other sign is tens of thousands of steps away and may be well within the bound.",
)
REPLAY_NOTE = (
    "A replay line names the engine or implementation that was judged. A path in it is relative to the folder that "
    "the run was started in."
)
MARKS = {"pass": "✓ pass", "fail": "✗ FAIL", NOTHING: "✗ nothing compared"}
"""A failure differs from a pass by its words, so that it shows in print and without colour."""
DOES_NOT_APPLY = "–"
_HELPERS = ("nan_margins", "error_map")
_OF_RUNS = ("verdict", "margin_max", "mismatched", "signed_bias")
_WHOLE = ("ulp_max", "mismatched")
_ENGINES = ("software", "deep_gemm")


def label(column: str) -> str:
    """The heading of a column."""
    name, side = _base(column)
    return f"{LABELS.get(name, name)} {side}".strip()


def _base(column: str) -> tuple[str, str]:
    """A column's figure, and the side it is of: an arch or engine after a space, run a or b or their change."""
    name, _, side = column.partition(" ")
    for suffix in ("_a", "_b", "_change"):
        if name.removesuffix(suffix) in _OF_RUNS and name.endswith(suffix):
            return name.removesuffix(suffix), suffix[1:]
    return name, side


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
    name, side = _base(column)
    if name == "verdict":
        return value in ("fail", NOTHING)
    if column == "change":
        return value in ("now fails", "no longer judged", "only in a", "worse")
    if name == "mismatched" and side != "change":
        return bool(value > 0)
    if name in MARGINS and side != "change":
        return value > 1 or (math.isnan(value) and record.get("nan_margins", 0) > 0)
    return False


def cell(column: str, record: Mapping[str, Any]) -> str:
    """The cell as text: 3 significant digits, counts and steps in full, shares in percent.

    'NaN' stands only where a figure is missing that must be there; where none applies there is a dash.
    """
    value = record[column]
    if isinstance(value, str):
        return MARKS.get(value, value or DOES_NOT_APPLY) if _base(column)[0] == "verdict" else value
    if not isinstance(value, float):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN" if is_bad(column, record) else DOES_NOT_APPLY
    if column == "within_1_ulp":
        return percent(value)
    if _base(column)[0] in _WHOLE and value.is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share of 0 .. 1 in percent; nothing but 1 is "100 %", and nothing but 0 is "0 %"."""
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    # Digits until it differs from 0 and 1, cut and not rounded.
    digits = max(1, math.ceil(-math.log10(min(share, 1 - share))) - 1)
    return f"{math.floor(share * 100 * 10**digits) / 10**digits:.{digits}f} %"


def replay_line(case: str, spec: str = "", engine: str = "") -> str:
    """The command that runs a case again, ready to paste into a POSIX shell.

    spec: what --implementation takes; without one, `engine` is asked for where it is one of ours.
    """
    options = f" --implementation {shlex.quote(spec)}" if spec else ""
    if not spec and engine in _ENGINES:
        options = f" --engine {engine}"
    return f"oproj replay {shlex.quote(case)}{options}"


def replay_of(record: Mapping[str, Any]) -> dict[str, str]:
    """What `replay_line` takes of a row."""
    return {name: record[name] for name in ("case", "spec", "engine")}


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
