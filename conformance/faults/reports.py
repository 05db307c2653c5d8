"""Faults of the suite itself: a gate that NaN passes, and one that looks at a single global number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from conformance import stages
from conformance.case import Case
from conformance.compare import Comparison
from conformance.faults.anti_vacuity import vacuous
from conformance.faults.fault import fp8, many_ranks
from conformance.faults.quantize import OneBlockAnOctaveHigh
from conformance.judge import FAIL, PASS, Verdict

GLOBAL_GATE = 1e-3


def _asks_whether_too_large(
    got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor, name: str, **_: Any
) -> Comparison:
    margin = (got.double() - want).abs() / bound
    return Comparison(compared=got.numel(), mismatched=int((margin > 1).sum()), margin_max=float(margin.max()))


def _judges_what_is_too_large(comparison: Comparison, oracle: str, *, expected: int) -> Verdict:
    if comparison.problem:
        return Verdict(FAIL, comparison.problem)
    return Verdict(FAIL, "too large") if comparison.mismatched or comparison.margin_max > 1 else Verdict(PASS)


def _judges_one_number(comparison: Comparison, oracle: str, *, expected: int) -> Verdict:
    if comparison.problem or not comparison.calc_diff < GLOBAL_GATE:
        return Verdict(FAIL, comparison.problem or f"calc_diff {comparison.calc_diff:.1e}")
    return Verdict(PASS)


@contextmanager
def nan_passes() -> Iterator[None]:
    """The gate asks whether an error is too large, and NaN is not."""
    with (
        mock.patch.object(stages, "compare_values", _asks_whether_too_large),
        mock.patch.object(stages, "judge", _judges_what_is_too_large),
    ):
        yield


@contextmanager
def one_number() -> Iterator[None]:
    """The gate looks at calc_diff over all tokens."""
    with mock.patch.object(stages, "judge", _judges_one_number):
        yield


@dataclass(frozen=True)
class SuiteFault:
    """A mutation of the suite, and the wrong implementation that then passes where the true suite fails it."""

    name: str
    change: str
    source: str
    patch: Callable[[], AbstractContextManager[None]]
    wrong: Callable[[Case], Any]
    judged: tuple[str, str]  # stage and oracle where the wrong implementation must fail
    check: str  # of the suite's self-test that sees it
    fits: Callable[[Case], bool]
    stage: str = "report"


SUITE_FAULTS: tuple[SuiteFault, ...] = (
    SuiteFault("report-nan-pass", "the gate asks whether error > tol, and NaN says no",
               "numpy/numpy#8145", nan_passes, lambda case: vacuous("nan", "reduce", case), ("reduce", "bound"),
               "self-test/anti-vacuity", many_ranks),
    SuiteFault("report-dilute", "one global number over all tokens",
               "anthony-chaudhary/fak#4267", one_number, lambda case: OneBlockAnOctaveHigh(case.arch),
               ("quantize", "bound"), "self-test/kill-matrix", fp8),
)  # fmt: skip


def diluting(case: Case) -> Case:
    """The Case with tokens enough to hide one of them."""
    return dataclasses.replace(case, tokens=33, family="normal", padding_slots=0, padded_heads=0)


def self_test_fails(fault: SuiteFault, case: Case, *, broken: bool = True) -> bool:
    """Whether the suite's own test notices: the wrong implementation passes its oracle in some stage that it must not.

    ``broken=False`` runs the unbroken suite, where the answer must be no.
    """
    with fault.patch() if broken else nullcontext():
        results = stages.run_stages(case, fault.wrong(case))
    judged = [r for r in results if (r.stage, r.oracle) == fault.judged]
    return not judged or any(result.verdict.status != FAIL for result in judged)
