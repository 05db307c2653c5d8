"""Plots of the figures: the roofline of the fused kernel over tokens, and the cost of a Case along its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

SHARE = r"fused kernel, share of copy, T=(?P<T>\d+), 128 heads, (?P<scales>packed|FP32) scales"
RATIO = r"serving kernel / fused kernel, T=(?P<T>\d+), 128 heads, (?P<scales>packed|FP32) scales"


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns T, scales, fused, serving (NaN where no serving kernel was timed)."""
    fused = frame["figure"].str.extract(SHARE).assign(fused=frame["value"]).dropna(subset="T")
    ratio = frame["figure"].str.extract(RATIO).assign(ratio=frame["value"]).dropna(subset="T")
    joined = fused.merge(ratio, on=["T", "scales"], how="left").astype({"T": int})
    joined["serving"] = joined["fused"] / joined["ratio"]
    return joined.drop(columns="ratio").sort_values(["scales", "T"])


def _pyplot() -> Any:
    """matplotlib.pyplot that draws SVG; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "oproj"  # the same figures give the same file
    from matplotlib import pyplot

    return pyplot


def roofline(frame: pd.DataFrame, path: Path) -> bool:
    """Write the plot as SVG; ``False`` where the frame holds no such figure or matplotlib is missing."""
    data = points(frame)
    if data.empty:
        return False
    pyplot = _pyplot()
    if pyplot is None:
        return False

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for scales, style in (("packed", "-"), ("FP32", "--")):
        part = data[data["scales"] == scales]
        axes.plot(part["T"], part["fused"], style, color="#1b6ca8", marker="o", label=f"fused kernel, {scales} scales")
        axes.plot(
            part["T"], part["serving"], style, color="#999999", marker="s", label=f"serving kernel, {scales} scales"
        )
    axes.axhline(1.0, color="#333333", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens", ylabel="share of device copy bandwidth", ylim=(0, 1.1))
    axes.set_title("Inverse RoPE and FP8 quantisation, 128 heads")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def cost(frame: pd.DataFrame, names: Sequence[str], path: Path) -> bool:
    """Write the plot of measured (points) and fitted (lines) cost as SVG: seconds along each line of ``names``, memory
    along tokens and groups, and prediction over measurement of Cases that the fit had not seen; ``False`` where
    matplotlib is missing.

    frame: columns arch, source, those of ``names``, seconds, fit_seconds, unseen_seconds, bytes, fit_bytes.
    """
    pyplot = _pyplot()
    if pyplot is None:
        return False
    memory = ("tokens", "n_groups")
    figure, grid = pyplot.subplots(2, -(-(len(names) + len(memory) + 1) // 2), figsize=(13, 6))
    places = list(grid.flat)
    for name in names:
        _line(places.pop(0), frame[frame["source"] == name], name, "seconds", 1.0, "processor seconds")
    for name in memory:
        _line(places.pop(0), frame[frame["source"] == name], name, "bytes", 2.0**-20, "peak memory of a process, MiB")
    unseen, last = frame.dropna(subset="unseen_seconds"), places.pop(0)
    for color, (_, rows) in zip(_COLORS, unseen.groupby("arch")):
        last.plot(rows["seconds"], rows["unseen_seconds"], ".", color=color, markersize=4)
    ends = [unseen["seconds"].min(), unseen["seconds"].max()]
    last.plot(ends, ends, color="#333333", linewidth=0.8)
    last.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, Case not seen, s")
    for spare in places:
        spare.axis("off")
    grid.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


_COLORS = ("#1b6ca8", "#c8553d", "#588157", "#8e6c8a")


def _line(axes: Any, rows: pd.DataFrame, name: str, what: str, unit: float, label: str) -> None:
    for color, (arch, part) in zip(_COLORS, rows.groupby("arch")):
        ordered = part.sort_values(name)
        axes.plot(ordered[name], ordered[what] * unit, "o", color=color, markersize=4, label=arch)
        axes.plot(ordered[name], ordered[f"fit_{what}"] * unit, "-", color=color, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(rows[name])), [f"{value}" for value in sorted(set(rows[name]))], fontsize=8)
    axes.set(xlabel=name, ylabel=label, ylim=(0, None))
