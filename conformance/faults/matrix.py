"""The kill matrix: which check sees which fault on which architecture, in which Case, at what cost.

Cases are the first ones of the `ci` profile, taken in order; a fault is run on those that it fits (elsewhere it changes
nothing) until a check fails. A fresh implementation per Case, so that every kill replays from its Case alone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from conformance.case import Case
from conformance.faults.cases import EXAMPLES, ci_cases
from conformance.faults.fault import Fault
from conformance.faults.registry import get_faults
from conformance.faults.reports import SUITE_FAULTS, SuiteFault, diluting, self_test_fails
from conformance.faults.variants import VARIANTS
from conformance.judge import FAIL
from conformance.stages import StageResult, run_stages
from conformance.worker import start_worker

VARIANT_EXAMPLES = 4
_CHUNKS = 6  # tasks per arch, so that a slow fault does not keep one process busy alone
Check = str  # "stage/oracle", or "stage/property" of an exact property


@dataclass(frozen=True)
class Kill:
    """One fault on one arch. ``case_number`` counts from 1 in the profile (0: survived); ``cases_run`` are those it
    fits; ``only``: the one check without which it survives all of the Cases, or ''."""

    fault: str
    stage: str
    arch: str
    source: str
    checks: tuple[Check, ...] = ()
    case: str = ""
    case_number: int = 0
    cases_run: int = 0
    macs: int = 0
    seconds: float = 0.0
    only: Check = ""

    @property
    def killed(self) -> bool:
        """Whether any check saw it."""
        return bool(self.checks)


@dataclass(frozen=True)
class Alarm:
    """One right variant on one arch: how many Cases it ran, and what was flagged."""

    variant: str
    arch: str
    cases_run: int
    seconds: float
    alarms: tuple[str, ...] = field(default=())


def checks_of(result: StageResult) -> tuple[Check, ...]:
    """'stage/oracle', or 'stage/property' of each exact property that failed."""
    return tuple(f"{result.stage}/{name}" for name in result.verdict.checks or (result.oracle,))


def failed_checks(case: Case, implementation: object) -> tuple[Check, ...]:
    """The checks that fail, each once, in the order of the stages."""
    failed = [r for r in run_stages(case, implementation) if r.verdict.status == FAIL]  # type: ignore[arg-type]
    return tuple(dict.fromkeys(check for result in failed for check in checks_of(result)))


def kill(fault: Fault, arch: str, cases: Sequence[Case], *, thorough: bool = True) -> Kill:
    """Run ``fault`` until it is killed; ``thorough`` goes on while one check alone has seen it, to find ``only``."""
    started, run, first, seen = time.perf_counter(), 0, None, set()
    for number, case in enumerate(cases, 1):
        if not fault.fits(case):
            continue
        run += 1
        checks = failed_checks(case, fault.implementation(arch))
        seen |= set(checks)
        if checks and first is None:
            spent = time.perf_counter() - started
            first = (checks, case.to_json(), number, run, case.macs, spent)
        if first and (len(seen) > 1 or not thorough):
            break
    if first is None:
        return Kill(fault.name, fault.stage, arch, fault.source, cases_run=run, seconds=time.perf_counter() - started)
    return Kill(fault.name, fault.stage, arch, fault.source, *first, only=seen.pop() if len(seen) == 1 else "")


def kill_suite_fault(fault: SuiteFault, arch: str, cases: Sequence[Case]) -> Kill:
    """Break the suite and see its own test fail, in a Case where the unbroken suite passes it."""
    started = time.perf_counter()
    number, case = next((n, diluting(c)) for n, c in enumerate(cases, 1) if fault.fits(c))
    noticed = self_test_fails(fault, case) and not self_test_fails(fault, case, broken=False)
    spent, checks = time.perf_counter() - started, (fault.check,) if noticed else ()
    number = number if noticed else 0
    only = fault.check if noticed else ""
    return Kill(fault.name, fault.stage, arch, fault.source, checks, case.to_json(), number, 1, case.macs, spent, only)


def alarms(name: str, arch: str, cases: Iterable[Case], limit: int) -> Alarm:
    """Run the variant on the first ``limit`` Cases it fits."""
    variant = next(v for v in VARIANTS if v.name == name)
    started, run, found = time.perf_counter(), 0, []
    for case in cases:
        if run == limit:
            break
        if not variant.fits(case):
            continue
        prepared = variant.prepare(case)
        run += 1
        found += [f"{check}: {prepared.to_json()}" for check in failed_checks(prepared, variant.implementation(arch))]
    return Alarm(name, arch, run, time.perf_counter() - started, tuple(found))


def _task(
    arch: str, faults: list[str], variants: list[str], suite: bool, examples: int, thorough: bool
) -> list[Kill | Alarm]:
    cases = ci_cases(arch, examples)
    kills: list[Kill | Alarm] = (
        [kill(fault, arch, cases, thorough=thorough) for fault in get_faults(faults)] if faults else []
    )
    kills += [alarms(name, arch, cases, VARIANT_EXAMPLES) for name in variants]
    return kills + ([kill_suite_fault(fault, arch, cases) for fault in SUITE_FAULTS] if suite else [])


def run_matrix(
    archs: Sequence[str],
    names: Sequence[str] = (),
    *,
    examples: int = EXAMPLES,
    workers: int = 2,
    thorough: bool = True,
) -> Iterator[Kill | Alarm]:
    """All faults (or those named) and, where none is named, all variants and suite faults on every arch.

    ``thorough``: as of `kill`.
    """
    tasks = []
    chosen = get_faults(names)
    for arch in archs:
        faults = [fault.name for fault in chosen if arch in fault.archs]
        variants = [] if names else [variant.name for variant in VARIANTS if arch in variant.archs]
        for chunk in range(_CHUNKS):
            part = (faults[chunk::_CHUNKS], variants[chunk::_CHUNKS], chunk == 0 and not names)
            if any(part):
                tasks.append((arch, *part, examples, thorough))
    if workers == 1:
        for task in tasks:
            yield from _task(*task)
        return
    context = multiprocessing.get_context("spawn")  # threads do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool:
        for future in [pool.submit(_task, *task) for task in tasks]:
            yield from future.result()


def usefulness(kills: Iterable[Kill]) -> dict[Check, tuple[int, list[str]]]:
    """For every check: how many faults it killed, and those that survive without it, as 'fault on arch'."""
    counts: dict[Check, int] = defaultdict(int)
    vital: dict[Check, list[str]] = defaultdict(list)
    for one in kills:
        for check in one.checks:
            counts[check] += 1
        if one.only:
            vital[one.only].append(f"{one.fault} on {one.arch}")
    return {check: (counts[check], vital[check]) for check in sorted(counts)}
