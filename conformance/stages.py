"""The stages of one Case, each judged alone on inputs that are the same for both sides.

quantize, then wo_a on the codes the implementation itself emitted, then wo_b on its own z, the sum over ranks, and the
whole chain. A fault so shows in the stage that has it and in `o_proj`, and not in the stages behind it. Where a stage
gives nothing usable, the next one is fed the software engine's result instead. Every call is given copies, so that an
implementation that writes into its arguments fails and cannot move what it is compared with.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from conformance import bounds
from conformance.attainable import compare_attainable
from conformance.case import Case, CaseConfig
from conformance.compare import Comparison, compare_bits, compare_values, layout_problem, merge
from conformance.exact import judge_properties
from conformance.implementation import METHODS, Implementation, inherits, is_the_model
from conformance.inputs import Inputs, build, duplicate, move
from conformance.isolation import note_stage
from conformance.judge import FAIL, NOT_APPLICABLE, Verdict, judge
from conformance.operands import NotApplicable
from conformance.properties import plain_scales
from conformance.properties_products import partials_of
from conformance.truth import Truth
from oproj.activation import QuantizedActivation, empty_scales, empty_values, scale_columns

CPU = torch.device("cpu")
ITSELF = "the software engine is the model itself"
NO_ORDER = "the order of a BF16 product is the library's own"
NO_CODES = "a BF16 wo_a has no codes"
# Rows for their figures: what the bound of the stage admits these admit too, so they are no checks of their own; and
# what goes beyond them may be the fault of an earlier stage. They pass, or say nothing.
FIGURES = (("wo_a", "format"), ("wo_b", "format"))
ELSEWHERE = "beyond its bound: the rows of this stage and of those before it say why"
NO_SUM_ORDER = "the order of a sum over ranks is the collective's own"
_POISON_CODE, _POISON_FP32, _POISON_WORD = 0x7E, 2.0**100, 0x7E7E7E7E  # 448, and scales far from any live one
_Figures = tuple[str, Comparison, Verdict]


@dataclass(frozen=True)
class StageResult:
    """One comparison of one stage under one oracle, with its verdict and the seconds it took."""

    stage: str
    oracle: str
    comparison: Comparison
    verdict: Verdict
    seconds: float


def run_stages(case: Case, implementation: Implementation) -> list[StageResult]:
    """All comparisons of ``case``, in the order of the stages. An implementation that raises fails; nothing escapes."""
    started = time.perf_counter()
    results = []
    for stage, (oracle, comparison, verdict) in Bench(case, implementation).stages():
        now = time.perf_counter()
        results.append(StageResult(stage, oracle, comparison, verdict, now - started))
        started = now
    return results


class Bench:
    """One Case on one implementation; ``inputs``: those of the Case, where they have been built before."""

    def __init__(self, case: Case, implementation: Implementation, inputs: Inputs | None = None) -> None:
        self.case, self.config, self.implementation = case, case.config, implementation
        self.device = torch.device(getattr(implementation, "device", CPU))
        self.inputs = inputs or build(case)
        self.on_device = self.inputs.to(self.device)
        known, order = getattr(implementation, "o_known", "exact"), getattr(implementation, "k_order", None)
        self.truth = Truth(self.inputs, known, order)

    def stages(self) -> Iterator[tuple[str, _Figures]]:
        x, results = self.quantize()
        yield from (("quantize", result) for result in results)
        z, results = self.wo_a(x)
        yield from (("wo_a", result) for result in results)
        yield from (("wo_b", result) for result in self.wo_b(z))
        if self.case.tp_size > 1:
            yield from (("reduce", result) for result in self.reduce())
        yield from (("o_proj", result) for result in self.o_proj(x, z))

    # Stages

    def quantize(self) -> tuple[QuantizedActivation, Iterator[_Figures]]:
        """The activation that goes on, and the results."""
        here, truth = self.on_device, self.truth
        x, problem = self.call("quantize", o=here.o, positions=here.positions, cos_sin_cache=here.cos_sin_cache)
        problem = problem or self.activation_problem(x)
        if problem or x is None:
            return truth.model_x, _failed(problem, "bits", "exact", "attainable", "bound")
        return x, self.judge_quantize(x)

    def judge_quantize(self, x: QuantizedActivation) -> Iterator[_Figures]:
        truth, elements = self.truth, x.data.numel()
        scales = x.scale.numel() * (4 if x.scale.dtype == torch.int32 else 1) if truth.fp8 else 0
        yield self.bits(
            "quantize",
            elements + scales,
            lambda: merge(
                [compare_bits(x.data, truth.model_x.data, "codes")]
                + (
                    [compare_bits(plain_scales(x.scale), plain_scales(truth.model_x.scale), "scales")]
                    if truth.fp8
                    else []
                )
            ),
        )
        yield self.exact("quantize", x)
        if truth.fp8:
            comparison = compare_attainable(x, truth, self.implementation) if elements else Comparison()
            yield (
                "attainable",
                comparison,
                judge(comparison, "attainable", expected=elements + scales if elements else 0),
            )
        else:
            yield "attainable", Comparison(), Verdict(NOT_APPLICABLE, NO_CODES)
        oracle, comparison, verdict = self.bound(
            "bound", elements, lambda: (truth.x_values(x), truth.x, truth.x_bound(x)), "x", x.data
        )
        if verdict.status == NOT_APPLICABLE and elements:
            # Inputs are finite, so a clamped code or an unusable scale is the quantiser's own doing.
            verdict = Verdict(FAIL, verdict.reason)
        yield oracle, comparison, verdict

    def wo_a(self, x: QuantizedActivation) -> tuple[torch.Tensor, Iterator[_Figures]]:
        """The z that goes on, and the results."""
        z, problem = self.call("wo_a", x=self.with_slots(x), weights=self.on_device.weights)
        tokens, config = self.case.tokens, self.config
        problem = problem or layout_problem("z", z, _bf16(tokens, config.n_groups, config.o_lora_rank))
        if problem:
            return self.truth.model_z(x), map(_told, _failed(problem, "bits", "exact", "bound", "format"))
        return z, self.judge_wo_a(x, z)

    def judge_wo_a(self, x: QuantizedActivation, z: torch.Tensor) -> Iterator[_Figures]:
        truth, elements = self.truth, z.numel()
        if truth.fp8:
            yield self.bits("wo_a", elements, lambda: compare_bits(z, truth.model_z(x), "z"))
        else:
            yield "bits", Comparison(), Verdict(NOT_APPLICABLE, NO_ORDER)
        yield self.exact("wo_a", (x, z))
        yield self.bound("bound", elements, lambda: (z, truth.z_consumed(x), truth.z_bound(x, z)), "z")
        yield _told(self.bound("format", elements, lambda: (z, truth.z, truth.z_format_bound(x, z)), "z"))

    def wo_b(self, z: torch.Tensor) -> Iterator[_Figures]:
        """Results of wo_b on ``z``."""
        y, problem = self.call("wo_b", z=move(z, self.device), weights=self.on_device.weights)
        problem = problem or layout_problem("y", y, _bf16(self.case.tokens, self.config.hidden_size))
        if problem:
            yield from map(_told, _failed(problem, "bits", "exact", "bound", "format"))
            return
        truth, elements = self.truth, y.numel()
        codes = truth.consumed_by_wo_b(z)
        yield self.bits("wo_b", elements, lambda: compare_bits(y, truth.model_y(z), "y"))
        yield self.exact("wo_b", (z, y))
        yield self.bound("bound", elements, lambda: (y, truth.y_consumed(codes), truth.y_bound(codes, y)), "y")
        nothing = torch.zeros_like(z).double()
        limit = lambda: truth.y_format_bound(z, nothing, codes, truth.y_bound(codes, y))  # noqa: E731
        yield _told(self.bound("format", elements, lambda: (y, truth.y_of(z), limit()), "y"))

    def reduce(self) -> Iterator[_Figures]:
        """Results of the sum over ranks, on partials of every rank that no other stage had a hand in."""
        shape = (self.case.tokens, self.config.hidden_size)
        partials = partials_of(self.case)
        y, problem = self.call("reduce", partials=[move(partial, self.device) for partial in partials])
        problem = problem or layout_problem("y", y, _bf16(*shape))
        if problem:
            yield from _failed(problem, "bits", "exact", "bound")
            return
        yield "bits", Comparison(), Verdict(NOT_APPLICABLE, NO_SUM_ORDER)
        yield self.exact("reduce", y)
        stacked = torch.stack(partials).double()
        default = "fp32" if inherits(self.implementation, "reduce") else "bf16"
        kind: Any = getattr(self.implementation, "reduction", default)
        yield self.bound("bound", y.numel(), lambda: (y, stacked.sum(0), bounds.tp_reduction_bound(stacked, kind)), "y")

    def o_proj(self, x: QuantizedActivation, z: torch.Tensor) -> Iterator[_Figures]:
        """Results end to end. The format bound takes the scales of ``x`` and of ``z``, as a chain of the stages does;
        of an ``o_proj`` that is the implementation's own it takes the software engine's."""
        here, truth = self.on_device, self.truth
        y, problem = self.call(
            "o_proj", o=here.o, positions=here.positions, cos_sin_cache=here.cos_sin_cache, weights=here.weights
        )
        problem = problem or layout_problem("y", y, _bf16(self.case.tokens, self.config.hidden_size))
        if problem:
            yield from _failed(problem, "bits", "exact", "format")
            return
        if truth.fp8:
            yield self.bits(
                "o_proj", y.numel(), lambda: compare_bits(y, truth.model_y(truth.model_z(truth.model_x)), "y")
            )
        else:
            yield "bits", Comparison(), Verdict(NOT_APPLICABLE, NO_ORDER)
        yield self.exact("o_proj", y)
        if not inherits(self.implementation, "o_proj"):
            x, z = truth.model_x, truth.model_z(truth.model_x)
        yield self.bound("format", y.numel(), lambda: (y, truth.y_of(truth.z), self.chain_bound(x, z, y)), "y")

    def chain_bound(self, x: QuantizedActivation, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Bound on ``y`` against the float64 chain: the format bound of z through wo_b's own."""
        truth = self.truth
        codes = truth.consumed_by_wo_b(z)
        return truth.y_format_bound(truth.z, truth.z_format_bound(x, z), codes, truth.y_bound(codes, y))

    # Oracles

    def bits(self, stage: str, expected: int, compare: Callable[[], Comparison]) -> _Figures:
        """The bits tier; the software engine is not its own judge."""
        if is_the_model(self.implementation, stage):
            return "bits", Comparison(), Verdict(NOT_APPLICABLE, ITSELF)
        comparison = compare()
        if stage not in getattr(self.implementation, "bitwise", METHODS):
            return (
                "bits",
                comparison,
                Verdict(NOT_APPLICABLE, f"{self.implementation.name} promises no bits of {stage}"),
            )
        return "bits", comparison, judge(comparison, "bits", expected=expected)

    def exact(self, stage: str, given: Any) -> _Figures:
        """The properties that hold bit for bit; ``given``: the stage's results, see `conformance.exact`."""
        return "exact", *judge_properties(self, stage, given)

    def bound(
        self,
        oracle: str,
        expected: int,
        values: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        name: str,
        codes: torch.Tensor | None = None,
    ) -> _Figures:
        """A tier with margins: ``values`` gives got, want and bound. Outside a bound's hypothesis nothing is judged."""
        if expected == 0:
            return oracle, Comparison(), judge(Comparison(), oracle, expected=0)
        try:
            got, want, bound = values()
        except NotApplicable as error:
            return oracle, Comparison(), Verdict(NOT_APPLICABLE, str(error))
        comparison = compare_values(got, want, bound, name)
        if oracle == "format":  # quantisation moves small results across zero, where steps count everything
            comparison = dataclasses.replace(comparison, ulp_max=float("nan"), ulp_histogram={})
        if comparison.first_bad and codes is not None and codes.element_size() == 1:
            code = int(codes.view(torch.uint8)[comparison.first_bad.at])
            named = dataclasses.replace(comparison.first_bad, got=f"0x{code:02x}", want="")
            comparison = dataclasses.replace(comparison, first_bad=named)
        return oracle, comparison, judge(comparison, oracle, expected=expected)

    # Calls

    def call(
        self, stage: str, *, config: CaseConfig | None = None, share_above: int = sys.maxsize, **arguments: Any
    ) -> tuple[Any, str]:
        """What the implementation makes of copies of ``arguments``, on the CPU in its own storage; or why nothing.

        Tensors of more than ``share_above`` bytes are not copied: only for calls after one that wrote into none.
        """
        given = {name: _copied(value, share_above) for name, value in arguments.items()}
        note_stage(stage)
        try:
            got = getattr(self.implementation, stage)(*given.values(), config=config or self.config)
            result = _activation(got) if stage == "quantize" else _on_cpu(got)
            note_stage(stage, returned=True)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any other end of the code under test, also its exit, is a result
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            return None, _printable(f"{stage} raised {type(error).__name__} at {place}: {error}")
        pairs = zip(_tensors("", arguments), _tensors("", given), strict=True)
        changed = [name for (name, before), (_, after) in pairs if _differ(before, after)]
        if changed:
            return None, f"{stage} wrote into its argument {', '.join(changed)}"
        return result, ""

    def activation_problem(self, x: QuantizedActivation | None) -> str:
        """'' where data and scale have the shape, dtype and strides that the consumer's kernel addresses."""
        if x is None:
            return "quantize returned no data and scale"
        tokens, config, truth = self.case.tokens, self.config, self.truth
        dtype = torch.float8_e4m3fn if truth.fp8 else torch.bfloat16
        values = empty_values(tokens, config.n_groups, config.group_k, dtype)
        problem = layout_problem("codes", x.data, values, strides=True)
        if problem or not truth.fp8:
            return problem
        packed = truth.arch.tma_aligned_scales
        scales = empty_scales(tokens, config.n_groups, scale_columns(config.group_k, truth.block, packed), packed)
        return layout_problem("scales", x.scale, scales, strides=True)

    def with_slots(self, x: QuantizedActivation) -> QuantizedActivation:
        """``x`` on the device, in a buffer with the Case's dead slots behind the live ones, full of poison."""
        slots = self.case.padding_slots
        if not (slots and self.truth.fp8):
            return QuantizedActivation(move(x.data, self.device), move(x.scale, self.device))
        tokens, groups, k = x.data.shape
        packed = x.scale.dtype == torch.int32
        data = empty_values(tokens, groups + slots, k, torch.float8_e4m3fn)
        scale = empty_scales(tokens, groups + slots, x.scale.shape[2], packed)
        data.view(torch.uint8).fill_(_POISON_CODE)
        scale.fill_(_POISON_WORD if packed else _POISON_FP32)
        data[:, :groups], scale[:, :groups] = x.data, x.scale
        return QuantizedActivation(move(data, self.device), move(scale, self.device))


def _failed(problem: str, *oracles: str) -> Iterator[_Figures]:
    for oracle in oracles:
        yield oracle, Comparison(problem=problem), Verdict(FAIL, problem)


def _told(figures: _Figures) -> _Figures:
    """A row of `FIGURES`; others are left as they are."""
    oracle, comparison, verdict = figures
    if oracle != "format" or verdict.status != FAIL:
        return figures
    return oracle, comparison, Verdict(NOT_APPLICABLE, comparison.problem or ELSEWHERE)


def _activation(got: Any) -> QuantizedActivation | None:
    data, scale = getattr(got, "data", None), getattr(got, "scale", None)
    if not isinstance(data, torch.Tensor) or not isinstance(scale, torch.Tensor):
        return None
    return QuantizedActivation(_on_cpu(data), _on_cpu(scale))


def _on_cpu(got: Any) -> Any:
    """A tensor in storage of its own, which later calls cannot overwrite; what has no values stays as it is."""
    if not isinstance(got, torch.Tensor) or got.layout != torch.strided or got.is_meta:
        return got
    return duplicate(got.detach().resolve_neg(), CPU)


def _copied(value: Any, share_above: int) -> Any:
    """``value`` with every tensor in it of up to ``share_above`` bytes duplicated where it is."""
    if isinstance(value, torch.Tensor):
        return value if value.untyped_storage().nbytes() > share_above else duplicate(value, value.device)
    if isinstance(value, list):
        return [_copied(part, share_above) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _copied(getattr(value, f.name), share_above) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def _differ(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the storages of a tensor and of its copy hold other bytes."""
    if before is after:
        return False
    was, now = _storage(before), _storage(after)
    words = len(was) // 8 * 8  # eight bytes at a time take a fifth of the time
    head, tail = (was[:words].view(torch.int64), now[:words].view(torch.int64)), (was[words:], now[words:])
    return not (torch.equal(*head) and torch.equal(*tail))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in ``value`` with its name, in order."""
    parts: dict[str, Any] = {}
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        parts = value
    elif isinstance(value, list):
        parts = {f"{name}[{index}]": part for index, part in enumerate(value)}
    elif dataclasses.is_dataclass(value):
        parts = {f"{name}.{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
    for part_name, part in parts.items():
        yield from _tensors(part_name, part)


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes behind a tensor, those around a view included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def _bf16(*shape: int) -> torch.Tensor:
    """A tensor without storage of its own that says which shape and dtype are right."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
