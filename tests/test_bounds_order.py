"""Bounds of other orders of K: exact chains in that order never exceed them, and those in a wrong one may."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exact_fp8 as exact
from bound_problems import Problem, indices, problems, unit_scales
from conformance import bounds
from conformance.case import Case
from conformance.inputs import build
from conformance.truth import Truth
from oproj.arch import get_arch


def reordered(p: Problem, at: tuple[int, int, int], slices: np.ndarray) -> exact.Output:
    """One output, steps of 32 products in the order ``slices`` (whole blocks of 128 where scales are FP32)."""
    t, g, r = at
    row, lanes = exact.ROWS[p.arch], (slices[:, None] * 32 + np.arange(32)).ravel()
    scales = p.scales(*at)
    per_scale = p.a.shape[2] // len(scales)
    taken = [scales[int(k) // per_scale] for k in lanes[::per_scale]]
    return exact.chain(row, p.a[t, g][lanes].tolist(), p.w[g, r][lanes].tolist(), taken, True)


def some_order(p: Problem, rng: np.random.Generator) -> np.ndarray:
    steps = np.arange(p.a.shape[2] // 32)
    if not exact.ROWS[p.arch].promotion:
        return rng.permutation(steps)
    blocks = rng.permutation(steps.reshape(-1, 4))
    return np.concatenate([rng.permutation(block) for block in blocks])


@settings(max_examples=40, deadline=None)
@given(problems, st.integers(0, 2**32 - 1))
def test_no_order_exceeds_the_bound_of_any_order(p: Problem, seed: int) -> None:
    bound = bounds.grouped_gemm_bound(*p.arguments, output="fp32", gran_k=p.gran_k, order="any")
    ascending = bounds.apriori_bound(*p.arguments, output="fp32", gran_k=p.gran_k)
    assert bool((ascending <= bound).all())
    rng = np.random.default_rng(seed)
    for at in indices(p)[:3]:
        got = reordered(p, at, some_order(p, rng))
        assert abs(got.result - got.exact) <= Fraction(float(bound[at]))


@settings(max_examples=40, deadline=None)
@given(problems)
def test_descending_bound_is_the_inequality_of_the_chain_from_the_end(p: Problem) -> None:
    running = bounds.grouped_gemm_bound(*p.arguments, output="fp32", gran_k=p.gran_k, order="descending")
    apriori = bounds.apriori_bound(*p.arguments, output="fp32", gran_k=p.gran_k, order="descending")
    for at in indices(p)[:3]:
        got = reordered(p, at, np.arange(p.a.shape[2] // 32)[::-1])
        assert abs(got.result - got.exact) <= Fraction(float(running[at])) <= Fraction(float(apriori[at])) * 2
        assert got.bound <= Fraction(float(running[at])) * (1 + Fraction(1, 1 << 40))


@pytest.mark.parametrize(("arch", "rise", "fall", "factor"), [("sm90", 0x14, 0x9C, 0x38), ("sm100", 0x03, 0x86, 0x01)])
def test_the_bound_of_one_order_is_exceeded_by_another(arch: str, rise: int, fall: int, factor: int) -> None:
    """Small terms that cancel are summed exactly before 256 and cut one by one behind it: 1.5 lsb twice, -3 lsb once.
    The ascending replay loses nothing, the chain from the end half an lsb of each positive term."""
    a, w = np.zeros((1, 1, 128), np.uint8), np.full((1, 1, 128), factor, np.uint8)
    a[..., :20], a[..., 20:30] = rise, fall
    a[..., -1], w[..., -1] = 0x78, 0x38
    p = unit_scales(arch, a, w)
    got = reordered(p, (0, 0, 0), np.arange(p.a.shape[2] // 32)[::-1])
    error = abs(got.result - got.exact)

    def limit(order: Any) -> Fraction:
        return Fraction(float(bounds.grouped_gemm_bound(*p.arguments, output="fp32", gran_k=p.gran_k, order=order)))

    assert limit("ascending") < error <= min(limit("descending"), limit("any"))


def test_unknown_orders_are_refused() -> None:
    inputs = build(Case("sm90", "v4-flash", 1, n_groups=1, o_lora_rank=128, hidden_size=128))
    for bad in ({"wo_a": "odd"}, {"reduce": "any"}):
        with pytest.raises(ValueError, match="k_order="):
            Truth(inputs, k_order=bad)
    a = inputs.weights.wo_a
    with pytest.raises(ValueError, match="order='odd' must be one of"):
        bounds.apriori_bound(get_arch("sm90"), a.weight, a.weight_scale_inv, a.weight, a.weight_scale_inv, order="odd")  # type: ignore[arg-type]
