"""`oproj run --estimate`: how long a run takes, told before it; nothing of it is run and nothing is written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from conformance.case import Case
from conformance.cost import CostModel, Estimate, load_model
from conformance.cost_calibration import calibrate
from conformance.grid import Grid
from conformance.options import MOST_PROCESSES
from conformance.strategies import ProfileCases
from conformance.terminal import say
from oproj.engines.software.gemm import thread_count

_SAMPLE = 1500  # Cases of a profile on each arch that stand for all: drawing 100,000 would take minutes
_MINUTE, _HOUR = 60, 3600
Plan = Grid | ProfileCases


@dataclass(frozen=True)
class Outlook:
    """What is told of a run: the estimate, and the speed of this machine beside that of the fit."""

    estimate: Estimate
    model: CostModel
    slower: float


def outlook(plan: Plan, cores: int, finished: frozenset[str] = frozenset(), *, slower: float | None = None) -> Outlook:
    """The estimate of ``plan`` on ``cores``, less the Cases whose ids are ``finished``.

    slower: speed of the machine that is to run it, as `CostModel.estimate` takes it; ``None`` measures this one, which
    takes some seconds, with as many processes as it would have.

    Raises ``ValueError`` for cores below 1, for an arch without a measured cost, and for a damaged file of the fit.
    """
    if cores < 1:
        raise ValueError(f"cores={cores} must be at least 1")
    model = load_model()
    cases, counts = _stand_in(plan, finished)
    if slower is None:
        archs = tuple(dict.fromkeys(case.arch for case in cases))
        slower = calibrate(model, archs, min(cores, thread_count(), MOST_PROCESSES))
    drawn = isinstance(plan, ProfileCases)
    return Outlook(model.estimate(cases, cores, slower=slower, counts=counts, drawn=drawn), model, slower)


def tell(plan: Plan, cores: int, finished: frozenset[str] = frozenset()) -> None:
    """Print `outlook`. Raises what it raises."""
    for line in lines(outlook(plan, cores, finished)):
        say(line)


def lines(told: Outlook) -> list[str]:
    """What `tell` prints, line by line."""
    estimate, model = told.estimate, told.model
    number = sum(estimate.cases.values())
    if not number:
        return ["0 Cases: nothing to run"]
    names = "core" if estimate.cores == 1 else "cores"
    text = [
        f"{arch}: {count:,} Cases, {duration(estimate.processor_seconds[arch])} of processor time"
        for arch, count in estimate.cases.items()
    ]
    text += [
        f"all: {number:,} Cases, {duration(estimate.total_seconds)} of processor time",
        f"on {estimate.cores} free {names}, a process each: {duration(estimate.wall_seconds)}, "
        f"up to {estimate.process_bytes / 2**20:,.0f} MiB a process, "
        f"{estimate.gather_bytes / 2**20:,.0f} MiB in the one that gathers rows",
    ]
    if estimate.gpu_seconds:
        gpu = model.gpu
        text.append(
            f"{gpu.arch} on {gpu.device}: about {duration(estimate.gpu_seconds)}, a rough figure: in proportion to "
            f"{gpu.what}, which took {gpu.wall_seconds:,.0f} s"
        )
    text.append(
        f"a Case takes {told.slower:.2f} times the processor time here that it took on the machine of the fit "
        f"({model.machine}, {model.date})"
    )
    return text


def duration(seconds: float) -> str:
    """Three digits of seconds, minutes or hours."""
    for limit, unit, name in ((2 * _MINUTE, 1, "s"), (2 * _HOUR, _MINUTE, "min")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / _HOUR:,.1f} h"


def _stand_in(plan: Plan, finished: frozenset[str]) -> tuple[list[Case], dict[str, int] | None]:
    """Cases whose cost tells that of ``plan``, and how many of each arch the plan has where they are fewer."""
    if isinstance(plan, ProfileCases) and not finished:
        count = len(plan) // max(1, len(plan.archs))
        fewer = dataclasses.replace(plan, examples=min(count, _SAMPLE))
        return list(fewer.cases()), dict.fromkeys(plan.archs, count)
    return [case for case in plan.cases() if case.id not in finished], None
