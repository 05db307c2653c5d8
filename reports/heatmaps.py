"""Heat maps of rows, as Plotly figures: where the worst margins are, and where the bad elements sit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from .aggregate import aggregate, sort_rows
from .columns import JUDGED
from .figures import CAP, style
from .formatting import label, records

ALLOWED = [[0, "#eef4fb"], [0.25, "#9dc3e6"], [0.5, "#2f6fae"], [0.5 + 1e-12, "#e8836b"], [1, "#8e0b12"]]
"""Margins of 0 .. 2: blue is within the bound, red is beyond it."""
SHARES = [[0, "#f7f7f7"], [0.0001, "#fddbc7"], [0.5, "#d6604d"], [1, "#67001f"]]
_MOST_TILES = 16


def margin_heatmap(df: pd.DataFrame, arch: str, rows: str, columns: str, oracle: str = "bound") -> go.Figure:
    """Worst margin of an arch for each pair of values of two columns, e.g. 'preset' and 'family'.

    The tooltip has the margin in full, the Cases and the mismatched elements; a NaN margin that must not be is shown
    as one above 1.
    """
    chosen = df[df["verdict"].isin(JUDGED) & (df["arch"] == arch) & (df["oracle"] == oracle) & (df["compared"] > 0)]
    table = aggregate(chosen, [rows, columns])
    grid = {(record[rows], record[columns]): record for record in records(table)}
    y, x = (list(sort_rows(table[[name]].drop_duplicates(), [name])[name]) for name in (rows, columns))
    cells = [[grid.get((row, column)) for column in x] for row in y]
    figure = _heatmap(
        [[None if cell is None else _colour_value(cell["margin_max"]) for cell in line] for line in cells],
        [_name(value) for value in x],
        [_name(value) for value in y],
        ALLOWED,
        CAP,
        text=[["" if cell is None else _short(cell["margin_max"]) for cell in line] for line in cells],
        customdata=[[_tooltip(cell) for cell in line] for line in cells],
        meta={"arch": arch, "oracle": oracle},
    )
    return _titled(figure, label(columns), label(rows))


def fault_heatmap(judged: pd.DataFrame, arch: str) -> go.Figure:
    """Share of an arch's judged rows that fail, by stage and oracle against family.

    judged: columns arch, stage, oracle, family and `fails` (bool).
    """
    of_arch = judged[judged["arch"] == arch]
    keys = ["stage", "oracle", "family"]
    table = sort_rows(of_arch.groupby(keys, observed=True)["fails"].agg(["sum", "count"]).reset_index(), keys)
    counts = {
        (f"{line['stage']} {line['oracle']}", line["family"]): (line["sum"], line["count"]) for line in records(table)
    }
    y, x = list(dict.fromkeys(place for place, _ in counts)), sorted({family for _, family in counts})
    cells = [[counts.get((row, column), (0, 0)) for column in x] for row in y]
    figure = _heatmap(
        [[failed / rows if rows else None for failed, rows in line] for line in cells],
        x,
        y,
        SHARES,
        1,
        customdata=[[f"{failed:,} of {rows:,} rows fail" for failed, rows in line] for line in cells],
        meta={"arch": arch},
    )
    return _titled(figure, label("family"), "")


def first_bad_heatmaps(df: pd.DataFrame, stage: str, arch: str) -> list[go.Figure]:
    """Where the first bad elements of a stage's failed rows lie, counted over its rows on one arch.

    A first bad element is the first in index order, so low indices are met more often than others are bad.
    """
    here = df[(df["first_bad"] != "") & (df["stage"] == stage) & (df["arch"] == arch) & df["verdict"].isin(JUDGED)]
    found: dict[int, list[Sequence[int]]] = {}
    for text in here["first_bad"]:
        value = json.loads(text)
        at = value.get("at") if isinstance(value, dict) else None
        if isinstance(at, list) and at and all(type(index) is int and index >= 0 for index in at):
            found.setdefault(len(at), []).append(at)
    figures = []
    for axes, places in sorted(found.items()):
        pairs = {2: ((0, 1, "token", "column"),), 3: ((1, 2, "group", "rank"), (0, 1, "token", "group"))}.get(axes, ())
        for rows, columns, row_name, column_name in pairs:
            last = "channel" if stage == "quantize" and column_name == "rank" else column_name
            figures.append(_counted(np.array(places, dtype=np.int64)[:, [rows, columns]], row_name, last, stage, arch))
    return figures


def _counted(at: np.ndarray, row_name: str, column_name: str, stage: str, arch: str) -> go.Figure:
    edges = [_tile_edges(int(at[:, axis].max()) + 1) for axis in (0, 1)]
    counts = np.histogram2d(at[:, 0], at[:, 1], bins=edges)[0].astype(int)
    figure = _heatmap(
        [[int(count) if count else None for count in line] for line in counts],
        _tile_names(edges[1]),
        _tile_names(edges[0]),
        [[0, "#fddbc7"], [1, "#67001f"]],
        max(int(counts.max()), 1),
        customdata=[[f"{count:,} rows" for count in line] for line in counts],
        meta={"arch": arch, "stage": stage},
    )
    return _titled(figure, column_name, row_name)


def error_maps(text: str) -> list[go.Figure]:
    """The maps of a row's `error_map`: share of bad elements per tile, with the largest margin in the tooltip; where no
    element is bad, the largest margins themselves.

    No figures for ''. Raises: ValueError where the text is no error map.
    """
    if not text:
        return []
    try:
        return [_error_map(one) for one in json.loads(text)["maps"]]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"error_map must hold maps with rows, columns, shape, share and max: {error!r}") from error


def _error_map(one: Mapping[str, Any]) -> go.Figure:
    share, largest = one["share"], one["max"]
    edges = [
        np.arange(len(side) + 1) * int(length) // len(side) for length, side in zip(one["shape"], (share, share[0]))
    ]
    said = [
        [
            f"{value:.3g} of its elements bad" + (f", largest margin {largest[i][j]}" if largest else "")
            for j, value in enumerate(line)
        ]
        for i, line in enumerate(share)
    ]
    names = _tile_names(edges[1]), _tile_names(edges[0])
    if largest and not any(map(any, share)):
        margins = [[_colour_value(float(value)) for value in line] for line in largest]
        figure = _heatmap(margins, *names, ALLOWED, CAP, customdata=said)
    else:
        figure = _heatmap(share, *names, SHARES, 1, customdata=said)
    return _titled(figure, str(one["columns"]), str(one["rows"]))


def kill_heatmap(faults: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Which check caught which fault: on how many of the architectures it was tried on.

    faults: the entries of the fault zoo's JSON, each with fault, arch, killed and checks ("stage/check").
    """
    names = list(dict.fromkeys(str(one["fault"]) for one in faults))
    checks = _in_order({str(check) for one in faults for check in one["checks"]})
    caught = {(str(one["fault"]), str(check), str(one["arch"])) for one in faults for check in one["checks"]}
    archs = {name: _in_order({str(one["arch"]) for one in faults if str(one["fault"]) == name}) for name in names}
    hits = [[[arch for arch in archs[name] if (name, check, arch) in caught] for check in checks] for name in names]
    figure = _heatmap(
        [[len(hit) / max(len(archs[name]), 1) for hit in line] for name, line in zip(names, hits)],
        checks,
        names,
        [[0, "#f3f3f3"], [0.01, "#cfe6d8"], [1, "#1a6b3c"]],
        1,
        customdata=[
            [f"caught on {', '.join(hit)}" if hit else f"not on {', '.join(archs[name])}" for hit in line]
            for name, line in zip(names, hits)
        ],
    )
    figure.update_layout(height=120 + 18 * len(names))
    return _titled(figure, "", "").update_xaxes(side="top")


def _in_order(names: set[str]) -> list[str]:
    """Checks ("stage/check") and archs as the tables have them."""
    split = pd.DataFrame([name.partition("/")[::2] for name in names], columns=["stage", "oracle"], dtype=object)
    ordered = sort_rows(split, ["stage", "oracle"])
    return [f"{stage}/{check}" if check else stage for stage, check in ordered.itertuples(index=False)]


def _heatmap(
    z: list[list[Any]], x: list[str], y: list[str], colours: list[Any], largest: float, **more: Any
) -> go.Figure:
    figure = go.Figure()
    figure.add_heatmap(
        z=z,
        x=x,
        y=y,
        colorscale=colours,
        zmin=0,
        zmax=largest,
        showscale=False,
        xgap=1,
        ygap=1,
        hovertemplate="%{y}, %{x}: %{customdata}<extra></extra>",
        **({"texttemplate": "%{text}"} if "text" in more else {}),
        **more,
    )
    style(figure).update_layout(height=130 + (26 if len(y) <= 6 else 17) * len(y))
    return figure


def _titled(figure: go.Figure, x: str, y: str) -> go.Figure:
    common = {"type": "category", "automargin": True, "showgrid": False, "dtick": 1, "zeroline": False}
    long = any(len(name) > 2 for name in figure.data[0].x)
    figure.update_xaxes(title={"text": x, "standoff": 6}, tickangle=-45 if long else 0, **common)
    return figure.update_yaxes(title={"text": y, "standoff": 4}, autorange="reversed", **common)


def _tile_edges(length: int) -> np.ndarray:
    tiles = min(length, _MOST_TILES)
    return np.arange(tiles + 1) * length // tiles


def _tile_names(edges: np.ndarray) -> list[str]:
    return [str(a) if b - a == 1 else f"{a}–{b - 1}" for a, b in pairwise(edges.tolist())]


def _name(value: object) -> str:
    return str(value) if value != "" else "plain dims"


def _colour_value(margin: float) -> float:
    return CAP if math.isnan(margin) else min(margin, CAP)


def _short(margin: float) -> str:
    return "NaN" if math.isnan(margin) else f"{margin:.2g}"


def _tooltip(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "no Case"
    return f"worst margin {record['margin_max']!r}, {record['cases']:,} rows, {record['mismatched']:,} mismatched"
