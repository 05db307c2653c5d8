"""The rules that turn a Comparison into a verdict. Nothing else in the suite decides.

A comparison passes only if something was compared, it is of the expected size, and every single element holds. Global
metrics never enter. Tests are written as ``not (x <= limit)``, so that NaN fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from conformance.compare import Comparison

ORACLES = ("bits", "exact", "attainable", "bound", "format")
_WITH_MARGINS = ("bound", "format")
PASS, FAIL, NOT_APPLICABLE, SKIPPED = "pass", "fail", "not applicable", "skipped"


@dataclass(frozen=True)
class Verdict:
    """'pass', 'fail', 'not applicable' or 'skipped', and the reason where it is not a pass.

    ``checks``: of a failed ``exact`` row, the properties that do not hold.
    """

    status: str
    reason: str = ""
    checks: tuple[str, ...] = ()


def judge(comparison: Comparison, oracle: str, *, expected: int) -> Verdict:
    """Judge one comparison under ``oracle``; ``expected``: how many elements the Case says there are to compare.

    A Case without tokens (``expected=0``) has shapes and dtypes to be right and nothing to compare, so it is
    'not applicable' rather than a pass. Raises ``ValueError`` for an unknown oracle or a negative ``expected``.
    """
    if oracle not in ORACLES:
        raise ValueError(f"oracle={oracle!r} is unknown; known oracles: {', '.join(ORACLES)}")
    if expected < 0:
        raise ValueError(f"expected={expected} must not be negative")
    if comparison.problem:
        return Verdict(FAIL, comparison.problem)
    if comparison.compared != expected:
        what = "nothing" if comparison.compared == 0 else str(comparison.compared)
        return Verdict(FAIL, f"{what} compared of {expected} elements")
    if expected == 0:
        return Verdict(NOT_APPLICABLE, "no tokens: shapes and dtypes agree, there is nothing to compare")
    return _judge_elements(comparison, oracle)


def _judge_elements(comparison: Comparison, oracle: str) -> Verdict:
    where = f"; first {comparison.first_bad}" if comparison.first_bad else ""
    if comparison.mismatched != 0:
        kind = "outside the bound" if oracle in _WITH_MARGINS else "with other bits"
        return Verdict(FAIL, f"{comparison.mismatched} of {comparison.compared} elements {kind}{where}")
    if oracle in _WITH_MARGINS and not (comparison.margin_max <= 1):
        return Verdict(FAIL, f"largest margin {comparison.margin_max} is not at most 1{where}")
    return Verdict(PASS)
