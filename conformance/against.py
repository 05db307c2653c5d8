"""Two implementations side by side: the first stage and the first element where their bits part.

Neither is the truth. Both are given the same inputs at every stage (those behind the first: what ``first`` made), so a
stage differs for a reason of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch

from conformance.case import Case
from conformance.compare import Comparison, compare_bits, layout_problem
from conformance.implementation import METHODS, Implementation
from conformance.inputs import build, move
from conformance.isolation import CASE_TIMEOUT, Lost, run_isolated
from conformance.properties import compare_activations
from conformance.properties_products import partials_of
from conformance.runner import Target, implementation_of
from conformance.shrink import SECONDS, shrink
from conformance.stages import Bench

COLUMNS = (
    "arch", "case_id", "family", "preset", "tp_size", "tokens", "stage", "compared", "differing", "ulp_max", "first",
    "case",
)  # fmt: skip
_Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Differences:
    """What of one Case was compared, stage by stage; ``lost``: why nothing was."""

    case: Case
    stages: tuple[tuple[str, Comparison], ...] = ()
    lost: str = ""

    @property
    def first(self) -> tuple[str, Comparison] | None:
        """The first stage that differs."""
        return next(((stage, one) for stage, one in self.stages if one.problem or one.mismatched), None)


def compare_case(case: Case, first: Implementation, second: Implementation) -> Differences:
    """Every stage of ``case`` on both, bit for bit (NaN equals NaN). An implementation that raises differs."""
    inputs = build(case)
    benches = Bench(case, first, inputs), Bench(case, second, inputs)
    return Differences(case, tuple(_stages(*benches)))


def _stages(a: Bench, b: Bench) -> Iterator[tuple[str, Comparison]]:
    tokens, config, hidden = a.case.tokens, a.config, a.config.hidden_size
    given = [(bench.on_device.o, bench.on_device.positions, bench.on_device.cos_sin_cache) for bench in (a, b)]
    (x, problem), (other, other_problem) = (
        bench.call("quantize", o=o, positions=positions, cos_sin_cache=cache)
        for bench, (o, positions, cache) in zip((a, b), given)
    )
    problem = problem or a.activation_problem(x)
    other_problem = other_problem or b.activation_problem(other)
    whole = problem or other_problem
    yield "quantize", _problem(problem, other_problem) if whole else compare_activations(x, other)
    x = a.truth.model_x if problem else x

    z, comparison = _compared("wo_a", a, b, (tokens, config.n_groups, config.o_lora_rank), _slots(x))
    yield "wo_a", comparison
    z = a.truth.model_z(x) if z is None else z
    yield "wo_b", _compared("wo_b", a, b, (tokens, hidden), _moved(z))[1]
    if a.case.tp_size > 1:
        partials = partials_of(a.case)
        arguments = lambda bench: {"partials": [move(partial, bench.device) for partial in partials]}  # noqa: E731
        yield "reduce", _compared("reduce", a, b, (tokens, hidden), arguments)[1]
    yield "o_proj", _compared("o_proj", a, b, (tokens, hidden), _whole)[1]


def _slots(x: Any) -> Any:
    return lambda bench: {"x": bench.with_slots(x), "weights": bench.on_device.weights}


def _moved(z: torch.Tensor) -> Any:
    return lambda bench: {"z": move(z, bench.device), "weights": bench.on_device.weights}


def _whole(bench: Bench) -> dict[str, Any]:
    here = bench.on_device
    return {"o": here.o, "positions": here.positions, "cos_sin_cache": here.cos_sin_cache, "weights": here.weights}


def _compared(
    stage: str, a: Bench, b: Bench, shape: tuple[int, ...], arguments: Any
) -> tuple[torch.Tensor | None, Comparison]:
    """What ``a`` made of ``stage`` (``None`` where that is unusable), and how far ``b`` differs."""
    want = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    results = []
    for bench in (a, b):
        got, problem = bench.call(stage, **arguments(bench))
        results.append((got, problem or layout_problem(stage, got, want)))
    (got, problem), (other, other_problem) = results
    if problem or other_problem:
        return None if problem else got, _problem(problem, other_problem)
    return got, compare_bits(got, other, {"wo_a": "z"}.get(stage, "y"))


def _problem(first: str, second: str) -> Comparison:
    """Where one of two could not be had."""
    return Comparison(problem=f"first: {first}" if first else f"second: {second}")


def compare_cases(
    cases: Iterable[Case], first: Target, second: Target, *, workers: int = 1, timeout: float = CASE_TIMEOUT
) -> Iterator[Differences]:
    """`compare_case` of each Case in the order given, in processes of their own as `conformance.runner.run_cases`."""
    if workers == 1 and not (first.implementation or second.implementation):
        yield from (_of_targets(case, first, second) for case in cases)
        return
    work = partial(_of_targets, first=first, second=second)
    for case, result in run_isolated(cases, work, workers=workers, timeout=timeout):
        yield Differences(case, lost=result.reason) if isinstance(result, Lost) else result


def _of_targets(case: Case, first: Target, second: Target) -> Differences:
    return compare_case(case, implementation_of(first, case.arch), implementation_of(second, case.arch))


def smallest_difference(
    found: Sequence[Differences], first: Target, second: Target, *, seconds: float = SECONDS, timeout: float
) -> Differences | None:
    """The smallest Case found that shows the first stage in which any Case differs; ``None`` where none does.

    Where the process that looks for a smaller one ends, the smallest of those that are known.
    """
    known = [one for one in found if one.first]
    if not known:
        return None
    earliest = min(METHODS.index(_stage(one)) for one in known)
    start = min((one for one in known if METHODS.index(_stage(one)) == earliest), key=lambda one: one.case.macs)
    work = partial(_shrunk, first=first, second=second, stage=_stage(start), seconds=seconds)
    if not (first.implementation or second.implementation):
        return work(start.case) or start
    for _, result in run_isolated([start.case], work, workers=1, timeout=timeout + seconds):
        if result is not None and not isinstance(result, Lost):
            return result
    return start


def _stage(one: Differences) -> str:
    return one.first[0] if one.first else ""


def _shrunk(case: Case, first: Target, second: Target, stage: str, seconds: float) -> Differences | None:
    seen: dict[Case, Differences] = {}

    def differs(candidate: Case) -> bool:
        seen[candidate] = _of_targets(candidate, first, second)
        return _stage(seen[candidate]) == stage

    smallest, _ = shrink(case, differs, seconds)
    return seen.get(smallest)


def to_frame(found: Iterable[Differences]) -> pd.DataFrame:
    """One row per Case and stage, in the order given; a lost Case has one row without a stage."""
    rows = [row for one in found for row in _rows(one)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(one: Differences) -> Iterator[dict[str, Any]]:
    case = one.case
    shared = {"arch": case.arch, "case_id": case.id, "case": case.to_json()}
    shared |= {name: getattr(case, name) for name in ("family", "preset", "tp_size", "tokens")}
    if one.lost:
        yield shared | {"stage": "", "compared": 0, "differing": 0, "first": one.lost}
    for stage, comparison in one.stages:
        bad = comparison.first_bad
        yield shared | {
            "stage": stage,
            "compared": comparison.compared,
            "differing": comparison.mismatched,
            "ulp_max": comparison.ulp_max,
            "first": comparison.problem or (json.loads(bad.to_json()) if bad else ""),
        }
