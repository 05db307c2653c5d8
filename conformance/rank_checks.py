"""Judging what real ranks computed: against one rank that has everything, against the simulated sum, against float64.

Which comparison a sum deserves depends on the order of its additions. It is defined where every rank adds all partials
in the order of the ranks, and where there are at most two, since addition commutes: there the simulated sum has the
same bits. Elsewhere the order is the collective library's own, and the bound of any order holds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from conformance import bounds
from conformance.case import PACKED_K, Case
from conformance.compare import Comparison, compare_bits, compare_values, merge
from conformance.inputs import build
from conformance.judge import NOT_APPLICABLE, PASS, Verdict, judge
from conformance.operands import NotApplicable
from conformance.rank_worker import ORDERED, Gathered
from conformance.stages import StageResult
from conformance.truth import WO_B_GROUP, Truth, model_of
from oproj.arch import get_arch
from oproj.wo_b import padded_rows, reduce_partials

IN_ORDER = "order defined: every rank adds all partials in the order of the ranks"
COMMUTES = "order defined: at most two ranks, and addition commutes"
NO_ORDER = "order not defined: the collective's own, so any order within the bound is right"
_Judged = Iterator[tuple[str, StageResult]]  # what was summed and how, and the result


def order_of(collective: str, tp_size: int) -> str:
    """Whether the order of the additions is defined, and why, as the rows say it."""
    if collective == ORDERED:
        return IN_ORDER
    return COMMUTES if tp_size <= 2 else NO_ORDER


def simulated_sizes(case: Case) -> list[int]:
    """TP sizes at which the model of ``case`` can be run on its architecture."""
    packed, columns = get_arch(case.arch).tma_aligned_scales, case.n_groups * case.o_lora_rank
    return [n for n in case.whole.tp_sizes() if not packed or columns // n % PACKED_K == 0]


@lru_cache(maxsize=4)
def simulated_z(case: Case, tp_size: int) -> torch.Tensor:
    """z BF16 ``[T, G, R]`` of all ranks of a run at ``tp_size``, one after another in this process."""
    parts = []
    for rank in range(tp_size):
        inputs, model = build(dataclasses.replace(case, tp_size=tp_size, tp_rank=rank)), model_of(case.arch)
        x = model.quantize(inputs.o, inputs.positions, inputs.cos_sin_cache, config=inputs.config)
        parts.append(model.wo_a(x, inputs.weights, config=inputs.config))
    return torch.cat(parts, 1)


@lru_cache(maxsize=1)
def _truths(case: Case) -> list[Truth]:
    """The truth of every rank; kept for the next run of the same Case, which differs by its fault."""
    return [Truth(build(dataclasses.replace(case, tp_rank=rank))) for rank in range(case.tp_size)]


class RankChecks:
    """All comparisons of one Case that ``found.z`` many ranks ran; float64 truths are made once."""

    def __init__(self, case: Case, found: Gathered) -> None:
        self.case, self.found, self.tp_size = case, found, case.tp_size
        self.truths = _truths(case)
        self.partials = torch.stack(found.partials).double()  # [TP, T, hidden]
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = None

    def results(self) -> _Judged:
        """wo_a and wo_b of the ranks, then each sum: (variant of the row, result)."""
        yield "ranks", self._timed("wo_a", "bits", self.same_z)
        yield "ranks", self._timed("wo_b", "bits", self.same_partials)
        for (collective, kind), y in self.found.y.items():
            for result in self._of_sum(collective, kind, y):
                yield f"{collective} {kind}", result

    def _of_sum(self, collective: str, kind: Any, y: list[torch.Tensor]) -> Iterator[StageResult]:
        whole = torch.cat(y)[: self.case.tokens] if collective == "reduce_scatter" else y[0]
        yield self._reduce_bits(collective, kind, whole)
        if collective != "reduce_scatter" or self.case.tokens % self.tp_size:
            yield self._timed("reduce", "exact", lambda: self.agreement(collective, y))
        yield self._timed("reduce", "bound", lambda: self.sum_bound(kind, whole))
        yield self._timed("o_proj", "bound", lambda: self.block_bound(kind, whole))

    def same_z(self) -> tuple[Comparison, int]:
        """z of the ranks against z of every TP size, 1 included: column-parallel wo_a does not know of ranks."""
        sizes, got = simulated_sizes(self.case), torch.cat(self.found.z, 1)
        parts = [compare_bits(got, simulated_z(self.case, n), f"z of TP {n}") for n in sizes]
        return merge(parts), got.numel() * len(sizes)

    def same_partials(self) -> tuple[Comparison, int]:
        """Each rank's y against the one that this process computes of that rank's z."""
        triples = zip(self.truths, self.found.z, self.found.partials, strict=True)
        parts = [compare_bits(y, truth.model_y(z), f"y of rank {r}") for r, (truth, z, y) in enumerate(triples)]
        return merge(parts), self.partials.numel()

    def agreement(self, collective: str, y: list[torch.Tensor]) -> tuple[Comparison, int]:
        """Every rank holds the same y; of a scattered one, the rows behind the last token are zero."""
        if collective != "reduce_scatter":
            parts = [compare_bits(each, y[0], f"y of rank {rank}") for rank, each in enumerate(y)]
            return merge(parts), sum(each.numel() for each in y)
        behind = torch.cat(y)[self.case.tokens :]
        rows = len(padded_rows(y[0].new_empty(self.case.tokens, 0), self.tp_size)) - self.case.tokens
        return compare_bits(behind, torch.zeros_like(behind), "rows behind the tokens"), rows * self.case.hidden_size

    def sum_bound(self, kind: Any, y: torch.Tensor) -> tuple[Comparison, int]:
        """The sum of the partials as they are: `tp_reduction_bound` without its term for their own rounding."""
        if not y.numel():
            return Comparison(), 0
        limit = bounds.tp_reduction_bound(self.partials, kind) - bounds.half_ulp_bf16(self.partials).sum(0)
        return compare_values(y, self.partials.sum(0), limit, "y"), y.numel()

    def block_bound(self, kind: Any, y: torch.Tensor) -> tuple[Comparison, int]:
        """y against the float64 sum of what every rank's wo_b consumed."""
        if not y.numel():
            return Comparison(), 0
        exact, limits = self._end()
        limit = bounds.tp_reduction_bound(self.partials, kind, partial_bounds=limits)
        return compare_values(y, exact, limit, "y"), y.numel()

    def _end(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 y ``[T, hidden]`` over all ranks, and the bound ``[TP, T, hidden]`` of each rank's product."""
        if self._ends is None:
            codes = [truth.consumed_by_wo_b(z) for truth, z in zip(self.truths, self.found.z, strict=True)]
            pairs = list(zip(self.truths, codes, strict=True))
            exact = torch.stack([truth.y_consumed(pair) for truth, pair in pairs]).sum(0)
            limits = []
            for truth, pair in pairs:
                weight = truth.inputs.weights.wo_b
                operands = (*pair, weight.weight, weight.weight_scale_inv)
                limits.append(bounds.gemm_bound(truth.arch, *operands, output="fp32", gran_k=WO_B_GROUP))
            self._ends = exact, torch.stack(limits)
        return self._ends

    def _reduce_bits(self, collective: str, kind: Any, y: torch.Tensor) -> StageResult:
        def against_simulated() -> tuple[Comparison, int]:
            return compare_bits(y, reduce_partials(self.found.partials, kind), "y"), self.partials[0].numel()

        order, result = order_of(collective, self.tp_size), self._timed("reduce", "bits", against_simulated)
        if order == NO_ORDER:
            return dataclasses.replace(result, verdict=Verdict(NOT_APPLICABLE, order))
        said = Verdict(PASS, order) if result.verdict.status == PASS else result.verdict
        return dataclasses.replace(result, verdict=said)

    def _timed(self, stage: str, oracle: str, compare: Callable[[], tuple[Comparison, int]]) -> StageResult:
        """The judged comparison; a bound outside its hypothesis does not apply."""
        started = time.perf_counter()
        try:
            comparison, expected = compare()
            verdict = judge(comparison, oracle, expected=expected)
        except NotApplicable as refusal:
            comparison, verdict = Comparison(), Verdict(NOT_APPLICABLE, str(refusal))
        return StageResult(stage, oracle, comparison, verdict, time.perf_counter() - started)
