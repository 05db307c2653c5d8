"""Figures of the page: which, in what order, with a heading each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from .aggregate import row_faults, sort_rows
from .columns import JUDGED, MARGINS
from .figures import error_against, margin_distribution, ulp_bars
from .heatmaps import error_maps, fault_heatmap, first_bad_heatmaps, margin_heatmap

_PAIRS = {
    "preset × family": ("preset", "family"),
    "TP × tokens": ("tp_size", "tokens"),
    "stage × family": ("stage", "family"),
}

MOST_MARGIN_MAPS = 6
_COLUMNS = [
    "arch", "stage", "oracle", "evidence", "preset", "tp_size", "tokens", "family", "compared", "mismatched", *MARGINS,
    "rms_rel_error", "signed_bias", "calc_diff", "ulp_max", "verdict",
]  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """A figure with its heading; `of` says of which arch, stage and oracle it is, where it is of one."""

    title: str
    figure: go.Figure
    of: dict[str, list[str]] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Its traces and layout as Plotly's script takes them."""
        plain: dict[str, Any] = self.figure.to_plotly_json()
        plain["layout"].pop("template", None)
        return plain


def heat_maps(df: pd.DataFrame) -> list[Panel]:
    """Worst margins of the bound oracle over pairs of columns, per arch."""
    rows = _compared(df, df["oracle"] == "bound")
    archs = {arch: rows[rows["arch"] == arch] for arch in _sorted(rows, "arch")}
    return [
        Panel(f"{arch}: {name}", margin_heatmap(of_arch, arch, *pair), {"arch": [arch], "oracle": ["bound"]})
        for name, pair in _PAIRS.items()
        for arch, of_arch in archs.items()
    ]


def failure_maps(df: pd.DataFrame) -> list[Panel]:
    """Which rows fail, per arch that has some."""
    faults = row_faults(df) != ""
    judged = df[["arch", "stage", "oracle", "family"]].assign(fails=faults)[df["verdict"].isin(JUDGED)]
    failed = judged[judged["fails"]]
    return [
        Panel(f"{arch}: failing rows", fault_heatmap(judged, arch), {"arch": [arch]})
        for arch in _sorted(failed, "arch")
    ]


def first_bad_maps(df: pd.DataFrame) -> list[Panel]:
    """Where the first bad elements of failed rows lie, per stage and arch."""
    failed = df.loc[row_faults(df) != "", ["arch", "stage", "verdict", "first_bad"]]
    panels = []
    for stage in _sorted(failed, "stage"):
        for arch in _sorted(failed[failed["stage"] == stage], "arch"):
            for figure in first_bad_heatmaps(failed, stage, arch):
                pair = f"{figure.layout.yaxis.title.text} × {figure.layout.xaxis.title.text}"
                panels.append(Panel(f"{arch} {stage}: first bad, {pair}", figure, {"arch": [arch], "stage": [stage]}))
    return panels


def margin_maps(df: pd.DataFrame) -> list[Panel]:
    """Where the largest margins that hold sit: of each arch and stage the row with the largest that has a map, and of
    these rows the `MOST_MARGIN_MAPS` with the largest."""
    names = ["arch", "stage", "oracle", "case_id", "margin_max", "error_map"]
    rows = df.loc[(df["error_map"] != "") & (df["verdict"] == "pass") & df["margin_max"].notna(), names]
    rows = rows.sort_values("margin_max", ascending=False, kind="stable").drop_duplicates(["arch", "stage"])
    panels = []
    for arch, stage, oracle, case, _, text in rows.head(MOST_MARGIN_MAPS).itertuples(index=False, name=None):
        for figure in error_maps(text):
            pair = f"{figure.layout.yaxis.title.text} × {figure.layout.xaxis.title.text}"
            panels.append(Panel(f"{arch} {stage}, Case {case}: {pair}", figure, {"arch": [arch], **_of(stage, oracle)}))
    return panels


def distributions(df: pd.DataFrame, histograms: pd.DataFrame) -> list[Panel]:
    """Margins and ULPs per stage and oracle, then error against sizes."""
    rows = _compared(df, df["oracle"].isin(["bound", "format"]))
    bound = _compared(df, df["oracle"] == "bound", "case")
    panels = []
    for stage, oracle in _places(rows):
        panels.append(
            Panel(f"{stage}: margins, {oracle}", margin_distribution(rows, stage, oracle), _of(stage, oracle))
        )
    for stage, oracle in _places(histograms):
        panels.append(Panel(f"{stage}: ULP, {oracle}", ulp_bars(histograms, stage, oracle), _of(stage, oracle)))
    for name, by in (("tokens", "tokens"), ("TP", "tp_size"), ("K", "K")):
        figure = error_against(bound, by)
        if figure.data:
            panels.append(Panel(f"error against {name}, bound", figure, {"oracle": ["bound"]}))
    return panels


def _compared(df: pd.DataFrame, chosen: pd.Series, *more: str) -> pd.DataFrame:
    """Judged rows with elements, less the long texts: to copy these for each figure takes longer than the figures."""
    mask = chosen & df["verdict"].isin(JUDGED) & (df["compared"] > 0)
    return df.loc[mask, [*_COLUMNS, *more]]


def _of(stage: str, oracle: str) -> dict[str, list[str]]:
    return {"stage": [stage], "oracle": [oracle]}


def _places(df: pd.DataFrame) -> Iterator[tuple[str, str]]:
    keys = ["stage", "oracle"]
    yield from sort_rows(df[keys].drop_duplicates().astype(object), keys).itertuples(index=False, name=None)


def _sorted(df: pd.DataFrame, name: str) -> list[str]:
    return list(sort_rows(df[[name]].drop_duplicates().astype(object), [name])[name])
