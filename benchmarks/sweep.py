"""``python -m benchmarks.sweep``: run a random share of the nightly sweep's Cases, and compare with the estimate of it.

The sweep is ``oproj run --arch sm90,sm100,sm103,sm120 --profile nightly --examples 25000``. Processor time counts: it
moves less with other load of the machine than wall time, and the wall time on free cores follows from it. Prints a
table in Markdown, and writes sample.csv to ``--out``; exit code 1 where an estimate is off by more than 30 %.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import Progress

from conformance.cost import Estimate, load_model
from conformance.cost_calibration import Measured, calibrate, measure_all
from conformance.estimate import duration
from conformance.strategies import ProfileCases
from oproj.arch import ARCHS
from reports.tables import to_markdown

EXAMPLES = 25_000  # on each of the four architectures: 100,000 Cases
CORES = (2, 64)
OFF = 0.3


def sample(share: float, examples: int, workers: int, seed: int) -> pd.DataFrame:
    """One row per Case of a random ``share`` of the sweep: arch, family, processor seconds, bytes, and the fit's."""
    model, rng = load_model(), random.Random(seed)
    chosen = []
    for arch in ARCHS:
        listed = list(ProfileCases("nightly", (arch,), examples).cases())
        chosen += rng.sample(listed, max(1, round(share * examples)))
    rng.shuffle(chosen)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=len(chosen))

        def advance(_: Measured) -> None:
            bar.advance(task)

        found = measure_all(chosen, workers, advance)
    return pd.DataFrame(
        {
            "arch": each.case.arch,
            "family": each.case.family,
            "preset": each.case.preset,
            "tp_size": each.case.tp_size,
            "tokens": each.case.tokens,
            "seconds": each.seconds,
            "bytes": each.bytes,
            "fit_seconds": model.case_seconds(each.case),
            "fit_bytes": model.case_bytes(each.case),
            "case": each.case.to_json(),
        }
        for each in found
    )


def compared(frame: pd.DataFrame, examples: int, slower: float) -> pd.DataFrame:
    """By arch: processor time of the sweep after the sample and after the estimate, and the error of the estimate."""
    rows = []
    for arch, part in [*frame.groupby("arch"), ("all", frame)]:
        scale = examples * (len(ARCHS) if arch == "all" else 1) / len(part)
        measured, estimated = part["seconds"].sum() * scale, part["fit_seconds"].sum() * scale * slower
        spread = part["seconds"].std() / part["seconds"].mean() / len(part) ** 0.5
        rows.append({"arch": arch, "Cases run": len(part), "measured, h": measured / 3600, "its standard error": spread,
                     "estimated, h": estimated / 3600, "error": estimated / measured - 1})  # fmt: skip
    return pd.DataFrame(rows)


def walls(examples: int, slower: float) -> list[Estimate]:
    """What `--estimate` tells of the sweep on each of `CORES`."""
    cases = list(ProfileCases("nightly", tuple(ARCHS), 1500).cases())
    counts = dict.fromkeys(ARCHS, examples)
    model = load_model()
    return [model.estimate(cases, cores, slower=slower, counts=counts, drawn=True) for cores in CORES]


def main() -> int:
    """Measure and print; exit code 0, 1 where the estimate is off, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--share", type=float, default=0.01, help="of the Cases of the sweep, to be run")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="Cases of the sweep on each architecture")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of Cases")
    parser.add_argument("--out", type=Path, default=Path("out/sweep-sample"), help="folder of sample.csv")
    arguments = parser.parse_args()
    if not 0 < arguments.share <= 1 or arguments.workers < 1 or arguments.examples < 1:
        parser.error("--share must lie in 0 .. 1, --workers and --examples must be at least 1")
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Before and after, since the load of the machine changes; as the estimate does it.
    before = calibrate(load_model(), list(ARCHS), arguments.workers)
    frame = sample(arguments.share, arguments.examples, arguments.workers, arguments.seed)
    frame.to_csv(arguments.out / "sample.csv", index=False)
    after = calibrate(load_model(), list(ARCHS), arguments.workers)
    table = compared(frame, arguments.examples, (before + after) / 2)
    print(f"a Case takes {before:.2f} times the fit's processor time before, {after:.2f} times after\n")
    print(to_markdown(table))
    for estimate in walls(arguments.examples, (before + after) / 2):
        print(f"on {estimate.cores} free cores: {duration(estimate.wall_seconds)}")
    return 1 if (table["error"].abs() > OFF).any() else 0


if __name__ == "__main__":
    sys.exit(main())
