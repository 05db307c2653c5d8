"""Right answers that differ: each declares what it does, and no check may flag it.

An implementation says in its attributes what it promises: ``bitwise`` (stages whose bits are the model's), ``o_known``,
``k_order``, ``scale_rule``, ``amax_floor`` and ``reduction``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from conformance.case import Case, CaseConfig
from conformance.faults.base import Faulty, Quantizing, power_of_two_scale
from conformance.faults.einsum import reversed_wo_a
from conformance.faults.fault import ALL, always, fp8
from conformance.faults.layout import padding_rows
from conformance.inputs import Weights
from oproj.activation import QuantizedActivation
from oproj.arch import get_arch
from oproj.wo_b import reduce_partials


class CeilingRule(Quantizing):
    """The scale by exponent bits instead of a rounded log2."""

    bitwise = ("wo_a", "wo_b", "reduce")

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """Exact ceiling."""
        return power_of_two_scale(amax, log2_rule=False)


class DividingRule(CeilingRule):
    """amax divided by 448 instead of multiplied with its reciprocal."""

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """ceil2 of the quotient."""
        mantissa, exponent = torch.frexp(amax / 448.0)
        return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())


class FloorOf1e4(Quantizing):
    """The floor of DeepGEMM's own casters."""

    bitwise, amax_floor = ("wo_a", "wo_b", "reduce"), 1e-4
    floor = 1e-4


class ZerosArePositive(Faulty):
    """A code 0x80 is written 0x00."""

    bitwise = ("wo_a", "wo_b", "reduce")

    def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
        """Minus zero loses its sign."""
        x = super().quantize(o, positions, cos_sin_cache, config=config)
        if x.data.dtype == torch.float8_e4m3fn:
            codes = x.data.view(torch.uint8)
            codes[codes == 0x80] = 0
        return x


def padded_with(fp32: float, word: int) -> type[Faulty]:
    """Padding rows of the scales hold a valid scale instead of zero."""

    class Padding(Faulty):
        def quantize(self, o: Any, positions: Any, cos_sin_cache: Any, *, config: CaseConfig) -> QuantizedActivation:
            x = super().quantize(o, positions, cos_sin_cache, config=config)
            padding_rows(x.scale).fill_(word if x.scale.dtype == torch.int32 else fp32)
            return x

    return Padding


class Fp32Scales(Quantizing):
    """Scales with a mantissa on SM90: another recipe, right under its own."""

    bitwise, scale_rule = ("wo_a", "wo_b", "reduce"), "fp32"

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """amax / 448."""
        return amax / 448.0


class RoundedBetween(Quantizing):
    """A declared rounding to BF16 between rotation and quantisation."""

    bitwise, o_known = ("wo_a", "wo_b", "reduce"), "rounded"

    def between(self, y: torch.Tensor) -> torch.Tensor:
        """Through BF16."""
        return y.bfloat16().float()


class HiddenAccumulator(Quantizing):
    """A fused epilogue: it quantises an FP32 accumulator of which o is the rounding to BF16."""

    bitwise, o_known = ("wo_a", "wo_b", "reduce"), "half-ulp"

    def rotate(self, o: torch.Tensor, rows: torch.Tensor, config: CaseConfig) -> torch.Tensor:
        """From a value an eighth of a BF16 ulp or more beside o."""
        return super().rotate(o.float() * (1 + 2.0**-10), rows, config)


class OtherOrder(Faulty):
    """K summed from its end, as another engine may."""

    bitwise, k_order = ("quantize", "wo_b", "reduce"), {"wo_a": "descending"}

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """The same terms in another order."""
        if not config.fp8_wo_a(self.arch):
            return super().wo_a(x, weights, config=config)
        return reversed_wo_a(self, x, weights, config)


class AnyOrder(OtherOrder):
    """The same, with no order declared."""

    k_order = {"wo_a": "any", "wo_b": "any"}  # noqa: RUF012


class RingDeclared(Faulty):
    """Partials added in BF16, as declared."""

    reduction = "bf16"

    def reduce(self, partials: Any, *, config: CaseConfig) -> torch.Tensor:
        """A rounding per rank."""
        return reduce_partials(list(partials), "bf16")


class BackwardsRanks(Faulty):
    """Partials added in FP32 from the last rank on."""

    reduction = "fp32"

    def reduce(self, partials: Any, *, config: CaseConfig) -> torch.Tensor:
        """Another order of ranks."""
        return reduce_partials(list(partials)[::-1], "fp32")


def same(case: Case) -> Case:
    """The Case as it is."""
    return case


@dataclass(frozen=True)
class Variant:
    """A right implementation; ``prepare`` gives the Case in which it is judged (a declared rotation, a TP size)."""

    name: str
    about: str
    build: Callable[[Any], Any]
    archs: tuple[str, ...] = ALL
    fits: Callable[[Case], bool] = always
    prepare: Callable[[Case], Case] = same

    def implementation(self, arch: str) -> Any:
        """A fresh implementation; ``ValueError`` where the variant does not exist on ``arch``."""
        if arch not in self.archs:
            raise ValueError(f"variant {self.name} does not exist on {arch}; it does on {', '.join(self.archs)}")
        return self.build(get_arch(arch))


def _three_roundings(case: Case) -> Case:
    return dataclasses.replace(case, variant="mul_mul_add")


VARIANTS: tuple[Variant, ...] = (
    Variant("as-served", "every stage on the software engine", Faulty),
    Variant("written-out", "the quantiser in torch, step by step", Quantizing),
    Variant("mul-mul-add", "three roundings in the rotation, declared", Quantizing, prepare=_three_roundings),
    Variant("ceil-rule", "scale by exponent bits instead of a rounded log2", CeilingRule, fits=fp8),
    Variant("divide-448", "amax divided by 448 instead of multiplied", DividingRule, fits=fp8),
    Variant("floor-1e-4", "scale byte of a tiny block by another floor", FloorOf1e4, fits=fp8),
    Variant("positive-zero", "code 0x00 for 0x80", ZerosArePositive, fits=fp8),
    Variant("padding-one", "padding rows of scales are 1.0", padded_with(1.0, 0x7F7F7F7F), fits=fp8),
    Variant("padding-2^k", "padding rows of scales are powers of two", padded_with(2.0**-9, 0x767B8087), fits=fp8),
    Variant("fp32-scale", "scales with a mantissa", Fp32Scales, ("sm90",), fp8),
    Variant("fused-epilogue", "an FP32 accumulator quantised of which o is the rounding", HiddenAccumulator, fits=fp8),
    Variant("bf16-between", "declared BF16 rounding between rotation and quantisation", RoundedBetween, fits=fp8),
    Variant("other-k-order", "K summed from its end, declared", OtherOrder, fits=fp8),
    Variant("any-k-order", "K summed from its end, no order declared", AnyOrder, fits=fp8),
    Variant("ring-declared", "partials added in BF16 words, declared", RingDeclared),
    Variant("ranks-backwards", "partials added in FP32 from the last rank", BackwardsRanks),
)
