"""Every instruction row against PyPI's mmasim, an independent model by the authors of MMA-Sim: no bit differs.

The session ``independent`` compares 2**20 sums a row, this file alone 20,480 (OPROJ_INDEPENDENT_SUMS sets it). NaN and
zero count by their bits as well. Differences known beforehand, one by one: none. Two choices are the same in both and
unmeasured on hardware: an underflow of either sign is +0, and so is a sum of negative zeros; NaN is always 0x7FFFFFFF.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mmasim import nv_ptx

import fused_sums
from fused_sums import Sums
from oproj.arch import (
    MMA,
    MMA_SYNC_F8F6F4,
    MMA_SYNC_MXF8F6F4,
    TCGEN05_BF16,
    TCGEN05_F8F6F4,
    TCGEN05_MXF8F6F4,
    WGMMA_BF16,
    WGMMA_E4M3,
)
from oproj.engines.software import lanes, spec
from test_spec import BF16_VECTORS, MX_VECTORS, VECTORS, codes

SUMS = int(os.environ.get("OPROJ_INDEPENDENT_SUMS", "20480"))
ON_THE_SPECIFICATION = 1500  # sums of each row that go through the scalar specification too

ROWS: dict[str, tuple[MMA, Callable[[], Any]]] = {
    "sm90 wgmma": (WGMMA_E4M3, lambda: nv_ptx.WGMMA("Hopper", "m64n8k32.f32.e4m3.e4m3")),
    "sm90 wgmma bf16": (WGMMA_BF16, lambda: nv_ptx.WGMMA("Hopper", "m64n8k16.f32.bf16.bf16")),
    "sm100 tcgen05": (
        TCGEN05_F8F6F4,
        lambda: nv_ptx.TCGen05MMA("Blackwell", "m64n8k32.kind::f8f6f4.f32.e4m3.e4m3"),
    ),
    "sm100 tcgen05 block-scaled": (
        TCGEN05_MXF8F6F4,
        lambda: nv_ptx.TCGen05MMABlockScale("Blackwell", "m128n8k32.kind::mxf8f6f4.block32.f32.e4m3.e4m3.ue8m0"),
    ),
    "sm100 tcgen05 bf16": (
        TCGEN05_BF16,
        lambda: nv_ptx.TCGen05MMA("Blackwell", "m64n8k16.kind::f16.f32.bf16.bf16"),
    ),
    "sm120 mma.sync": (MMA_SYNC_F8F6F4, lambda: nv_ptx.MMA("RTX Blackwell", "m16n8k32.kind::f8f6f4.f32.e4m3.e4m3.f32")),
    "sm120 mma.sync block-scaled": (
        MMA_SYNC_MXF8F6F4,
        lambda: nv_ptx.MMABlockScale("RTX Blackwell", "m16n8k32.kind::mxf8f6f4.block32.f32.e4m3.e4m3.f32.ue8m0"),
    ),
}
CODES = ("bits", "finite", "normal", "sparse")
ACCUMULATORS = ("zero", "bits", "finite", "near", "subnormal", "special")
SCALES = ("usual", "any", "extreme")
SPECIAL_C = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x80000000], np.uint32)


def draw_codes(rng: np.random.Generator, mma: MMA, family: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of the row's operand format, all of one family."""
    form = spec.FORMATS[mma.operand]
    dtype = np.uint8 if mma.operand == "e4m3" else np.uint16
    codes = rng.integers(0, np.iinfo(dtype).max + 1, shape).astype(dtype)
    if family == "normal":
        return rounded(mma, torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 16))
    if family != "bits":
        sign = 1 << (form.exponent_bits + form.fraction_bits)
        lowest_nan = (sign - 1) if not form.has_infinity else form.largest_field << form.fraction_bits
        codes = np.where((codes & (sign - 1)) >= lowest_nan, codes & sign, codes).astype(dtype)
    return np.where(rng.random(shape) < 0.9, 0, codes).astype(dtype) if family == "sparse" else codes


def rounded(mma: MMA, values: torch.Tensor) -> np.ndarray:
    """Codes of FP32 values in the row's operand format."""
    if mma.operand == "e4m3":
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


def draw_accumulators(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """FP32 bits, families in turn over the columns."""
    bits = rng.integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32)
    near = (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32).view(np.uint32)
    drawn = {
        "zero": np.zeros(shape, np.uint32),
        "bits": bits,
        "finite": np.where(bits >> 23 & 255 == 255, bits ^ 0x40000000, bits),
        "near": near,
        "subnormal": bits & 0x807FFFFF,
        "special": rng.choice(SPECIAL_C, shape),
    }
    which = np.broadcast_to(np.arange(shape[1]) % len(ACCUMULATORS), shape)
    return np.choose(which, [drawn[family] for family in ACCUMULATORS])


def draw_scales(rng: np.random.Generator, mma: MMA, family: str, shape: tuple[int, int]) -> np.ndarray:
    """UE8M0 bytes, 127 where the instruction takes none."""
    if not mma.scales_inside:
        return np.full(shape, 127, np.uint8)
    low, high = {"usual": (118, 137), "any": (0, 256), "extreme": (0, 256)}[family]
    drawn = rng.integers(low, high, shape, dtype=np.uint8)
    return rng.choice(np.array([0, 1, 60, 127, 190, 253, 254, 255], np.uint8), shape) if family == "extreme" else drawn


def draw(rng: np.random.Generator, mma: MMA, rows: int, family: str, scales: str) -> Sums:
    """``rows`` times ``lanes.WIDTH`` sums."""
    width = lanes.WIDTH
    return Sums(
        draw_codes(rng, mma, family, (rows, mma.k)),
        draw_codes(rng, mma, family, (rows, mma.k, width)),
        draw_accumulators(rng, (rows, width)),
        draw_scales(rng, mma, scales, (rows, 1)),
        draw_scales(rng, mma, scales, (rows, width)),
    )


def theirs(instruction: Any, mma: MMA, sums: Sums) -> np.ndarray:
    """FP32 bits of mmasim, [rows, WIDTH]."""
    dtype = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}[mma.operand]
    a = torch.from_numpy(sums.a)[:, None].view(dtype)  # one row of codes beside WIDTH columns
    b = torch.from_numpy(sums.b).transpose(1, 2).contiguous().view(dtype)
    c = torch.from_numpy(np.ascontiguousarray(sums.c).view(np.float32))
    scales = ()
    if mma.scales_inside:
        bytes_a = np.broadcast_to(sums.scale_a, sums.scale_b.shape)
        scales = tuple(
            torch.from_numpy(np.ascontiguousarray(s))[..., None].view(torch.float8_e8m0fnu)
            for s in (bytes_a, sums.scale_b)
        )
    return instruction.dpa(a, b, c, *scales).numpy().view(np.uint32)


def ours(mma: MMA, sums: Sums) -> np.ndarray:
    """The engine's kernel; BF16 rows have none and go by 64-bit integers."""
    return fused_sums.by_lanes(mma, sums) if mma.operand == "e4m3" else fused_sums.by_integers(mma, sums)


def batches(name: str, total: int) -> Any:
    """Batches of all families, ``total`` sums or a few more."""
    mma = ROWS[name][0]
    families = [(family, scales) for family in CODES for scales in (SCALES if mma.scales_inside else SCALES[:1])]
    rng = np.random.default_rng(sum(name.encode()))
    rows = -(-total // (2 * lanes.WIDTH * len(families)))  # each batch is used twice: drawn C, then chained C
    for family, scales in families:
        for start in range(0, rows, 256):
            yield draw(rng, mma, min(256, rows - start), family, scales), rng, family, scales


def chained(rng: np.random.Generator, mma: MMA, before: np.ndarray, family: str, scales: str) -> Sums:
    """New codes on top of the results of earlier sums."""
    fresh = draw(rng, mma, len(before), family, scales)
    return Sums(fresh.a, fresh.b, before, fresh.scale_a, fresh.scale_b)


def assert_same(name: str, sums: Sums, left: np.ndarray, right: np.ndarray) -> None:
    where = np.argwhere(left != right)
    if len(where):
        row, lane = where[0]
        first = f"ours {left[row, lane]:#010x}, mmasim {right[row, lane]:#010x}"
        raise AssertionError(f"{name}: {len(where)} of {left.size} sums differ; first {sums.one(row, lane)}: {first}")


@pytest.mark.parametrize("name", ROWS)
def test_no_bit_differs_from_mmasim(name):
    mma, make = ROWS[name]
    instruction, compared = make(), 0
    for sums, rng, family, scales in batches(name, SUMS):
        result = ours(mma, sums)
        assert_same(name, sums, result, theirs(instruction, mma, sums))
        again = chained(rng, mma, result, family, scales)
        assert_same(name, again, ours(mma, again), theirs(instruction, mma, again))
        compared += 2 * result.size
    assert compared >= SUMS


def directed(mma: MMA) -> dict[str, tuple[list[int], list[int], int, int, int, int]]:
    """The directed vectors of a row: codes a and b, C bits, bytes a and b, expected bits."""
    if mma.operand == "bf16":
        return {name: (a, b, c, 127, 127, bits) for name, (a, b, c, bits) in BF16_VECTORS.items()}
    column = 3 if mma is WGMMA_E4M3 else 4
    plain = {
        name: (codes(v[0]), codes(v[1]), spec.float_bits(float(v[2])), 127, 127, v[column])
        for name, v in VECTORS.items()
    }
    if mma.scales_inside:
        plain |= {name: (codes(a), codes(b), *rest) for name, (a, b, *rest) in MX_VECTORS.items()}
    return plain


@pytest.mark.parametrize("name", ROWS)
def test_the_directed_vectors_are_mmasim_s_too(name):
    mma, make = ROWS[name]
    vectors, dtype = directed(mma), np.uint8 if mma.operand == "e4m3" else np.uint16
    pad = [[row + [0] * (mma.k - len(row)) for row in vector[:2]] for vector in vectors.values()]
    a, b = (np.array([pair[side] for pair in pad], dtype) for side in (0, 1))
    c, byte_a, byte_b, expected = (np.array([v[i] for v in vectors.values()], np.int64) for i in range(2, 6))
    spread = [np.repeat(x[:, None], lanes.WIDTH, axis=1) for x in (c.astype(np.uint32), byte_b.astype(np.uint8))]
    b = np.repeat(b[:, :, None], lanes.WIDTH, axis=2)
    sums = Sums(a, b, spread[0], byte_a.astype(np.uint8)[:, None], spread[1])
    want = np.repeat(expected.astype(np.uint32)[:, None], lanes.WIDTH, axis=1)
    assert_same(name, sums, want, theirs(make(), mma, sums))
    assert_same(name, sums, ours(mma, sums), want)


@pytest.mark.parametrize("name", ROWS)
def test_the_scalar_specification_is_part_of_it(name):
    """A sample of the same sums, spread over families and columns, through the specification."""
    mma = ROWS[name][0]
    rng, drawn = np.random.default_rng(7), list(batches(name, 20_480))
    for sums, *_ in drawn:
        result = ours(mma, sums)
        for index in rng.integers(0, result.size, ON_THE_SPECIFICATION // len(drawn)):
            row, lane = divmod(int(index), lanes.WIDTH)
            a, b, c, byte_a, byte_b = sums.one(row, lane)
            assert spec.fdpa(a, b, c, mma, byte_a, byte_b) == result[row, lane]


@pytest.mark.parametrize("name", ROWS)
def test_the_sums_reach_what_they_are_meant_to_reach(name):
    """NaN, infinities of both signs, zeros, subnormals and ordinary numbers all occur among the results."""
    results = np.concatenate([ours(ROWS[name][0], sums).ravel() for sums, *_ in batches(name, 20_480)])
    field, fraction = results >> 23 & 255, results & 0x7FFFFF
    seen = {
        "nan": results == spec.NAN_BITS,
        "inf": results == 0x7F800000,
        "-inf": results == 0xFF800000,
        "zero": results == 0,
        "subnormal": (field == 0) & (fraction != 0),
        "normal": (field > 0) & (field < 255),
    }
    assert {kind for kind, hits in seen.items() if hits.any()} == seen.keys()
    assert seen["normal"].mean() > 0.2
    assert not (results == 0x80000000).any()
