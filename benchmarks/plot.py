"""The roofline: share of the device's copy bandwidth that the fused kernel and today's serving kernel reach, over T."""

from __future__ import annotations

from pathlib import Path

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


def roofline(frame: pd.DataFrame, path: Path) -> bool:
    """Write the plot as SVG; ``False`` where the frame holds no such figure or matplotlib is missing."""
    data = points(frame)
    if data.empty:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    from matplotlib import pyplot

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
