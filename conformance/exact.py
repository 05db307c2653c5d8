"""One row of the exact properties per stage: run, merged and judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from conformance.compare import Comparison, merge
from conformance.judge import FAIL, NOT_APPLICABLE, Verdict, judge
from conformance.properties import ALL_BELOW, QUANTIZE, CallFailed, Property
from conformance.properties_products import O_PROJ, REDUCE, WO_A, WO_B
from conformance.special import SPECIAL

PROPERTIES: dict[str, dict[str, Property]] = {
    stage: {**properties, "special": SPECIAL[stage]}
    for stage, properties in (
        ("quantize", QUANTIZE), ("wo_a", WO_A), ("wo_b", WO_B), ("reduce", REDUCE), ("o_proj", O_PROJ),
    )
}  # fmt: skip
IN_LARGE_CASES = ("again", "solo", "written")
NO_TOKENS = "no tokens: nothing to repeat"
NONE_APPLIES = "no exact property applies to this Case"


def run_properties(bench: Any, stage: str, given: Any) -> Iterator[tuple[str, Comparison]]:
    """(property, Comparison) of all that apply to the Case; ``given`` is what the properties of ``stage`` take."""
    for name, check in PROPERTIES[stage].items():
        if bench.case.macs > ALL_BELOW and name not in IN_LARGE_CASES:
            continue
        try:
            comparison = check(bench, given)
        except CallFailed as error:
            comparison = Comparison(problem=str(error))
        if comparison is not None:
            yield name, comparison


def judge_properties(bench: Any, stage: str, given: Any) -> tuple[Comparison, Verdict]:
    """All properties of ``stage`` as one comparison and verdict, whose ``checks`` names those that do not hold."""
    if bench.case.tokens == 0:
        return Comparison(), Verdict(NOT_APPLICABLE, NO_TOKENS)
    found = list(run_properties(bench, stage, given))
    if not found:
        return Comparison(), Verdict(NOT_APPLICABLE, NONE_APPLIES)
    failed = [(name, one) for name, one in found if one.problem or one.mismatched]
    whole = _counts(merge([one for _, one in failed] or [one for _, one in found]))
    whole = dataclasses.replace(whole, compared=sum(one.compared for _, one in found))
    if not failed:
        return whole, judge(whole, "exact", expected=whole.compared)
    name, first = failed[0]
    reason = first.problem or judge(first, "exact", expected=first.compared).reason
    return whole, Verdict(FAIL, f"{name}: {reason}", tuple(name for name, _ in failed))


def _counts(comparison: Comparison) -> Comparison:
    """Counts and the first bad element alone: metrics of a merged row would be those of one property."""
    return Comparison(mismatched=comparison.mismatched, first_bad=comparison.first_bad, problem=comparison.problem)
