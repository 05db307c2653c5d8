"""Running Cases: each gives one row per stage and oracle, in the order of the Cases, on one process or several.

An implementation that raises gets failed rows with the reason, and the run goes on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import oproj
from conformance.case import Case
from conformance.compare import Comparison
from conformance.error_map import maps_of
from conformance.implementation import (
    METHODS,
    EngineImplementation,
    Implementation,
    SoftwareImplementation,
    load_implementation,
)
from conformance.isolation import CASE_TIMEOUT, Lost, note_stage, run_isolated
from conformance.judge import FAIL, Verdict
from conformance.stages import StageResult, run_stages
from oproj.arch import get_arch
from oproj.engines import get_engine
from reports.schema import make_row

Row = dict[str, Any]
OWN_ENGINE = "own"  # an implementation that runs on none of ours


@dataclass(frozen=True)
class Target:
    """What is under test: an engine by name, or an implementation as `load_implementation` takes it."""

    engine: str = "auto"
    implementation: str = ""

    def build(self, arch: str) -> Implementation:
        """The implementation for ``arch``.

        Raises ``ValueError`` for a name that leads nowhere, ``EngineUnavailable`` where hardware or package is missing.
        """
        if self.implementation:
            return load_implementation(self.implementation, arch)
        engine = get_engine(self.engine, arch)
        return SoftwareImplementation(arch) if engine.name == "software" else EngineImplementation(engine)


@dataclass(frozen=True)
class Run:
    """What all rows of a run share."""

    run_id: str
    time_utc: str
    git_revision: str

    @classmethod
    def now(cls, run_id: str = "") -> Run:
        """A run that starts now; the default name is the time and the process."""
        moment = datetime.now(timezone.utc)
        return cls(run_id or f"{moment:%Y%m%dT%H%M%SZ}-{os.getpid()}", f"{moment:%Y-%m-%dT%H:%M:%SZ}", git_revision())


def git_revision() -> str:
    """Short revision of the checkout this suite runs from, with ``-dirty`` where files differ; '' outside of one."""
    folder = Path(oproj.__file__).parents[1]
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return answer.stdout.strip()


@dataclass(frozen=True)
class Judged:
    """What is under test as plain data, which also those know who must not build it; ``engine``: whose arithmetic,
    `OWN_ENGINE` for one that is none of ours; ``versions``: JSON of what computes the numbers."""

    name: str
    engine: str
    device: str
    versions: str

    @classmethod
    def of(cls, implementation: Implementation) -> Judged:
        """The description of ``implementation``."""
        device = str(getattr(implementation, "device", "cpu"))
        return cls(implementation.name, engine_name(implementation), device, versions_of(implementation))


def judged_by(target: Target, arch: str, timeout: float = CASE_TIMEOUT) -> Judged:
    """What ``target`` names for ``arch``. One that is not ours is built in another process, which may end without harm.

    Raises what `Target.build` raises, and ``ValueError`` where building it ends its process or takes more than
    ``timeout`` seconds.
    """
    if (target, arch) not in _judged:
        _judged[target, arch] = _look_at(target, arch, timeout)
    return _judged[target, arch]


_judged: dict[tuple[Target, str], Judged] = {}


def _look_at(target: Target, arch: str, timeout: float) -> Judged:
    if not target.implementation:
        return Judged.of(implementation_of(target, arch))
    ((_, found),) = run_isolated([arch], partial(_describe, target), workers=1, timeout=timeout)
    if isinstance(found, Lost):
        raise ValueError(f"implementation={target.implementation!r} cannot be built for {arch}: {found.reason}")
    return found


def _describe(target: Target, arch: str) -> Judged:
    return Judged.of(implementation_of(target, arch))


def run_case(case: Case, target: Target, run: Run) -> list[Row]:
    """The rows of one Case."""
    implementation = implementation_of(target, case.arch)
    judged = Judged.of(implementation)
    results = run_stages(case, implementation)
    return [
        _row(case, judged, run, result, target.implementation) | {"error_map": text}
        for result, text in zip(results, maps_of(results), strict=True)
    ]


def run_cases(
    cases: Iterable[Case], target: Target, run: Run, *, workers: int = 1, timeout: float = CASE_TIMEOUT
) -> Generator[list[Row], None, None]:
    """The rows of each Case, Case by Case in the order given; ``workers`` above 1 are processes of their own.

    An implementation that is not ours always runs in another process than this one: where that dies, or takes more than
    ``timeout`` seconds for a Case, the Case has one failed row that says so. Raises ``ValueError`` for workers below 1
    and a timeout that is no positive number.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout} must be a positive number of seconds")
    if workers == 1 and not target.implementation:
        for case in cases:
            yield run_case(case, target, run)
        return
    work = partial(run_case, target=target, run=run)
    for case, rows in run_isolated(cases, work, workers=workers, timeout=timeout):
        yield [lost_row(case, target, run, rows)] if isinstance(rows, Lost) else rows


def lost_row(case: Case, target: Target, run: Run, lost: Lost) -> Row:
    """The one row of a Case whose process ended, of the stage that was called last; of the whole block where that is
    not known."""
    stage = lost.stage if lost.stage in METHODS else "o_proj"
    result = StageResult(stage, "bits", Comparison(problem=lost.reason), Verdict(FAIL, lost.reason), 0.0)
    return _row(case, judged_by(target, case.arch), run, result, target.implementation)


@cache
def implementation_of(target: Target, arch: str) -> Implementation:
    """What ``target`` names for ``arch``, built once in a process."""
    note_stage("construction")
    built = target.build(arch)
    note_stage("construction", returned=True)
    return built


def _row(case: Case, judged: Judged, run: Run, result: StageResult, spec: str = "") -> Row:
    comparison, arch = result.comparison, get_arch(case.arch)
    histogram = comparison.ulp_histogram
    return make_row(
        **dataclasses.asdict(run),
        arch=case.arch,
        engine=judged.engine,
        implementation=judged.name,
        spec=spec,
        stage=result.stage,
        oracle=result.oracle,
        evidence=arch.evidence(result.stage),
        preset=case.preset,
        tp_size=case.tp_size,
        tp_rank=case.tp_rank,
        tokens=case.tokens,
        family=case.family,
        variant=case.variant,
        case_id=case.id,
        case=case.to_json(),
        compared=comparison.compared,
        mismatched=comparison.mismatched,
        margin_max=_figure(comparison.margin_max),
        margin_p999=_figure(comparison.margin_p999),
        margin_p50=_figure(comparison.margin_p50),
        rms_rel_error=_figure(comparison.rms_rel_error),
        signed_bias=_figure(comparison.signed_bias),
        calc_diff=_figure(comparison.calc_diff),
        sqnr_db=_figure(comparison.sqnr_db),
        ulp_max=comparison.ulp_max,
        ulp_histogram=json.dumps({str(k): v for k, v in histogram.items()}) if histogram else "",
        ambiguous=comparison.ambiguous,
        first_bad=comparison.first_bad.to_json() if comparison.first_bad else "",
        seconds=result.seconds,
        verdict=result.verdict.status,
        reason=result.verdict.reason,
        versions=judged.versions,
    )


def _figure(value: float) -> float:
    """Nine digits: those behind them differ with the threads of a float64 product, and from machine to machine."""
    return float(f"{value:.9g}")


def engine_name(implementation: Implementation) -> str:
    """Which engine did the arithmetic; 'own' for an implementation that has none of ours."""
    engine = getattr(implementation, "engine", None)
    return engine.name if engine is not None else OWN_ENGINE


def versions_of(implementation: Implementation) -> str:
    """JSON of what computed the numbers."""
    engine = getattr(implementation, "engine", None)
    versions = {
        "oproj": oproj.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
    described = engine.describe() if engine is not None else {}
    versions |= {name: str(value) for name, value in described.items() if value is not None and name != "arch"}
    return json.dumps(versions, sort_keys=True)
