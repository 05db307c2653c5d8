"""The GEMM bounds against chains in exact rational arithmetic: never exceeded, and sharp."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exact_fp8 as exact
from bound_problems import ONE, Problem, indices, one_step, problem, problems, unit_scales
from conformance import bounds
from conformance.operands import NotApplicable, gemm_operands
from conformance.running_bound import RunningBound, running_bound
from oproj.arch import ARCHS, get_arch
from oproj.engines.software import spec

# Inside the kernel: float32 sums of losses (2^-18) and of bounds; the scalar evaluation is exact.
AGREEMENT = Fraction(1) + Fraction(1, 1 << 17)


def replay(p: Problem, fused: bool = True) -> RunningBound:
    arch = get_arch(p.arch)
    return running_bound(arch, gemm_operands(arch, *p.arguments[1:], p.gran_k), fused=fused)


@settings(max_examples=80)
@given(problems, st.booleans())
def test_kernel_evaluates_the_inequality_and_no_exact_chain_exceeds_it(p: Problem, fused: bool) -> None:
    run = replay(p, fused)
    before = bounds.grouped_gemm_bound(*p.arguments, output="fp32", fused=fused, gran_k=p.gran_k)
    after = bounds.grouped_gemm_bound(*p.arguments, fused=fused, gran_k=p.gran_k)
    for at in indices(p):
        want = p.output(*at, fused)
        assert Fraction(run.result[at]) == want.result
        assert want.bound <= Fraction(run.bound[at]) * (1 + Fraction(1, 1 << 40)) <= want.bound * AGREEMENT
        assert want.magnitude <= Fraction(run.magnitude[at]) <= want.magnitude * AGREEMENT
        assert abs(want.result - want.exact) <= Fraction(float(before[at]))
        assert abs(exact.round_bf16(want.result) - want.exact) <= Fraction(float(after[at]))
        with_half_ulp = Fraction(float(before[at])) + exact.half_ulp_bf16(want.result)
        assert abs(Fraction(float(after[at])) - with_half_ulp) <= with_half_ulp / (1 << 30)


@settings(max_examples=40)
@given(problems)
def test_apriori_bound_covers_every_exact_chain_and_the_running_bound(p: Problem) -> None:
    apriori = bounds.apriori_bound(*p.arguments, gran_k=p.gran_k)
    arithmetic = bounds.apriori_bound(*p.arguments, output="fp32", gran_k=p.gran_k)
    running = bounds.grouped_gemm_bound(*p.arguments, output="fp32", gran_k=p.gran_k)
    assert bool((running <= arithmetic * float(AGREEMENT)).all())
    for at in indices(p)[:3]:
        want = p.output(*at)
        assert abs(want.result - want.exact) <= Fraction(float(arithmetic[at]))
        assert abs(exact.round_bf16(want.result) - want.exact) <= Fraction(float(apriori[at]))


def margin(p: Problem) -> float:
    """Error over running bound of one output, both before the BF16 rounding."""
    want = p.output(0, 0, 0)
    bound = bounds.grouped_gemm_bound(*p.arguments, output="fp32", gran_k=p.gran_k)
    return float(abs(want.result - want.exact) / Fraction(float(bound)))


def test_running_bound_is_reached_where_alignment_drops_a_whole_product() -> None:
    sm90 = one_step("sm90", {0: 0x78, 1: ONE}, {0: ONE, 1: 0x08})  # 256*1 + 1*2^-6
    sm100 = one_step("sm100", {0: 0x7E, 1: 0x7E, 2: 0x01}, {0: 0x7E, 1: 0xFE, 2: 0x30})  # 448^2 - 448^2 + 2^-10
    assert 0.99 < margin(sm90) <= 1
    assert 0.99 < margin(sm100) <= 1


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_running_bound_is_sharp_on_positive_codes_over_a_whole_group(arch: str) -> None:
    rng = np.random.default_rng(7)
    p = unit_scales(arch, *(rng.integers(1, 0x7F, s).astype(np.uint8) for s in ((4, 1, 4096), (1, 16, 4096))))
    operands = gemm_operands(get_arch(arch), *p.arguments[1:])
    run = running_bound(get_arch(arch), operands)
    margins = np.abs(run.result[:, 0] - operands.activations(0) @ operands.weights(0).T) / run.bound[:, 0]
    assert 0.4 < margins.max() <= 1


def test_promotion_rounds_its_sum_once() -> None:
    """final = 1, then s*acc just above half an ulp: rounding to float64 first would meet a tie and stay at 1."""
    found = 0
    for j in range(1, 2**13):
        acc = 1 + j * 2.0**-13
        s = np.float32(2.0**-24 / acc)
        if not 0 < Fraction(float(s)) * Fraction(acc) * 2**24 - 1 < Fraction(1, 2**29):
            continue
        bits = [i for i in range(14) if j >> (13 - i) & 1 or i == 0]  # acc as a sum of 2^-i, as products 2^-6 * 2^(6-i)
        a = {0: ONE, **{128 + n: 0x08 for n in range(len(bits))}}
        w = {0: ONE, **{128 + n: (13 - i) << 3 for n, i in enumerate(bits) if i < 13}}
        w |= {128 + n: 0x04 for n, i in enumerate(bits) if i == 13}  # 2^-7 is a subnormal code
        p = one_step("sm90", a, w, 256)
        p.a_scales[0, 0, 1] = float(s)
        want = p.output(0, 0, 0).result
        assert want == 1 + Fraction(1, 2**23) and np.float32(1 + float(s) * acc) == 1
        assert replay(p).result[0, 0, 0] == want
        found += 1
        if found == 10:
            return
    pytest.fail(f"{found} sums of this kind, expected 10")


def test_the_float64_reference_is_given_its_own_rounding() -> None:
    p = one_step("sm100", {0: 0x7E, 1: 0x7E}, {0: 0x7E, 1: 0xFE})  # 448^2 - 448^2: the chain itself is exact
    bound = float(bounds.grouped_gemm_bound(*p.arguments, output="fp32", gran_k=128))
    assert replay(p).bound.max() == 0 and 1 <= bound / (128 * 2.0**-53 * 2 * 448**2) < float(AGREEMENT)


def apriori_by_hand(p: Problem, t: int, g: int, r: int, kappa: int) -> Fraction:
    """Every product times the steps that see it and the promotions after it, from the inequality as it is written."""
    row, u, depth = exact.ROWS[p.arch], exact.U32, p.a.shape[2]
    width, scales = row.promotion or depth, p.scales(t, g, r)
    per_step = Fraction(kappa * 32, 1 << row.frac) + Fraction(1, 1 << row.out)
    total, blocks = Fraction(0), depth // width
    for k in range(depth):
        scale = Fraction(2) ** scales[k // 32] if row.promotion is None else Fraction(1)
        product = abs(exact.value(int(p.a[t, g, k])) * exact.value(int(p.w[g, r, k]))) * scale
        charge = per_step * ((width - k % width + 31) // 32)
        if row.promotion:
            (sa, sb), inexact = scales[k // 128], 1  # general FP32 scales: some product of the tensors is inexact
            product *= Fraction(sa) * Fraction(sb)
            charge = (charge + u * (inexact + blocks - k // 128)) * (1 + u) ** (blocks + 3)
        total += product * (charge + depth * Fraction(1, 2**53))
    tiny = Fraction(1, 2 ** (126 + row.out)) + Fraction(33, 2 ** (126 + row.frac))
    return total + depth // 32 * (Fraction(1, 2**150) if row.promotion else tiny)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("scales", ["general", "tiny"])
def test_apriori_bound_is_its_inequality(arch: str, scales: str) -> None:
    p = problem(arch, "subnormal", scales, 4, (2, 1, 2, 512))
    bound = bounds.apriori_bound(*p.arguments, output="fp32", gran_k=p.gran_k, kappa=64)
    for at in indices(p):
        assert abs(Fraction(float(bound[at])) / apriori_by_hand(p, *at, kappa=64) - 1) < Fraction(1, 1 << 32)


def test_the_usual_apriori_constant_is_false_with_subnormal_codes() -> None:
    p = one_step("sm90", {0: 0x01, **dict.fromkeys(range(1, 32), 0x0F)}, {0: 0x78, **dict.fromkeys(range(1, 32), 0x08)})
    want = p.output(0, 0, 0)
    error = abs(want.result - want.exact)
    usual = (Fraction(32, 1 << 13) + Fraction(1, 1 << 13)) * want.magnitude
    assert error > 6 * usual and error <= Fraction(float(bounds.apriori_bound(*p.arguments, output="fp32")))
    assert torch.equal(bounds.apriori_bound(*p.arguments), bounds.apriori_bound(*p.arguments, kappa=8))
    with pytest.raises(NotApplicable, match=r"kappa of group 0\[0, 0\] = 8 .*kappa=1"):
        bounds.apriori_bound(*p.arguments, kappa=1)


@pytest.mark.parametrize("a, w, kappa", [(ONE, 0x81, 8), (0x07, 0x01, 64), (ONE, ONE, 1)])
def test_apriori_constant_follows_the_subnormal_codes(a: int, w: int, kappa: int) -> None:
    p = one_step("sm100", {0: a, 5: ONE}, {0: w, 5: ONE})
    chosen = bounds.apriori_bound(*p.arguments, output="fp32", gran_k=128)
    assert torch.equal(chosen, bounds.apriori_bound(*p.arguments, output="fp32", gran_k=128, kappa=kappa))
    if kappa > 1:
        with pytest.raises(NotApplicable, match=f"= {kappa} is what the subnormal codes need"):
            bounds.apriori_bound(*p.arguments, gran_k=128, kappa=kappa // 8)


def test_half_ulp_follows_a_result_in_the_next_binade_but_never_a_nan() -> None:
    p = one_step("sm90", {0: ONE}, {0: ONE})
    model = bounds.grouped_gemm_bound(*p.arguments)
    neighbour = bounds.grouped_gemm_bound(*p.arguments, z_hat=torch.full((1, 1, 1), 2.0, dtype=torch.bfloat16))
    broken = bounds.grouped_gemm_bound(*p.arguments, z_hat=torch.full((1, 1, 1), float("nan"), dtype=torch.bfloat16))
    assert float(neighbour) > float(model) + 2.0**-8 and float(neighbour) < float(model) + 2.0**-7
    assert torch.equal(model, broken)
    with pytest.raises(ValueError, match="z_hat has shape"):
        bounds.grouped_gemm_bound(*p.arguments, z_hat=torch.zeros(1, 1, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_tiles_threads_and_strides_do_not_change_a_bound(arch: str) -> None:
    p = problem(arch, "normal", "powers", 3, (35, 2, 133, 256))
    whole = bounds.grouped_gemm_bound(*p.arguments, gran_k=p.gran_k, threads=2)
    w_scales = p.w_scales[:1, 1:] if arch == "sm90" else p.w_scales[:1, 128:]
    corner = (p.a[34:, :1], p.a_scales[34:, :1], p.w[:1, 128:], w_scales)
    alone = bounds.grouped_gemm_bound(arch, *corner, gran_k=p.gran_k, threads=1)
    assert torch.equal(whole[34:, :1, 128:], alone)
    group_major = torch.from_numpy(p.a.transpose(1, 0, 2).copy()).transpose(0, 1).view(torch.float8_e4m3fn)
    strided = torch.empty(2, p.a_scales.shape[2], 36, dtype=p.a_scales.dtype)[:, :, :35].permute(2, 0, 1)
    strided.copy_(p.a_scales)
    assert not group_major.is_contiguous() and not strided.is_contiguous()
    again = bounds.grouped_gemm_bound(arch, group_major, strided, p.w, p.w_scales, gran_k=p.gran_k)
    assert torch.equal(whole, again)


@pytest.mark.parametrize("arch", ["sm90", "sm120"])
def test_the_two_dimensional_form_is_the_grouped_one_with_one_group(arch: str) -> None:
    p = problem(arch, "normal", "powers", 5, (3, 1, 5, 512))
    z_hat = torch.ones(3, 1, 5, dtype=torch.bfloat16)
    grouped = bounds.grouped_gemm_bound(*p.arguments, z_hat=z_hat, gran_k=p.gran_k)
    flat = bounds.gemm_bound(
        arch, p.a[:, 0], p.a_scales[:, 0], p.w[0], p.w_scales[0], z_hat=z_hat[:, 0], gran_k=p.gran_k
    )
    assert torch.equal(flat, grouped[:, 0])
    with pytest.raises(ValueError, match="2-D"):
        bounds.gemm_bound(*p.arguments)


@settings(max_examples=10)
@given(problems)
def test_the_replayed_chain_is_the_software_specification(p: Problem) -> None:
    arch, result = get_arch(p.arch), replay(p).result
    for t, g, r in indices(p)[:4]:
        sides = (p.a_scales[t, g], p.w_scales[g, r // 128 if p.gran_k is None else r])
        scales = [s.tolist() if p.gran_k is None else s.contiguous().view(torch.uint8).tolist() for s in sides]
        bits = spec.chain(arch, p.a[t, g].tolist(), p.w[g, r].tolist(), *scales, p.gran_k or 128)
        assert spec.bits_float(bits) == result[t, g, r]
