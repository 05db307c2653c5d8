"""What a new baseline changes, as a table for review."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from .formatting import to_markdown
from .significance import COUNTS, FLOATS, direction

Row = Mapping[str, Any]
COLUMNS = ("file", "stage", "oracle", "what", "rows", "largest change", "where")


def unchanged(new: Row, old: Row) -> bool:
    """Whether every figure is the recorded one, up to the last bits of the reference."""
    return not any(direction(name, new, old) for name in (*COUNTS, *FLOATS))


def changes(old: Mapping[tuple[Any, ...], Row], new: Mapping[tuple[Any, ...], Row]) -> pd.DataFrame:
    """One row per file, stage, oracle and what happened: 'new', 'removed', or a figure that got worse or better.

    old and new: rows of baselines by their key. `rows` counts combinations; the largest change is the one whose
    figure moved most, with its preset, TP and family.
    """
    found: dict[tuple[str, str, str, str], list[tuple[float, str, Row]]] = {}
    for key in [*new, *(key for key in old if key not in new)]:
        for what, size, text in _of_one(old.get(key), new.get(key)):
            row = new.get(key) or old[key]
            group = (f"{row['arch']}-{row['engine']}.csv", row["stage"], row["oracle"], what)
            found.setdefault(group, []).append((size, text, row))
    rows = [[*group, len(each), *_largest(each)] for group, each in found.items()]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _of_one(old: Row | None, new: Row | None) -> list[tuple[str, float, str]]:
    """(what, how far, in words) of one combination."""
    if old is None or new is None:
        return [("new" if old is None else "removed", 0.0, "")]
    found = []
    for name in (*COUNTS, *FLOATS):
        word = direction(name, new, old)
        if word:
            found.append(
                (f"{name} {word}", _distance(new[name], old[name]), f"{_text(old[name])} -> {_text(new[name])}")
            )
    return found


def _distance(new: float, old: float) -> float:
    if math.isnan(new) or math.isnan(old):
        return math.inf
    return abs(abs(new) - abs(old)) / max(abs(new), abs(old))


def _text(value: float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}"


def _largest(each: Sequence[tuple[float, str, Row]]) -> tuple[str, str]:
    _, text, row = max(each, key=lambda item: item[0])
    return text, f"{row['preset'] or 'none'}, TP {row['tp_size']}, {row['family']}" if text else ""


def to_list_item(table: pd.DataFrame) -> str:
    """The table as Markdown that belongs to a list item, or a sentence where nothing changed."""
    if table.empty:
        return "  No figure changed.\n"
    lines = to_markdown(table).splitlines()
    return "".join(f"  {line}".rstrip() + "\n" for line in lines)
