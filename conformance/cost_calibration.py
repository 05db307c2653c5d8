"""Processor time and peak memory of Cases, and how fast this machine is beside the one that the cost model knows."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conformance.case import Case
from conformance.cost import CostModel
from conformance.isolation import CASE_TIMEOUT, Lost, run_isolated
from conformance.runner import Run, Target, run_case

_SOFTWARE, _STATUS, _CLEAR = Target("software"), Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)
_ROUNDS = 3


@dataclass(frozen=True)
class Measured:
    """Processor seconds of a Case, all threads of its process together, and peak resident bytes of that process (NaN
    where the system does not tell)."""

    case: Case
    seconds: float
    bytes: float


def calibration_case(arch: str) -> Case:
    """The Case of ``arch`` whose time tells the speed of a machine: about half a second."""
    return Case(arch, "v4-flash", 5, hidden_size=256, n_groups=2, o_lora_rank=512, position_family="shuffled")


def measure(case: Case) -> Measured:
    """Run ``case`` on the software engine in this process, and say what it took. The first call in a process also runs
    a small Case of the arch unmeasured, since imports and compiled code are read then."""
    _warm(case.arch)
    _reset_peak()
    started = time.process_time()
    run_case(case, _SOFTWARE, _this_run())
    seconds = time.process_time() - started
    return Measured(case, seconds, _peak_bytes())


def measure_all(
    cases: Iterable[Case], workers: int, on_case: Callable[[Measured], object] = lambda measured: None
) -> list[Measured]:
    """`measure` of each Case in ``workers`` processes at once, as a run has them. Raises ``RuntimeError`` where one
    dies."""
    found = []
    for case, result in run_isolated(cases, measure, workers=workers, timeout=CASE_TIMEOUT):
        if isinstance(result, Lost):
            raise RuntimeError(f"case {case.to_json()}: {result.reason}")
        on_case(result)
        found.append(result)
    return found


def calibrate(
    model: CostModel,
    archs: Sequence[str],
    workers: int,
    measured: Callable[[Iterable[Case], int], list[Measured]] = measure_all,
) -> float:
    """Processor time of a Case here over that on the machine of ``model``, with ``workers`` processes at work at once.

    Some seconds. 1.0 where no arch is asked for. Raises ``ValueError`` for an arch that ``model`` does not know.
    """
    unknown = [arch for arch in archs if arch not in model.calibration]
    if unknown:
        raise ValueError(f"arch={unknown[0]!r} has no measured cost; measured: {', '.join(model.calibration)}")
    if not archs:
        return 1.0
    rounds = max(_ROUNDS * workers, 4)
    cases = [calibration_case(archs[number % len(archs)]) for number in range(rounds)]
    ratios = [each.seconds / model.calibration[each.case.arch] for each in measured(cases, workers)]
    return statistics.median(ratios)


@cache
def _warm(arch: str) -> None:
    small = Case(arch, "v4-flash", 2, hidden_size=128, n_groups=1, o_lora_rank=512)
    run_case(small, _SOFTWARE, _this_run())


@cache
def _this_run() -> Run:
    return Run.now("cost")


def _reset_peak() -> None:
    """Give freed memory back and let the kernel's peak start again from here; elsewhere than on Linux nothing."""
    gc.collect()
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    _CLEAR.write_text(_RESET_PEAK)


def _peak_bytes() -> float:
    if not sys.platform.startswith("linux"):
        return float("nan")
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024.0
