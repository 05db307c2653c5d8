"""Stages: a planted fault is caught in the stage that has it, and what is right passes every oracle."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.case import Case
from conformance.families import FAMILIES
from conformance.implementation import METHODS, EngineImplementation, SoftwareImplementation, is_the_model
from conformance.stages import FIGURES, StageResult, run_stages
from oproj.arch import get_arch
from oproj.engines.deep_gemm import DeepGemmEngine
from oproj.engines.software import SoftwareEngine
from planted import (
    Contiguous,
    Faulty,
    LastBlockDropped,
    LastSlots,
    NextPosition,
    NothingBack,
    NotReduced,
    OnePartialTwice,
    OneUlp,
    PaddingRead,
    Raises,
    ScaleOneOctaveHigh,
    ScalesOfOtherSlots,
    WholeChainOnly,
    case,
)

ARCHS = ("sm90", "sm100", "sm120")

FAULTS: list[tuple[type[Faulty], str, set[str]]] = [
    (LastBlockDropped, "wo_a", {"bits", "bound"}),
    (ScaleOneOctaveHigh, "quantize", {"bits", "bound"}),
    (NotReduced, "reduce", {"bound"}),
    (OnePartialTwice, "reduce", {"bound"}),
    (PaddingRead, "quantize", {"bits", "bound"}),
    (LastSlots, "wo_a", {"bits", "bound"}),
    (ScalesOfOtherSlots, "wo_a", {"bits", "bound"}),
    (NextPosition, "quantize", {"bits", "bound"}),
    (WholeChainOnly, "o_proj", {"bits"}),
    (OneUlp, "wo_b", {"bits"}),
    (Contiguous, "quantize", {"bits", "bound"}),
    (Raises, "wo_b", {"bits", "bound"}),
    (NothingBack, "wo_a", {"bits", "bound"}),
]


def failed(results: list[StageResult]) -> dict[str, set[str]]:
    """stage -> oracles that failed."""
    out: dict[str, set[str]] = {}
    for result in results:
        if result.verdict.status == "fail":
            out.setdefault(result.stage, set()).add(result.oracle)
    return out


@pytest.mark.parametrize(("fault", "stage", "oracles"), FAULTS)
def test_planted_fault_is_caught_in_its_own_stage(fault: type[Faulty], stage: str, oracles: set[str]) -> None:
    arch = ARCHS[[f for f, _, _ in FAULTS].index(fault) % 2]
    results = run_stages(case(arch), fault(arch))
    bad = failed(results)
    assert bad.get(stage, set()) >= oracles, bad
    # A stage is judged on its own input, so only the chain may fail besides.
    assert set(bad) <= {stage, "o_proj"}


@pytest.mark.parametrize("arch", ["sm90", "sm120"])
def test_right_implementation_passes_everything_and_every_oracle_compares(arch: str) -> None:
    results = run_stages(case(arch), Faulty(arch))
    assert failed(results) == {}
    passed = {(r.stage, r.oracle): r.comparison.compared for r in results if r.verdict.status == "pass"}
    scales, z, y = 5 * 2 * 32, 5 * 2 * 256, 5 * 128
    x = 5 * 2 * 4096
    exact = {stage: passed.pop((stage, "exact")) for stage in ("quantize", "wo_a", "wo_b", "reduce", "o_proj")}
    assert all(exact.values())
    assert passed == {
        ("quantize", "bits"): x + scales, ("quantize", "attainable"): x + scales, ("quantize", "bound"): x,
        ("wo_a", "bits"): z, ("wo_a", "bound"): z,
        ("wo_a", "format"): z, ("wo_b", "bits"): y, ("wo_b", "bound"): y, ("wo_b", "format"): y,
        ("reduce", "bound"): y, ("o_proj", "bits"): y, ("o_proj", "format"): y,
    }  # fmt: skip


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_fault_is_named_at_its_block(arch: str) -> None:
    first = run_stages(case(arch), ScaleOneOctaveHigh(arch))[0]
    assert first.comparison.mismatched == 1 and first.comparison.first_bad is not None
    assert (first.comparison.first_bad.tensor, first.comparison.first_bad.at) == ("scales", (3, 1, 9))
    assert "scales[3, 1, 9]" in first.verdict.reason
    if arch == "sm100":
        return
    bits = next(r for r in run_stages(case(arch), OneUlp(arch)) if (r.stage, r.oracle) == ("wo_b", "bits"))
    assert bits.comparison.first_bad is not None and bits.comparison.first_bad.at == (2, 77)
    assert bits.comparison.ulp_histogram[1] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_software_engine_is_within_every_bound_in_every_family(family: str) -> None:
    arch = ARCHS[list(FAMILIES).index(family) % 2]
    results = run_stages(case(arch, family=family, tokens=3, padded_heads=0), SoftwareImplementation(arch))
    assert failed(results) == {}
    assert {r.oracle for r in results if r.verdict.status == "pass"} == {"exact", "attainable", "bound", "format"}
    assert all(r.verdict.status == "not applicable" for r in results if r.oracle == "bits")


@pytest.mark.parametrize(
    ("arch", "preset", "fields"),
    [
        ("sm90", "v4.1-flash", {}), ("sm100", "v4.1-flash", {}),
        ("sm90", "v4-flash-base", {}), ("sm100", "v4-pro", {"quant_group_size": 32}),
        ("sm90", "v4-pro", {"variant": "mul_mul_add"}),
    ],
)  # fmt: skip
def test_every_way_of_serving_passes(arch: str, preset: str, fields: dict[str, Any]) -> None:
    sizes = {"n_groups": 2, "tp_size": 2, "o_lora_rank": 512, "hidden_size": 128, "family": "wide"}
    results = run_stages(Case(arch, preset, 3, **sizes, **fields), Faulty(arch))  # type: ignore[arg-type]
    assert failed(results) == {}
    assert {"quantize", "wo_a", "wo_b", "reduce", "o_proj"} == {r.stage for r in results if r.verdict.status == "pass"}


def test_another_engine_is_judged_bit_by_bit() -> None:
    """DeepGEMM's adapter over a module that computes as the model does, then over one whose wo_a drops a group."""

    def engine(flaw: float) -> DeepGemmEngine:
        software = SoftwareEngine("sm90")

        def fp8_einsum(expr: str, a: Any, b: Any, d: torch.Tensor, *, recipe: Any) -> None:
            software.fp8_einsum(expr, a, b, d, recipe=recipe)
            d[:, -1] *= flaw

        module: Any = SimpleNamespace(__name__="deep_gemm", fp8_einsum=fp8_einsum, fp8_gemm_nt=software.fp8_gemm_nt)
        return DeepGemmEngine("sm90", module=module, device="cpu")

    right = run_stages(case(), EngineImplementation(engine(1.0)))
    assert failed(right) == {}
    bits = {r.stage for r in right if r.oracle == "bits" and r.verdict.status == "pass"}
    assert bits == {"wo_a", "wo_b", "o_proj"}  # this engine leaves the quantiser to the model
    assert set(failed(run_stages(case(), EngineImplementation(engine(0.0))))) == {"wo_a", "o_proj"}


def test_model_is_not_its_own_judge_but_judges_what_is_overridden() -> None:
    software, mine = SoftwareImplementation("sm90"), LastBlockDropped("sm90")
    assert all(is_the_model(software, stage) for stage in METHODS)
    assert [is_the_model(mine, stage) for stage in METHODS] == [False, False, False, True, False]
    patched = SoftwareImplementation("sm90")
    patched.wo_b = lambda z, weights, *, config: z  # type: ignore[method-assign]
    assert not is_the_model(patched, "wo_b") and not is_the_model(patched, "o_proj")
    gpu: Any = SimpleNamespace(name="deep_gemm", arch=get_arch("sm90"), device="cpu", quantizer="software")
    assert [is_the_model(EngineImplementation(gpu), s) for s in ("quantize", "wo_a", "o_proj")] == [True, False, False]
    assert not is_the_model(object(), "wo_a")


def test_engine_derived_from_the_model_is_not_the_model() -> None:
    class LastBitLost(SoftwareEngine):
        def fp8_einsum(self, expr: str, a: Any, b: Any, d: torch.Tensor, c: Any = None, **options: Any) -> None:
            super().fp8_einsum(expr, a, b, d, c, **options)
            d.view(torch.int16)[0, 0, 0] ^= 1

    derived, replaced = SoftwareImplementation("sm90"), SoftwareImplementation("sm90")
    derived.engine = LastBitLost("sm90")
    replaced.engine.fp8_einsum = LastBitLost("sm90").fp8_einsum  # type: ignore[method-assign]
    for mine in (derived, replaced):
        assert [is_the_model(mine, stage) for stage in METHODS] == [False, False, False, True, False]
        assert failed(run_stages(case(), mine))["wo_a"] == {"bits", "exact"}


@pytest.mark.parametrize(
    ("stage", "argument", "shown"),
    [
        ("quantize", 0, "o"), ("quantize", 1, "positions"), ("quantize", 2, "cos_sin_cache"),
        ("wo_a", 0, "x.data, x.scale"), ("wo_a", 1, "weights.wo_a.weight"),
        ("wo_b", 0, "z"), ("reduce", 0, "partials[0], partials[1]"),
    ],
)  # fmt: skip
def test_writing_into_an_argument_fails_and_does_not_move_the_truth(stage: str, argument: int, shown: str) -> None:
    """Each of these computes rightly from what it has zeroed, so it agrees with a truth that shares its memory."""
    mine = Faulty("sm90")
    right = getattr(mine, stage)

    def wrong(*given: Any, config: Any) -> Any:
        value = given[argument]
        tensors = {"x.data, x.scale": lambda: [value.data.view(torch.uint8), value.scale]}.get(
            shown, lambda: value if isinstance(value, list) else [getattr(value, "wo_a", value)]
        )()
        for tensor in tensors:
            getattr(tensor, "weight", tensor).fill_(0)
        return right(*given, config=config)

    setattr(mine, stage, wrong)
    results = run_stages(case(padding_slots=0), mine)
    of_stage = [r for r in results if r.stage == stage and (stage, r.oracle) not in FIGURES]
    assert {r.verdict.status for r in of_stage} == {"fail"}
    assert {r.verdict.reason for r in of_stage} == {f"{stage} wrote into its argument {shown}"}
    assert set(failed(results)) <= {stage, "o_proj"}


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        (lambda y: sys.exit(0), "wo_b raised SystemExit at"),
        (lambda y: y.to("meta"), "y is torch.strided on meta; expected a dense tensor with values"),
        (lambda y: y.to_sparse(), "y is torch.sparse_coo on cpu"),
        (lambda y: exec("raise ValueError('a\\0b\\ud800')"), "wo_b raised ValueError at <string>:1: a?b?"),
    ],
)
def test_exit_or_a_tensor_without_values_is_a_failure_and_the_run_goes_on(flaw: Any, reason: str) -> None:
    mine = SoftwareImplementation("sm90")
    mine.wo_b = lambda z, weights, *, config: flaw(SoftwareImplementation.wo_b(mine, z, weights, config=config))  # type: ignore[method-assign]
    results = run_stages(case(), mine)
    assert set(failed(results)) == {"wo_b", "o_proj"}
    assert all(reason in r.verdict.reason for r in results if r.stage == "wo_b")


def test_result_that_a_later_call_overwrites_is_judged_as_it_was() -> None:
    class OneBuffer(Faulty):
        buffer = torch.empty(0)

        def wo_a(self, x: Any, weights: Any, *, config: Any) -> torch.Tensor:
            z = super().wo_a(x, weights, config=config)
            self.buffer = self.buffer if self.buffer.shape == z.shape else torch.empty_like(z)
            return self.buffer.copy_(z)

    assert failed(run_stages(case(), OneBuffer("sm90"))) == {}


def test_no_tokens_compare_nothing_and_wrong_shapes_of_nothing_fail() -> None:
    results = run_stages(case(tokens=0), Faulty("sm90"))
    assert {r.verdict.status for r in results} == {"not applicable"}
    assert all(r.comparison.compared == 0 for r in results)
    assert set(failed(run_stages(case(tokens=0), NothingBack("sm90")))) >= {"wo_a"}
