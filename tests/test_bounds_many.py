"""Every bound against exact arithmetic on many sums: none exceeds it, and each comes near enough to mean something.

The session ``independent`` sets OPROJ_INDEPENDENT_SUMS to a million sums of every architecture row; this file alone
takes far fewer. Largest margins go to the log (``pytest -rP``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bound_problems import E4M3_VALUES, FAMILIES, Problem, indices, one_step, problem, quantize, unit_scales
from conformance import bounds
from conformance.operands import gemm_operands
from conformance.running_bound import running_bound
from exact_sums import UNIT, exact_values, units
from oproj.arch import ARCHS, get_arch
from oproj.rope import ROPES, cos_sin_rows, inverse_frequencies

SUMS = int(os.environ.get("OPROJ_INDEPENDENT_SUMS", "16384"))
SHAPES = ((16, 2, 64, 128), (16, 2, 64, 256), (8, 2, 128, 512))  # 2048 sums each
SCALES = ("powers", "general", "tiny")


def many(arch: str) -> Iterator[Problem]:
    for i in range(-(-SUMS // 2048)):
        scales, shape = SCALES[i // len(FAMILIES) % 3], SHAPES[i // (3 * len(FAMILIES)) % 3]
        yield problem(arch, FAMILIES[i % len(FAMILIES)], scales, 1000 + i, shape)


def results(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 and BF16 results of the chain; that it is the scalar specification's is shown in ``test_bounds``."""
    arch = get_arch(p.arch)
    run = running_bound(arch, gemm_operands(arch, *p.arguments[1:], p.gran_k))
    fp32 = torch.from_numpy(run.result)
    return fp32, fp32.float().bfloat16()


def margin(error: np.ndarray, limit: torch.Tensor) -> float:
    """Largest error over bound; an error above its bound, by integers, is a failure at once."""
    held = units(limit.numpy())
    over = error > held
    assert not over.any(), f"{int(over.sum())} of {over.size} errors exceed their bound"
    return float(max((int(e) / int(h) for e, h in zip(error.ravel(), held.ravel(), strict=True) if e), default=0.0))


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_no_sum_of_a_row_exceeds_any_of_its_bounds(arch: str) -> None:
    largest, sums = dict.fromkeys(("running", "running to bf16", "apriori", "apriori to bf16"), 0.0), 0
    for p in many(arch):
        want, (fp32, bf16) = exact_values(p), results(p)
        kept, stored = abs(units(fp32.numpy()) - want), abs(units(bf16.double().numpy()) - want)
        for name, error, limit in (
            ("running", kept, bounds.grouped_gemm_bound(*p.arguments, output="fp32", gran_k=p.gran_k)),
            ("running to bf16", stored, bounds.grouped_gemm_bound(*p.arguments, z_hat=bf16, gran_k=p.gran_k)),
            ("apriori", kept, bounds.apriori_bound(*p.arguments, output="fp32", gran_k=p.gran_k)),
            ("apriori to bf16", stored, bounds.apriori_bound(*p.arguments, gran_k=p.gran_k)),
        ):
            largest[name] = max(largest[name], margin(error, limit))
        sums += want.size
    print(f"{arch}: {sums} sums, 0 violations, largest margins { ({k: round(v, 3) for k, v in largest.items()}) }")
    assert largest["running"] >= 0.3 and largest["running to bf16"] >= 0.3


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_exact_values_are_those_of_the_scalar_chain(arch: str) -> None:
    for scales in SCALES:
        p = problem(arch, "any", scales, 5, (2, 2, 3, 512))
        want = exact_values(p)
        for at in indices(p):
            assert p.output(*at).exact * 2**UNIT == want[at]


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_apriori_bound_is_nearly_reached_in_the_last_step_of_a_chain(arch: str) -> None:
    """256^2, and 31 products that just fall below its last aligned bit: 31 * 7.03/8 of 33 (SM90) or 36 units."""
    a, w = (0x3F, 0x47) if arch == "sm90" else (0x17, 0x0F)  # 1.875 * 3.75, or 1.875*2^-5 * 1.875*2^-6
    p = one_step(arch, {96: 0x78, **dict.fromkeys(range(97, 128), a)}, {96: 0x78, **dict.fromkeys(range(97, 128), w)})
    fp32, _ = results(p)
    error = abs(units(fp32.numpy()) - exact_values(p))
    assert 0.7 < margin(error, bounds.apriori_bound(*p.arguments, output="fp32", gran_k=p.gran_k)) <= 1


def test_no_rotation_of_many_exceeds_its_bound() -> None:
    rng, largest = np.random.default_rng(11), {"mul_mul_add": 0.0, "fma_cos": 0.0}
    for _ in range(-(-SUMS // 65536)):
        x = torch.from_numpy(rng.standard_normal((65536, 2)) * np.exp2(rng.integers(-20, 20, (65536, 2)))).bfloat16()
        angle = rng.uniform(0, 7, (65536, 1))
        c, s, x64 = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), x.double().numpy()
        p, q = x64[:, :1] * c.astype(np.float64), x64[:, 1:] * s.astype(np.float64)  # exact: 8 + 24 bits
        rounded = q.astype(np.float32).astype(np.float64)
        want = units(p) + units(q)
        fused = torch.from_numpy(p).numpy() + rounded  # float64: off by 2^-53, never by a whole rounding
        for name, got in (("mul_mul_add", p.astype(np.float32) + q.astype(np.float32)), ("fma_cos", fused)):
            limit = bounds.inverse_rope_bound(x, c, s, name)[:, :1]  # type: ignore[arg-type]
            error = abs(units(got.astype(np.float32).astype(np.float64)) - want)
            largest[name] = max(largest[name], margin(error, limit))
    print(f"rotation: largest margins {largest}")
    assert min(largest.values()) >= 0.3


def test_no_quantised_value_of_many_exceeds_its_bound() -> None:
    rng, largest = np.random.default_rng(12), 0.0
    for i in range(-(-SUMS // 65536)):
        y = (rng.standard_normal((512, 128)) * np.exp2(rng.integers(-12, 1, (512, 128)))).astype(np.float32)
        scale = np.abs(y).max(-1, keepdims=True) / np.float32(448)
        scale = (np.exp2(np.ceil(np.log2(scale))) if i % 2 == 0 else scale).astype(np.float64)
        wide = np.repeat(scale, 128, -1)
        error = abs(units(quantize(y.astype(np.float64), wide)) - units(y.astype(np.float64)))
        largest = max(largest, margin(error, bounds.quantize_bound(torch.from_numpy(y), scale)))
    assert largest >= 0.9


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_no_reduction_of_many_exceeds_its_bound(kind: str) -> None:
    rng, largest = np.random.default_rng(13), 0.0
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    for i in range(-(-SUMS // 65536)):
        n = 2 + i % 7
        y = rng.standard_normal((n, 65536)) + (3 if i % 2 else 0)
        partials = torch.from_numpy(y).bfloat16()
        total = partials[0].to(dtype)
        for partial in partials[1:]:
            total = total + partial.to(dtype)
        limit = bounds.tp_reduction_bound(partials, kind)  # type: ignore[arg-type]
        want = units(y).sum(0)
        largest = max(largest, margin(abs(units(total.bfloat16().double().numpy()) - want), limit))
    assert largest >= 0.3


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_no_entry_of_the_table_exceeds_its_bound(kind: str) -> None:
    """The tables of this project round the angle in FP32 and the function once; cos of the unrounded angle is 48 bits
    into a float64 cosine."""
    rng = np.random.default_rng(14)
    positions, frequencies = rng.integers(0, 1 << 20, max(512, SUMS // 64)), inverse_frequencies(kind)
    angle = np.multiply.outer(positions.astype(np.float64), frequencies.astype(np.float64))
    table = cos_sin_rows(kind, positions).astype(np.float64)
    once = np.concatenate([np.cos(angle), np.sin(angle)], 1)
    for got, how in ((table, "fp32"), (once.astype(np.float32).astype(np.float64), "exact")):
        limit = np.tile(bounds.table_bound(positions, frequencies, angle=how).numpy(), 2)  # type: ignore[arg-type]
        margins = np.abs(got - once) / limit
        assert 0.9 < margins.max() <= 1
    drift = np.abs(table - once)[:, 1]  # the fastest pair whose angle is rounded at all
    assert drift.max() > 100 * float(bounds.table_bound([0], frequencies)[0, 1])


def test_table_bound_covers_the_rounded_frequencies_of_plain_rope() -> None:
    positions = np.random.default_rng(15).integers(0, 1 << 20, 512)
    ideal = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    angle = np.multiply.outer(positions.astype(np.longdouble), ideal.astype(np.longdouble))
    error = np.abs(cos_sin_rows("plain", positions)[:, :32] - np.cos(angle)).astype(np.float64)
    limit = bounds.table_bound(positions, inverse_frequencies("plain"), roundings=2).numpy()
    assert 0.3 < (error / limit).max() <= 1
    assert np.any(error > bounds.table_bound(positions, inverse_frequencies("plain")).numpy())


def test_table_bound_refuses_outside_its_hypothesis() -> None:
    one = np.ones(1, np.float32)
    for positions, frequencies, message in (
        ([2**24 + 1], one, r"positions\[0\] = 16777217.0 is no integer in 0..2\^24"),
        ([-1], one, "positions"),
        ([0.5], one, "positions"),
        ([1], [0.0], r"frequencies\[0\] = 0.0 is not in \(0, 1\]"),
        ([1], [np.nan], "frequencies"),
    ):
        with pytest.raises(bounds.NotApplicable, match=message):
            bounds.table_bound(positions, frequencies)
    for bad in ({"angle": "fp64"}, {"ulps": 0.25}, {"roundings": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
            bounds.table_bound([1], one, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_format_bound_of_y_is_reached_when_every_error_points_one_way(arch: str) -> None:
    z = np.full((1, 128), 17.0)  # half way between 16 and 18, to even: 16
    p = unit_scales(arch, np.full((1, 1, 128), 0x58, np.uint8), np.full((1, 1, 128), 0x38, np.uint8))
    flat = (p.a[:, 0], p.a_scales[:, 0], p.w[0], p.w_scales[0])
    gemm = bounds.gemm_bound(arch, *flat, gran_k=p.gran_k)
    limit = bounds.format_bound_y(arch, z, np.zeros_like(z), *flat[1:], gemm, gran_k=p.gran_k)
    assert float(E4M3_VALUES[0x58]) == 16 and 0.85 < 128 / float(limit) <= 1
