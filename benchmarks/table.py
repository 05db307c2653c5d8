"""One line of the table, and how a call is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

RUNS = 7
Row = dict[str, Any]


def row(figure: str, value: float, unit: str, target: str = "", runs: int = RUNS, note: str = "") -> Row:
    """A figure with its unit, the target it has to meet and the number of runs behind it."""
    return {"figure": figure, "value": value, "unit": unit, "target": target, "runs": runs, "note": note}


def median_seconds(call: Callable[[], Any], runs: int = RUNS) -> float:
    """Median wall time of ``call`` after one call to warm up."""
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
