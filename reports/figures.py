"""Figures of rows, as Plotly figures: curves and bars. Heat maps are in `heatmaps.py`.

Each takes a frame of rows and gives a `Figure` that a notebook shows, and that the page has inline. Each trace's `meta`
says of which arch, stage and oracle it is, so that the page's filters can hide it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from .aggregate import aggregate, sort_rows
from .columns import JUDGED, RowsError

HEAD_DIM = 512
"""Elements of an attention head in every DeepSeek-V4 model; K of wo_a is this times the heads of a group."""
EDGES = np.append(np.arange(21) / 20, np.inf)
"""Bins of margins; the last one has what is above 1 and fails."""
CAP = 2.0
"""Margins above it are drawn at it; the tooltip has the number."""
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_ERRORS = {"margin_max": "worst margin", "rms_rel_error": "RMS rel. error", "signed_bias": "signed bias"}


def margin_distribution(df: pd.DataFrame, stage: str, oracle: str = "bound") -> go.Figure:
    """Share of the Cases of a stage by their worst margin, a line per arch; p99.9 and median on a click."""
    out = _figure("worst margin of a Case (above 1 fails)", "share of Cases")
    rows = _judged(df, stage, oracle)
    for index, arch in enumerate(_archs(rows)):
        of_arch = rows[rows["arch"] == arch]
        for name, dash, shown in (("margin_max", 0, True), ("margin_p999", 1, False), ("margin_p50", 2, False)):
            # NaN fails, so it stands with what is above 1.
            margins = of_arch[name].fillna(np.inf).to_numpy()
            counts = np.bincount(np.searchsorted(EDGES[1:-1], margins), minlength=len(EDGES) - 1)
            out.add_scatter(
                x=[*((EDGES[:-2] + EDGES[1:-1]) / 2).round(4).tolist(), 1.025],
                y=(counts / max(len(margins), 1)).tolist(),
                customdata=counts.tolist(),
                text=[*(f"{low:.2f} – {high:.2f}" for low, high in pairwise(EDGES[:-1])), "above 1 or NaN"],
                hovertemplate="%{text}: %{y:.2%} (%{customdata:,} Cases)<extra>%{fullData.name}</extra>",
                mode="lines+markers",
                line={"shape": "hvh", "color": _colour(index), "dash": _DASHES[dash], "width": 1.5},
                marker={"size": 4},
                name=f"{arch} {'max' if dash == 0 else 'p99.9' if dash == 1 else 'median'}",
                visible=True if shown else "legendonly",
                meta={"arch": arch, "stage": stage, "oracle": oracle},
            )
    out.add_vline(x=1, line={"color": "#a8181d", "width": 1, "dash": "dash"})
    return out.update_xaxes(range=[0, 1.1])


def ulp_bars(histograms: pd.DataFrame, stage: str, oracle: str) -> go.Figure:
    """Share of elements by distance in steps of the output format, bars per arch, on a logarithmic scale.

    histograms: `ulp_histograms` by arch, stage and oracle at least.
    """
    out = _figure("steps from the right number", "share of elements")
    here = histograms[(histograms["stage"] == stage) & (histograms["oracle"] == oracle)]
    steps = sorted(here["steps"].unique().tolist())
    names = [f"{step:,}" if step < 2 else f"{step:,}–{2 * step - 1:,}" for step in steps]
    for index, arch in enumerate(_archs(here)):
        counts = here[here["arch"] == arch].groupby("steps")["elements"].sum().reindex(steps, fill_value=0)
        out.add_bar(
            x=names,
            y=(counts / max(counts.sum(), 1)).tolist(),
            customdata=counts.tolist(),
            hovertemplate="%{x} steps: %{y:.3%} (%{customdata:,} elements)<extra>%{fullData.name}</extra>",
            marker={"color": _colour(index)},
            name=arch,
            meta={"arch": arch, "stage": stage, "oracle": oracle},
        )
    out.update_layout(legend={"y": 1.02, "yanchor": "bottom"}, margin={"t": 30})
    return out.update_yaxes(type="log", exponentformat="power", dtick=1).update_xaxes(type="category", tickangle=-45)


def error_against(df: pd.DataFrame, by: str, oracle: str = "bound") -> go.Figure:
    """Error against `by` ('tokens', 'tp_size' or 'K'), a line per arch and stage; a menu chooses which error.

    K is the length of the sums of wo_a and wo_b, by the Case (`with_k`).
    """
    headings = {"tokens": "tokens", "tp_size": "tensor parallel size", "K": "K, length of a sum"}
    out = _figure(headings[by], _ERRORS["margin_max"])
    rows = df[df["verdict"].isin(JUDGED) & (df["oracle"] == oracle)]
    rows = with_k(rows) if by == "K" else rows
    if not len(rows):
        return out
    table = aggregate(rows, ["arch", "stage", by])
    archs, stages = _archs(table), list(sort_rows(table[["stage"]].drop_duplicates(), ["stage"])["stage"])
    errors: dict[str, list[list[float | None]]] = {name: [] for name in _ERRORS}
    names = {value: str(value) for value in sorted(table[by].unique().tolist())}
    for stage in stages:
        for arch in archs:
            points = table[(table["arch"] == arch) & (table["stage"] == stage)].sort_values(by)
            for name in _ERRORS:
                errors[name].append(plain(points[name], CAP if name == "margin_max" else math.inf))
            out.add_scatter(
                x=[names[value] for value in points[by].tolist()],
                y=errors["margin_max"][-1],
                customdata=[_said(record) for record in points.to_dict("records")],
                hovertemplate="%{x}: %{customdata}<extra>%{fullData.name}</extra>",
                mode="lines+markers",
                line={"color": _colour(archs.index(arch)), "dash": _DASHES[stages.index(stage) % len(_DASHES)]},
                name=f"{arch} {stage}",
                meta={"arch": arch, "stage": stage, "oracle": oracle},
            )
    buttons = [
        {"label": label, "method": "update", "args": [{"y": errors[name]}, {"yaxis.title.text": label}]}
        for name, label in _ERRORS.items()
    ]
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "pad": {"b": 4}}
    out.update_layout(updatemenus=[menu], margin={"t": 44})
    # Sizes double, so they stand at equal distances.
    return out.update_xaxes(type="category", categoryorder="array", categoryarray=list(names.values()))


def with_k(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of wo_a and wo_b whose Case tells the length of their sums, with a column `K`.

    wo_a sums over the heads of a group, wo_b over the groups of a rank times their o_lora_rank.
    """
    rows = rows[rows["stage"].isin(["wo_a", "wo_b"])]
    codes, texts = pd.factorize(rows["case"])
    lengths = np.array([list(_k(text)) for text in texts], dtype=np.int64).reshape(-1, 2)
    found = np.where(rows["stage"] == "wo_a", lengths[codes, 0], lengths[codes, 1])
    rows = rows.assign(K=found)
    return rows[rows["K"] > 0]


def _k(text: str) -> Iterator[int]:
    """K of wo_a and of wo_b, 0 where the Case does not tell it."""
    try:
        case = json.loads(text)
    except ValueError:
        raise RowsError(f"column case must hold JSON objects, it has {text!r}") from None
    names = ("n_heads", "n_groups", "o_lora_rank")
    heads, groups, rank = (case.get(name) if type(case.get(name)) is int else 0 for name in names)
    yield heads // groups * HEAD_DIM if groups > 0 else 0
    yield groups * rank


def _said(record: dict[str, Any]) -> str:
    """Every error of a point with all its digits."""
    return ", ".join(f"{title} {record[name]!r}" for name, title in _ERRORS.items()) + f"; {record['cases']:,} rows"


def plain(values: pd.Series, cap: float) -> list[float | None]:
    """Numbers that JSON has: NaN and what stays infinite become None; what is above `cap` is drawn there."""
    capped = [min(float(value), cap) for value in values]
    return [value if math.isfinite(value) else None for value in capped]


def _judged(df: pd.DataFrame, stage: str, oracle: str) -> pd.DataFrame:
    return df[df["verdict"].isin(JUDGED) & (df["stage"] == stage) & (df["oracle"] == oracle) & (df["compared"] > 0)]


def _archs(df: pd.DataFrame) -> list[str]:
    return list(sort_rows(df[["arch"]].drop_duplicates(), ["arch"])["arch"])


def _colour(index: int) -> str:
    return _PALETTE[index % len(_PALETTE)]


def _figure(x: str, y: str) -> go.Figure:
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": x, "standoff": 8}, "automargin": True},
        "yaxis": {"title": {"text": y, "standoff": 4}, "automargin": True},
    }
    return style(go.Figure(layout=layout))


def style(figure: go.Figure) -> go.Figure:
    """The look that all figures share: no ground of their own, room for a phone."""
    return figure.update_layout(
        template={},
        font={"family": "system-ui, sans-serif", "size": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        height=320,
        legend={"orientation": "h", "y": -0.28, "yanchor": "top", "x": 0},
        barmode="group",
        dragmode=False,
        hovermode="closest",
    )
