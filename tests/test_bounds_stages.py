"""Bounds of rotation, quantisation, formats, BF16 sums and the reduction over ranks, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exact_fp8 as exact
from bound_problems import E4M3_VALUES, Problem, problem, quantize, unit_scales
from conformance import bounds
from conformance.operands import NotApplicable

bf16_values = st.integers(0, 0x7F7F).map(lambda bits: float(np.uint32(bits << 16).view(np.float32)))
moderate = st.floats(-1e4, 1e4, width=32)
unit = st.floats(-1, 1, width=32)
seeds = st.integers(0, 2**32 - 1)


def fraction(x: object) -> Fraction:
    return Fraction(float(x))  # type: ignore[arg-type]


def bf16(x: np.ndarray) -> np.ndarray:
    """Values rounded to BF16, in float64."""
    return torch.from_numpy(np.asarray(x, np.float64)).to(torch.bfloat16).double().numpy()


def largest_margin(errors: np.ndarray, limits: torch.Tensor) -> float:
    """max(error / bound) over all elements; a bound of zero admits no error at all."""
    assert errors.shape == tuple(limits.shape) and errors.size > 0
    assert not np.any(errors[limits.numpy() == 0])
    return float(np.max(errors / np.maximum(limits.numpy(), 2.0**-1000)))


@given(bf16_values, st.floats(-0.5, 0.5))
def test_half_ulp_is_the_largest_rounding_error_of_bf16(near: float, steps: float) -> None:
    half = exact.half_ulp_bf16(Fraction(near))
    assert fraction(bounds.half_ulp_bf16(near)) == half
    x = Fraction(near) + 2 * half * Fraction(steps)
    assert abs(exact.round_bf16(x) - x) <= fraction(bounds.half_ulp_bf16(float(exact.round_bf16(x))))


@pytest.mark.parametrize("x", [float("nan"), float("inf"), 3.4e38])
def test_half_ulp_refuses_what_bf16_does_not_hold(x: float) -> None:
    with pytest.raises(NotApplicable, match="does not round to a finite BF16"):
        bounds.half_ulp_bf16([1.0, x])


def test_gamma_is_the_textbook_constant_and_is_refused_beyond_it() -> None:
    assert bounds.gamma(4096, 2.0**-24) == (2.0**-12) / (1 - 2.0**-12)
    for n, u in ((256, 2.0**-8), (2**24, 2.0**-23), (-1, 2.0**-8)):
        with pytest.raises(NotApplicable, match="n\\*u < 1"):
            bounds.gamma(n, u)


def rotated(x0: Fraction, x1: Fraction, c: Fraction, s: Fraction, variant: str) -> tuple[Fraction, Fraction]:
    """The inverse rotation of one pair in FP32, in the declared association."""
    r = exact.round_f32
    if variant == "fma_cos":
        return r(x0 * c + r(x1 * s)), r(x1 * c - r(x0 * s))
    return r(r(x0 * c) + r(x1 * s)), r(r(x1 * c) - r(x0 * s))


def rotation_margins(x: list[float], c: float, s: float, variant: str, output: str) -> float:
    exacts = [Fraction(v) for v in (*x, c, s)]
    x0, x1, cf, sf = exacts
    got = rotated(x0, x1, cf, sf, variant)
    limit = bounds.inverse_rope_bound([1.0, *x], [c], [s], variant, output=output)
    assert limit.shape == (3,) and float(limit[0]) == 0
    margins = []
    for y, want, bound in zip(got, (x0 * cf + x1 * sf, x1 * cf - x0 * sf), limit[1:], strict=True):
        stored = exact.round_bf16(y) if output == "bf16" else y
        margins.append(abs(stored - want) / fraction(bound))
    return float(max(margins))


@settings(max_examples=300)
@given(moderate, moderate, unit, unit, st.sampled_from(["fma_cos", "mul_mul_add"]), st.sampled_from(["fp32", "bf16"]))
def test_no_rotation_exceeds_its_bound(x0: float, x1: float, c: float, s: float, variant: str, output: str) -> None:
    x = bf16(np.array([x0, x1])).tolist()
    assert rotation_margins(x, c, s, variant, output) <= 1


@pytest.mark.parametrize("variant", ["fma_cos", "mul_mul_add"])
@pytest.mark.parametrize("output", ["fp32", "bf16"])
def test_rotation_bound_is_sharp_and_tells_the_variants_apart(variant: str, output: str) -> None:
    rng = np.random.default_rng(0)
    cases = [
        (bf16(rng.standard_normal(2)).tolist(), *(float(np.float32(f(angle))) for f in (np.cos, np.sin)))
        for angle in rng.uniform(0, 7, 400)
    ]
    margins = [rotation_margins(x, c, s, variant, output) for x, c, s in cases]
    assert 0.8 < max(margins) <= 1


def test_rotation_bound_refuses_unknown_variants_and_non_finite_inputs() -> None:
    with pytest.raises(ValueError, match="variant='either'"):
        bounds.inverse_rope_bound([1.0, 1.0], [1.0], [0.0], "either")
    with pytest.raises(ValueError, match="2\\*P <= 2"):
        bounds.inverse_rope_bound([1.0, 1.0], [1.0, 1.0], [0.0, 0.0])
    for x, message in (([1.0, np.nan], r"x\[1\] = nan is not finite"), ([3e38, 3e38], "overflows FP32")):
        with pytest.raises(NotApplicable, match=message):
            bounds.inverse_rope_bound(x, [1.0], [1.0])


@settings(max_examples=60)
@given(seeds, st.booleans(), st.integers(-40, 20))
def test_no_quantised_block_exceeds_its_bound(seed: int, power: bool, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    y = (rng.standard_normal((3, 256)) * 2.0 ** rng.integers(-12, 1, (3, 256)) * 2.0**exponent).astype(np.float32)
    scale = np.abs(y.reshape(3, 2, 128)).max(-1).astype(np.float32) / np.float32(448)
    scale = np.exp2(np.ceil(np.log2(scale))) if power else scale
    wide = np.repeat(scale.astype(np.float64), 128, -1)
    errors = np.abs(quantize(y.astype(np.float64), wide) - y)
    assert largest_margin(errors, bounds.quantize_bound(torch.from_numpy(y), scale)) <= 1


def test_quantisation_bound_is_reached_half_way_between_codes() -> None:
    finite = np.sort(E4M3_VALUES[:127])
    middles = (finite[1:] + finite[:-1]) / 2 * 2.0**-5
    limit = bounds.quantize_bound(middles, [2.0**-5])
    margins = np.abs(quantize(middles, np.full(1, 2.0**-5)) - middles) / limit.numpy()
    assert 0.999 < margins.max() <= 1 and margins.min() > 0.5


def test_a_rounded_quotient_may_turn_a_near_tie_the_wrong_way() -> None:
    scales = (1 + np.random.default_rng(5).random(2000)).astype(np.float32).astype(np.float64)
    y = (scales * 3 * 2.0**-10).astype(np.float32).astype(np.float64)  # next to 1.5 steps of subnormal codes
    limit = bounds.quantize_bound(y[:, None], scales[:, None])[:, 0]
    errors = np.abs(quantize(y, scales) - y)
    assert np.any(errors > 2.0**-10 * scales) and 0.99 < largest_margin(errors, limit) <= 1


@settings(max_examples=40)
@given(seeds)
def test_slack_covers_an_input_that_the_quantiser_saw_differently(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seen = np.concatenate([rng.standard_normal(127) * 100, [448.0]])
    slack = np.abs(seen) * 2.0 ** float(rng.integers(-20, -2))
    y = seen + slack * rng.uniform(-1, 1, 128)
    y[-1] = seen[-1] + slack[-1]
    errors = np.abs(quantize(seen, np.ones(128)) - y)
    assert largest_margin(errors, bounds.quantize_bound(y, [1.0], slack)) <= 1


def test_quantisation_bound_refuses_clamping_and_unusable_scales() -> None:
    for y, scale, message in (
        ([1.0, 448.5], [1.0], r"\|y\|\[1\] = 448.5 exceeds 448 \* scale: it clamps"),
        ([1.0, 1.0], [0.0], r"scale\[0\] = 0.0 is not a positive scale"),
        ([np.inf, 1.0], [1.0], r"y\[0\] = inf is not finite"),
        ([1.0, 1.0], [np.nan], r"scale\[0\] = nan is not finite"),
    ):
        with pytest.raises(NotApplicable, match=message):
            bounds.quantize_bound(y, scale)
    with pytest.raises(ValueError, match=r"K/block.*K=3"):
        bounds.quantize_bound([1.0, 1.0, 1.0], [1.0, 1.0])
    with pytest.raises(NotApplicable, match="slack"):
        bounds.quantize_bound([1.0], [1.0], -1.0)


def quantised_problem(arch: str, seed: int) -> tuple[Problem, np.ndarray, np.ndarray]:
    """Operands whose activations were quantised from y, with y and their dequantised values, ``[T, G, K]``."""
    rng = np.random.default_rng(seed)
    weights = problem(arch, "normal", "powers", seed, (1, 2, 6, 512)).w
    y = rng.standard_normal((3, 2, 512)) * 2.0 ** rng.integers(-3, 3, (3, 2, 512))
    scaled = y * 4  # the scales of unit_scales are one; |y| stays below 448 / 4
    codes = torch.from_numpy(scaled).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return unit_scales(arch, codes, weights), scaled, E4M3_VALUES[codes]


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_format_bound_of_z_covers_quantisation_and_arithmetic(arch: str) -> None:
    p, y, _ = quantised_problem(arch, 11)
    gemm = bounds.grouped_gemm_bound(*p.arguments)
    limit = bounds.format_bound_z(arch, y, *p.arguments[2:], gemm)
    weights = E4M3_VALUES[p.w]
    for t, g, r in np.ndindex(3, 2, 6):
        z_hat = exact.round_bf16(p.output(t, g, r).result)
        z = sum((Fraction(a) * Fraction(b) for a, b in zip(y[t, g], weights[g, r], strict=True)), Fraction(0))
        assert abs(z_hat - z) <= fraction(limit[t, g, r])
    by_hand = np.abs(weights[1, 2]) @ np.maximum(2.0**-4 * np.abs(y[0, 1]), 2.0**-10) + float(gemm[0, 1, 2])
    assert abs(float(limit[0, 1, 2]) / by_hand - 1) < 2.0**-30
    with pytest.raises(ValueError, match="gemm has shape"):
        bounds.format_bound_z(arch, y, *p.arguments[2:], gemm[:1])


def test_format_bound_of_z_is_reached_when_every_error_points_one_way() -> None:
    y = np.full((1, 1, 128), 17.0)  # half way between 16 and 18, to even: 16
    p = unit_scales("sm90", np.full((1, 1, 128), 0x58, np.uint8), np.full((1, 1, 128), 0x38, np.uint8))
    limit = bounds.format_bound_z("sm90", y, *p.arguments[2:], bounds.grouped_gemm_bound(*p.arguments))
    assert 0.85 < (17.0 - 16.0) * 128 / float(limit) <= 1


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_format_bound_of_y_passes_the_bound_on_z_through_the_weight(arch: str) -> None:
    p, z_hat, _ = quantised_problem(arch, 12)
    rng = np.random.default_rng(12)
    z_bound = np.abs(z_hat) * 2.0**-6
    z = z_hat + z_bound * rng.uniform(-1, 1, z_hat.shape)
    flat = (p.a[:, 0], p.a_scales[:, 0], p.w[0], p.w_scales[0])
    gemm = bounds.gemm_bound(arch, *flat, gran_k=p.gran_k)
    limit = bounds.format_bound_y(arch, z[:, 0], z_bound[:, 0], *flat[1:], gemm)
    y_hat = np.array([[float(exact.round_bf16(p.output(t, 0, r).result)) for r in range(6)] for t in range(3)])
    assert largest_margin(np.abs(y_hat - z[:, 0] @ E4M3_VALUES[p.w[0]].T), limit) <= 1
    without = bounds.format_bound_y(arch, z[:, 0], np.zeros((3, 512)), *flat[1:], gemm)
    carried = z_bound[:, 0] @ np.abs(E4M3_VALUES[p.w[0]]).T
    assert bool((limit.numpy() >= without.numpy() + carried).all())


def reduced(parts: list[Fraction], order: np.ndarray, kind: str) -> Fraction:
    total = parts[order[0]]
    for i in order[1:]:
        total = (exact.round_bf16 if kind == "bf16" else exact.round_f32)(total + parts[i])
    return exact.round_bf16(total)


def reduction_margin(kind: str, rng: np.random.Generator, n: int, cancel: bool, spread: float) -> float:
    """Ranks err by up to their bounds before rounding to BF16; the reduction runs in a random order."""
    y = rng.standard_normal(n) if cancel else 1 + rng.random(n)
    if cancel and n > 1:
        y[-1] = -y[:-1].sum() * (1 + 2.0**-7)
    rank_bounds = spread * np.abs(y)
    errors = rank_bounds * rng.uniform(-1, 1, n)
    partials = [exact.round_bf16(Fraction(v) + Fraction(e)) for v, e in zip(y, errors, strict=True)]
    got = reduced(partials, rng.permutation(n), kind)
    limit = bounds.tp_reduction_bound([float(p) for p in partials], kind, partial_bounds=rank_bounds)
    return float(abs(got - sum(map(Fraction, y))) / fraction(limit))


@settings(max_examples=200)
@given(st.sampled_from(["bf16", "fp32"]), seeds, st.integers(1, 16), st.booleans(), st.sampled_from([0.0, 2.0**-3]))
def test_no_reduction_over_ranks_exceeds_its_bound(kind: str, seed: int, n: int, cancel: bool, spread: float) -> None:
    assert reduction_margin(kind, np.random.default_rng(seed), n, cancel, spread) <= 1


@pytest.mark.parametrize("kind, added", [("bf16", 6 / (2**8 - 2)), ("fp32", 6 / (2**24 - 2) + 2.0**-7)])
def test_reduction_bound_is_its_inequality(kind: str, added: float) -> None:
    limit = bounds.tp_reduction_bound(np.ones((3, 2)), kind, partial_bounds=0.25)
    assert np.abs(limit.numpy() / (3 * (0.25 + 2.0**-8) + added) - 1).max() < 2.0**-32


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_reduction_bound_is_sharp_for_few_ranks(kind: str) -> None:
    rng = np.random.default_rng(3)
    assert max(reduction_margin(kind, rng, 2, False, 0.0) for _ in range(300)) > 0.5


def test_reduction_bound_refuses_too_many_ranks_and_unknown_kinds() -> None:
    with pytest.raises(NotApplicable, match="n=256"):
        bounds.tp_reduction_bound(np.ones(257), "bf16")
    assert float(bounds.tp_reduction_bound(np.ones(257), "fp32")) > 0
    with pytest.raises(ValueError, match="kind='fp16'"):
        bounds.tp_reduction_bound(np.ones(2), "fp16")
    with pytest.raises(NotApplicable, match="nothing to reduce"):
        bounds.tp_reduction_bound(np.ones((0, 3)), "bf16")
    with pytest.raises(NotApplicable, match=r"partials\[1\] = nan"):
        bounds.tp_reduction_bound([1.0, np.nan], "fp32")
    with pytest.raises(NotApplicable, match="may overflow"):
        bounds.tp_reduction_bound([3e38, 3e38], "fp32")


def toward_zero(x: np.ndarray) -> np.ndarray:
    """float64 values cut to FP32."""
    nearest = x.astype(np.float32)
    over = np.abs(nearest.astype(np.float64)) > np.abs(x)
    return np.where(over, np.nextafter(nearest, np.float32(0)), nearest)


@settings(max_examples=30)
@given(seeds, st.booleans(), st.sampled_from([16, 100, 512]), st.booleans())
def test_no_bf16_gemm_in_any_order_or_rounding_exceeds_its_bound(
    seed: int, truncates: bool, depth: int, positive: bool
) -> None:
    rng = np.random.default_rng(seed)
    a, w = bf16(rng.standard_normal((4, depth))), bf16(rng.standard_normal((5, depth)))
    if positive:
        a, w = np.abs(a), np.abs(w)
    else:  # pairs cancel, all but one: the error is measured against a small result
        w[:, 1::2], a[:, 1:-1:2] = -w[:, ::2], a[:, :-2:2]
    products, total = a[:, None] * w[None], np.zeros((4, 5))
    for k in rng.permutation(depth):  # products of BF16 are exact in FP32; float64 holds each sum before rounding
        exact_sum = total + products[..., k]
        total = (toward_zero(exact_sum) if truncates else exact_sum.astype(np.float32)).astype(np.float64)
    limit = bounds.bf16_gemm_bound(a, w)
    assert largest_margin(np.abs(bf16(total) - products.sum(-1)), limit) <= 1
    assert bool((bounds.bf16_gemm_bound(a, w, result=10 * bf16(total)) >= limit).all())


def test_bf16_gemm_bound_is_sharp_and_refuses_non_finite_inputs() -> None:
    a, w = bf16(1 + np.random.default_rng(1).random((2, 8, 64)))
    assert largest_margin(np.abs(bf16(a @ w.T) - a @ w.T), bounds.bf16_gemm_bound(a, w)) > 0.7
    for x, message in (([[1.0, np.inf]], r"a\[0, 1\] = inf"), ([[2.0**127, 2.0**127]], "may overflow")):
        with pytest.raises(NotApplicable, match=message):
            bounds.bf16_gemm_bound(x, [[1.0, 1.0]])
