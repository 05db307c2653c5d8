"""``python -m benchmarks [--out DIR] [--quick]``: the figures of this machine as one table (CSV and Markdown too)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import track

from benchmarks import chain, gpu, kernel, plot, software
from reports.tables import to_markdown


def main() -> int:
    """Run every figure; exit code 0, 1 when none could be taken, 2 for usage, 3 without the GPU they need."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of figures.csv and figures.md")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    parser.add_argument("--only", default="", help="comma list of: software, gpu, kernel, chain")
    arguments = parser.parse_args()
    rows = []
    parts = {"software": software, "gpu": gpu, "kernel": kernel, "chain": chain}
    unknown = [name for name in arguments.only.split(",") if arguments.only and name not in parts]
    if unknown:
        parser.error(f"--only: {', '.join(map(repr, unknown))} unknown; known: {', '.join(parts)}")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {arguments.out} is no folder to write to: {error}")
    chosen = [parts[name] for name in arguments.only.split(",")] if arguments.only else list(parts.values())
    figures: list[Callable[[], Any]] = [figure for part in chosen for figure in part.figures(quick=arguments.quick)]
    if not figures:
        print("nothing measured: the chosen figures need a GPU", file=sys.stderr)
        return 3
    for figure in track(figures, description="benchmarks", console=Console(stderr=True)):
        taken = figure()
        rows += taken if isinstance(taken, list) else [taken]
    frame = pd.DataFrame(rows, columns=["figure", "value", "unit", "target", "runs", "note"])
    frame.to_csv(arguments.out / "figures.csv", index=False)
    plot.roofline(frame, arguments.out / "roofline.svg")
    text = to_markdown(frame)
    (arguments.out / "figures.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if frame["value"].notna().any() else 1


if __name__ == "__main__":
    sys.exit(main())
