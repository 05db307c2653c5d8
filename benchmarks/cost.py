"""``python -m benchmarks.cost``: measure Cases, fit the cost model of `oproj run --estimate`, plot it.

Cases of every architecture: those that profiles draw, and lines along tokens, groups, o_lora_rank, hidden and TP. Each
is run on the software engine, one thread, in as many processes as ``--workers``; its processor time and peak memory
count, which other load of the machine moves less than wall time. A third of the Cases is held out of a first fit and
says how good it is; the coefficients are those of all. Writes cases.csv, cost.svg and cost.json to ``--out``, and with
``--keep`` the coefficients into the package.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.progress import Progress
from scipy.optimize import nnls

import oproj
from benchmarks import plot
from benchmarks.reports import rows as synthetic_rows
from benchmarks.reports import write_parts
from conformance.case import Case
from conformance.cost import FEATURES, PATH, CostModel, GpuFigure, Overhead, features
from conformance.cost_calibration import Measured, calibration_case, measure_all
from conformance.strategies import PROFILES, profile_cases
from oproj.arch import ARCHS
from reports.files import write_text
from reports.tables import to_markdown

PROFILE_CASES = {"nightly": 100, "gpu": 24}  # of each arch
LINES = {
    "tokens": (1, 2, 4, 8, 16, 33, 65, 129),
    "n_groups": (1, 2, 3, 4, 8),
    "o_lora_rank": (128, 256, 512, 1024),
    "hidden_size": (128, 256, 512, 1024, 4096),
    "tp_size": (1, 2, 4, 8),
}
_BASE = {"preset": "v4-flash", "tokens": 5, "hidden_size": 256, "n_groups": 2, "o_lora_rank": 512}
_CALIBRATIONS = 7
_HELD_OUT = 3  # every third
_ROWS_OF_A_CASE = 18
# Wall time of one run on a GPU with the real DeepGEMM, the model beside it on 15 processes; recorded, not fitted.
_GPU = ("sm90", "one NVIDIA H200, 15 processes", "the 2,000 Cases of profile gpu", 153.0)


def lines(arch: str) -> Iterator[tuple[str, Case]]:
    """(field, Case) along each line of `LINES`; those that an arch cannot have are left out."""
    for name, values in LINES.items():
        for value in values:
            fields = _BASE | {"n_groups": 8 if name == "tp_size" else 2} | {name: value}
            try:
                yield name, Case(arch, **fields)  # type: ignore[arg-type]
            except ValueError:  # packed scales need K of wo_b in steps of 512
                continue


def spread(archs: Sequence[str], scale: float, seed: int = 0) -> list[tuple[str, Case]]:
    """(source, Case) to measure, in random order; ``scale`` of the numbers of Cases that profiles draw."""
    chosen: list[tuple[str, Case]] = []
    rng = random.Random(seed)
    for arch in archs:
        for profile, count in PROFILE_CASES.items():
            pool = profile_cases(profile, arch, 600, seed=1)
            chosen += [(profile, case) for case in rng.sample(pool, max(1, round(count * scale)))]
        chosen += lines(arch)
        chosen += [("calibration", calibration_case(arch))] * _CALIBRATIONS
    rng.shuffle(chosen)
    return chosen


def fit(cases: Sequence[Case], measured: Sequence[float]) -> dict[str, float]:
    """Coefficients of least squares, none negative, of what ``cases`` took. The weights are those of noise whose
    variance grows with the prediction, and the sum of the predictions is that of the figures."""
    amounts = np.array([[features(case)[name] for name in FEATURES] for case in cases])
    values, unit = np.asarray(measured), np.maximum(amounts.max(0), 1e-12)
    weight = np.ones(len(values))
    for _ in range(5):
        found, _ = nnls(amounts / unit * weight[:, None], values * weight)
        predicted = amounts / unit @ found
        weight = 1 / np.sqrt(np.maximum(predicted, values.mean() / 20))
    found *= values.sum() / predicted.sum()
    return dict(zip(FEATURES, (found / unit).tolist(), strict=True))


def predicted(coefficients: dict[str, float], cases: Sequence[Case]) -> list[float]:
    """What ``coefficients`` give for each Case."""
    return [sum(coefficients[name] * amount for name, amount in features(case).items()) for case in cases]


def fitted(frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, dict[str, float]], dict[str, float]]:
    """``frame`` with the fit of all and the one that had not seen a Case; coefficients of seconds by arch, of bytes."""
    frame = frame.assign(fit_seconds=np.nan, unseen_seconds=np.nan)
    seconds = {}
    for arch, rows in frame.groupby("arch"):
        held = np.arange(len(rows)) % _HELD_OUT == 0
        cases = rows["object"].tolist()
        early = fit(list(rows["object"][~held]), rows["seconds"][~held])
        seconds[str(arch)] = fit(cases, rows["seconds"])
        frame.loc[rows.index, "fit_seconds"] = predicted(seconds[str(arch)], cases)
        frame.loc[rows.index[held], "unseen_seconds"] = predicted(early, list(rows["object"][held]))
    memory = fit(frame["object"].tolist(), frame["bytes"])
    return frame.assign(fit_bytes=predicted(memory, frame["object"].tolist())), seconds, memory


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """How good the fit is, by arch and source: relative error of the sum, and median of a Case's, of unseen Cases."""
    unseen = frame.dropna(subset="unseen_seconds")
    rows = []
    for (arch, source), part in unseen.groupby(
        ["arch", unseen["source"].where(unseen["source"] == "nightly", "other")]
    ):
        error = part["unseen_seconds"] / part["seconds"] - 1
        total = part["unseen_seconds"].sum() / part["seconds"].sum() - 1
        rows.append({"arch": arch, "cases": source, "held out": len(part), "error of the sum": total,
                     "median error of a Case": error.abs().median()})  # fmt: skip
    return pd.DataFrame(rows)


_RUN = """
import os, resource, sys
sys.argv[0] = "oproj"
from conformance.cli import app
try:
    app()
finally:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print("self", usage.ru_utime + usage.ru_stime, file=open(os.environ["OPROJ_USAGE"], "w"))
"""


def gathering(out: Path, few: int, many: int) -> tuple[float, float]:
    """(seconds of the process that gathers rows, per run and per Case), from two runs of a profile on two processes:
    drawing, writing rows, tables and page together."""
    spent = []
    for count in (few, many):
        usage = out / "usage.txt"
        arguments = ["run", "--arch", "sm90", "--engine", "software", "--profile", "nightly", "--examples", str(count)]
        command = [sys.executable, "-c", _RUN, *arguments, "--workers", "2", "--out", str(out / f"run-{count}")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OPROJ_USAGE": str(usage)})
        spent.append(float(usage.read_text().split()[1]))
    each = (spent[1] - spent[0]) / (many - few)
    return max(0.0, spent[0] - each * few), max(0.0, each)


_START = """
import time
from conformance.cost_calibration import calibration_case, measure
measure(calibration_case("sm90"))
print(time.process_time() - measure(calibration_case("sm90")).seconds * 2)
"""


def overhead(out: Path, quick: bool) -> Overhead:
    """What a run costs beside its Cases, each as processor seconds."""
    once, each = gathering(out, 8, 16) if quick else gathering(out, 40, 240)
    worker = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, check=True)
    started = time.process_time()
    profile_cases("nightly", "sm90", 600, seed=2)
    draw = (time.process_time() - started) / 600
    finish, finish_bytes = finishing(50, 500) if quick else finishing(1_000, 10_000)
    return Overhead(once + float(worker.stdout), draw, max(0.0, each - draw - finish), finish, finish_bytes)


_FINISH = """
import resource, sys, time
from pathlib import Path
from reports.page import write_page
from reports.store import load, write_csv
from reports.tables import write_markdown
folder, started = Path(sys.argv[1]), time.process_time()
df = load(folder)
write_markdown(df, folder / "tables.md"), write_csv(df, folder / "rows.csv"), write_page(df, folder / "report.html")
print(time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def finishing(few: int, many: int) -> tuple[float, float]:
    """(processor seconds, bytes) for a Case of what comes when all have ended: loading rows, tables, page."""
    spent = []
    for count in (few, many):
        with tempfile.TemporaryDirectory() as name:
            write_parts(synthetic_rows(_ROWS_OF_A_CASE * count), Path(name))
            command = [sys.executable, "-c", _FINISH, name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        spent.append([float(figure) for figure in told])
    seconds, held = ((after - before) / (many - few) for before, after in zip(*spent, strict=True))
    return max(0.0, seconds), max(0.0, held)


def gpu_figure(seconds: dict[str, float]) -> GpuFigure:
    """The recorded GPU run, with what the fit says of its Cases; a sample of them stands for all."""
    sample = profile_cases("gpu", _GPU[0], 600)
    work = statistics.fmean(predicted(seconds, sample)) * PROFILES["gpu"].count
    return GpuFigure(*_GPU, work)


def machine() -> str:
    """Processor and cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """What computed the figures."""
    return {
        "oproj": oproj.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def measured_frame(chosen: Sequence[tuple[str, Case]], workers: int) -> pd.DataFrame:
    """One row per Case of ``chosen``: source, the fields that its cost depends on, seconds and bytes."""
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=len(chosen))

        def advance(_: Measured) -> None:
            bar.advance(task)

        found = measure_all([case for _, case in chosen], workers, advance)
    names = ("arch", "preset", "tokens", "n_groups", "o_lora_rank", "hidden_size", "tp_size", "wo_a_dtype", "family",
             "position_family")  # fmt: skip
    return pd.DataFrame(
        {
            "source": source,
            **{name: getattr(each.case, name) for name in names},
            "macs": each.case.macs,
            "seconds": each.seconds,
            "bytes": each.bytes,
            "object": each.case,
        }
        for (source, _), each in zip(chosen, found, strict=True)
    )


def model_of(frame: pd.DataFrame, seconds: dict[str, dict[str, float]], memory: dict[str, float], costs: Overhead,
             table: pd.DataFrame) -> CostModel:  # fmt: skip
    """The model of a measured and fitted ``frame``."""
    calibrations = frame[frame["source"] == "calibration"].groupby("arch")["seconds"].median()
    nightly = table[table["cases"] == "nightly"].set_index("arch")["error of the sum"]
    return CostModel(
        seconds=_rounded(seconds),
        bytes=_rounded({"": memory})[""],
        calibration=_rounded({"": calibrations.to_dict()})[""],
        overhead=Overhead(**_rounded({"": asdict(costs)})[""]),
        gpu=gpu_figure(seconds[_GPU[0]]),
        held_out=_rounded({"": nightly.to_dict()})[""],
        machine=machine(),
        versions=versions(),
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
    )


def _rounded(coefficients: dict[str, dict[Any, float]]) -> dict[str, dict[str, float]]:
    """Four digits: there is no more in them, and a diff of the file can be read."""
    return {key: {name: float(f"{value:.4g}") for name, value in one.items()} for key, one in coefficients.items()}


def main() -> int:
    """Measure, fit, write; exit code 0, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/cost"), help="folder of cases.csv, cost.svg, cost.json")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that measure at once")
    parser.add_argument("--keep", action="store_true", help=f"write {PATH.name} into the package too")
    parser.add_argument("--quick", action="store_true", help="few Cases: shows that it runs, the fit is worth nothing")
    arguments = parser.parse_args()
    if arguments.workers < 1 or (arguments.keep and arguments.quick):
        parser.error("--workers must be at least 1, and --keep takes no --quick")
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = spread(list(ARCHS), 0.1 if arguments.quick else 1.0)
    if arguments.quick:
        chosen = [item for item in chosen if item[1].macs < 3e7]
    frame, seconds, memory = fitted(measured_frame(chosen, arguments.workers))
    frame.drop(columns="object").to_csv(arguments.out / "cases.csv", index=False)
    table = summary(frame)
    print(to_markdown(table))
    model = model_of(frame, seconds, memory, overhead(arguments.out, arguments.quick), table)
    plot.cost(frame, list(LINES), arguments.out / "cost.svg")
    for path in [arguments.out / PATH.name, *([PATH] if arguments.keep else [])]:
        write_text(path, model.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
