"""Outside its hypothesis a GEMM bound gives no number: it names the element and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bound_problems import one_step, problem
from conformance import bounds
from conformance.operands import NotApplicable


def with_code(codes_in: np.ndarray, code: int) -> np.ndarray:
    codes_out = codes_in.copy()
    codes_out[-1, -1, -1] = code
    return codes_out


def with_scale(scales_in: torch.Tensor, value: float) -> torch.Tensor:
    scales_out = scales_in.clone()
    scales_out[-1, -1, -1] = value
    return scales_out


SM90, SM100 = (problem(arch, "normal", "powers", 1, (2, 1, 3, 512)) for arch in ("sm90", "sm100"))
HUGE = {"a_scales": SM90.a_scales * 2.0**110, "w_scales": SM90.w_scales * 2.0**90}
REFUSED = {
    "NaN activation code": (replace(SM90, a=with_code(SM90.a, 0xFF)), r"a_codes\[1, 0, 511\] = 255 is a NaN"),
    "NaN weight code": (replace(SM100, w=with_code(SM100.w, 0x7F)), r"w_codes\[0, 2, 511\] = 127 is a NaN code"),
    "NaN scale": (replace(SM90, a_scales=with_scale(SM90.a_scales, np.nan)), r"a_scales\[1, 0, 3\] = nan is not a pos"),
    "infinite scale": (replace(SM90, w_scales=with_scale(SM90.w_scales, np.inf)), r"w_scales\[0, 0, 3\] = inf"),
    "zero scale": (replace(SM90, w_scales=with_scale(SM90.w_scales, 0.0)), r"w_scales\[0, 0, 3\] = 0.0"),
    "negative scale": (replace(SM90, a_scales=-SM90.a_scales), r"a_scales\[0, 0, 0\] = -"),
    "NaN scale byte": (replace(SM100, w_scales=with_scale(SM100.w_scales, -1)), r"255 is the NaN of UE8M0"),
    "scale product below FP32": (replace(SM90, a_scales=SM90.a_scales * 2.0**-120), "leaves the normal FP32 range"),
    "scale product above FP32": (replace(SM90, **HUGE), "leaves the normal FP32 range"),
    "K off the promotion": (one_step("sm90", {}, {}, 96), "K=96 is not a multiple of 128"),
    "K off the instruction": (replace(SM100, a=SM100.a[..., :48], w=SM100.w[..., :48]), "K=48 is not a multiple of 32"),
    "no token": (replace(SM90, a=SM90.a[:0], a_scales=SM90.a_scales[:0]), "no output to bound"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("bound", [bounds.grouped_gemm_bound, bounds.apriori_bound])
def test_bounds_refuse_outside_their_hypothesis(bound: Any, name: str) -> None:
    p, message = REFUSED[name]
    with pytest.raises(NotApplicable, match=message):
        bound(*p.arguments, gran_k=p.gran_k)


@pytest.mark.parametrize("arch, scale", [("sm90", 2.0**115), ("sm100", 0xF3F3F3F3 - 2**32)])
def test_bounds_refuse_a_result_that_overflows(arch: str, scale: float) -> None:
    p = one_step(arch, {0: 0x7E}, {0: 0x7E})
    big = torch.full_like(p.a_scales, scale)
    with pytest.raises(NotApplicable, match="overflow"):
        bounds.grouped_gemm_bound(arch, p.a, big, p.w, p.w_scales, gran_k=p.gran_k)
    with pytest.raises(NotApplicable, match="overflow"):
        bounds.apriori_bound(arch, p.a, big, p.w, p.w_scales, gran_k=p.gran_k)


BAD_ARGUMENTS = {
    "unknown arch": (("sm80", *SM90.arguments[1:]), ValueError, "arch='sm80' is unknown"),
    "other scale dtype": (("sm100", *SM90.arguments[1:]), TypeError, "packed UE8M0 scales, int32"),
    "packed on SM90": (("sm90", *SM100.arguments[1:]), TypeError, "float32 scales"),
    "float codes": (("sm90", torch.ones(2, 1, 512), *SM90.arguments[2:]), TypeError, "a_codes has dtype float32"),
    "other K": (("sm90", SM90.a[..., :256], *SM90.arguments[2:]), ValueError, "equal G and K"),
    "scale shape": (("sm90", SM90.a, SM90.a_scales[..., :2], *SM90.arguments[3:]), ValueError, r"expected \(2, 1, 4\)"),
    "word count": (("sm100", SM100.a, SM100.a_scales.repeat(1, 1, 3), *SM100.arguments[3:]), ValueError, "gran_k=32"),
    "ambiguous": (one_step("sm100", {}, {}).arguments, ValueError, "say which with gran_k"),
}


@pytest.mark.parametrize("name", sorted(BAD_ARGUMENTS))
def test_bad_arguments_are_named(name: str) -> None:
    arguments, error, message = BAD_ARGUMENTS[name]
    with pytest.raises(error, match=message):
        bounds.grouped_gemm_bound(*arguments)


def test_unknown_output_is_refused() -> None:
    with pytest.raises(ValueError, match="output='fp16'"):
        bounds.grouped_gemm_bound(*SM90.arguments, output="fp16")
    with pytest.raises(ValueError, match="output='fp16'"):
        bounds.apriori_bound(*SM90.arguments, output="fp16")
