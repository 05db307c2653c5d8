"""The scalar tensor core: every directed vector, the exact rules behind them, and what a wrong fact would change."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oproj.arch import (
    SM90,
    SM100,
    TCGEN05_BF16,
    TCGEN05_F8F6F4,
    TCGEN05_MXF8F6F4,
    WGMMA_BF16,
    WGMMA_E4M3,
)
from oproj.engines.software import spec

E4M3 = {float(v): code for code, v in enumerate(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float())}


def codes(values):
    """e4m3 codes of values that e4m3 holds."""
    return [E4M3[float(v)] for v in values]


def p2(exponent):
    return 2.0**exponent


# name: a, b, C, FP32 bits on SM90, FP32 bits on SM100 (plain kind::f8f6f4)
VECTORS = {
    "small sums are exact": ([448, 7.5], [1, 1], 0, 0x43E3C000, 0x43E3C000),
    "alignment drops bits": ([256, p2(-6)], [1, 1], 0, 0x43800000, 0x43800200),
    "toward zero, not floor": ([256, -p2(-6)], [1, 1], 0, 0x43800000, 0x437FFC00),
    "C absorbs a product": ([p2(-6)], [1], 256, 0x43800000, 0x43800200),
    "a product absorbs C": ([256], [1], p2(-6), 0x43800000, 0x43800200),
    "C alone is cut to 13 bits": ([0], [0], 1 + p2(-13) + p2(-14), 0x3F800400, 0x3F800600),
    "C alone is cut, negative": ([0], [0], -1 - p2(-13) - p2(-14), 0xBF800400, 0xBF800600),
    "C cut beside a product": ([1], [p2(-9)], 1 + p2(-14), 0x3F804000, 0x3F804200),
    "no guard bit survives cancellation": ([256, -256, p2(-6)], [1, 1, 1], 0, 0x00000000, 0x3C800000),
    "13-bit edge kept": ([1, 1, p2(-6)], [1, -1, p2(-7)], 0, 0x39000000, 0x39000000),
    "13-bit edge lost": ([1, 1, p2(-6)], [1, -1, p2(-8)], 0, 0x00000000, 0x38800000),
    "13 bits toward zero, negative": ([1, 1, -3 * p2(-7)], [1, -1, p2(-7)], 0, 0xB9000000, 0xB9400000),
    "25-bit edge kept": ([448, 448, p2(-9)], [448, -448, 1], 0, 0x00000000, 0x3B000000),
    "25-bit edge lost": ([448, 448, p2(-9)], [448, -448, 0.5], 0, 0x00000000, 0x00000000),
    "25 bits toward zero, positive": ([448, 448, 3 * p2(-9)], [448, -448, 0.5], 0, 0x00000000, 0x3B000000),
    "25 bits toward zero, negative": ([448, 448, 3 * p2(-9)], [448, -448, -0.5], 0, 0x00000000, 0xBB000000),
    "products are not renormalised": (
        [1.875, p2(-6), p2(-6)], [1.875, p2(-7), p2(-7)], 0, 0x40610400, 0x40610400,
    ),
    "a subnormal factor keeps e = -6": ([p2(-9)], [1], p2(-21), 0x3B000000, 0x3B000800),
    "output toward zero, not nearest": (
        [1] * 30 + [p2(-5), p2(-6)], [1] * 30 + [p2(-5), p2(-7)], 0, 0x41F00000, 0x41F00240,
    ),
    "32 fused, not 16+16": ([p2(-6)] * 16 + [256], [1] * 17, 0, 0x43800000, 0x43802000),
    "many small terms are all lost": ([16] + [p2(-9)] * 31, [16] + [1] * 31, 0, 0x43800000, 0x438007C0),
    "breaks the naive a-priori bound": (
        [p2(-9)] + [1.875 * p2(-6)] * 31, [256] + [p2(-6)] * 31, 0, 0x3F000000, 0x3F03A200,
    ),
    "zero result": ([1, -1], [1, 1], 0, 0x00000000, 0x00000000),
    "subnormal times subnormal": ([p2(-9)], [p2(-9)], 0, 0x36800000, 0x36800000),
}  # fmt: skip

# name: a, b, C bits, byte a, byte b, FP32 bits on the block-scaled row
MX_VECTORS = {
    "scale byte 0x00 is 2**-127": ([1], [1], 0, 0, 127, 0x00400000),
    "scale byte 0xFF is NaN": ([1], [1], 0, 255, 127, 0x7FFFFFFF),
    "overflow is Inf": ([448], [1], 0, 254, 127, 0x7F800000),
    "negative overflow is -Inf": ([-448], [1], 0, 254, 127, 0xFF800000),
    "scale joins before alignment": ([1] * 31, [1] * 31, 0x3F800000, 114, 114, 0x3F800000),
    "one bit higher": ([1] * 31, [1] * 31, 0x3F800000, 115, 114, 0x3F800007),
    "smallest subnormal kept": ([1], [1], 0, 0, 105, 0x00000001),
    "below the smallest subnormal": ([1], [1], 0, 0, 97, 0x00000000),
    "below the smallest subnormal, negative": ([-1], [1], 0, 0, 97, 0x00000000),
    "subnormal C beside zero products": ([0], [0], 0x00000200, 127, 127, 0x00000200),
    "smallest C beside zero products": ([0], [0], 0x00000001, 127, 127, 0x00000001),
    "a zero takes part with exponent -133, not -132": ([1.25] * 21, [1.25] * 21, 0, 0, 100, 0x00000001),
    "a zero takes part with exponent -133, not -134": ([1.75] * 21, [1.75] * 21, 0, 0, 99, 0x00000000),
}

INF, NAN = 0x7F800000, 0x7FFFFFFF

# name: a, b as BF16 codes, C bits, FP32 bits of one k16 instruction on BF16
BF16_VECTORS = {
    "small sums are exact": ([0x3F80, 0x4000], [0x3F80, 0x3F80], 0, 0x40400000),
    "25 bits, edge kept": ([0x3F80, 0xBF80, 0x3300], [0x3F80, 0x3F80, 0x3F80], 0, 0x33000000),
    "25 bits, edge lost": ([0x3F80, 0xBF80, 0x3280], [0x3F80, 0x3F80, 0x3F80], 0, 0),
    "C joins the sum": ([0x3300] * 15, [0x3F80] * 15, 0x3F800000, 0x3F800003),
    "a subnormal factor keeps e = -126": ([0x0001], [0x7F00], 0x33000000, 0x3C800000),
    "overflow is Inf": ([0x7F00], [0x4000], 0, INF),
    "below the smallest subnormal": ([0x0080], [0x0080], 0, 0),
    "a zero takes part with exponent -133, not -132": ([0x1920] * 15, [0x1960] * 15, 0, 0x00000001),
    "a zero takes part with exponent -133, not -134": ([0x1940] * 15, [0x1938] * 15, 0, 0x00000000),
    "Inf stays": ([0x7F80], [0x3F80], 0, INF),
    "minus Inf by a sign": ([0x7F80], [0xBF80], 0, INF | 1 << 31),
    "Inf times zero": ([0x7F80], [0x0000], 0, NAN),
    "Inf minus Inf": ([0x7F80, 0xFF80], [0x3F80, 0x3F80], 0, NAN),
    "Inf against C": ([0x7F80], [0x3F80], INF | 1 << 31, NAN),
    "NaN beside Inf": ([0xFFC1, 0x7F80], [0x3F80, 0x3F80], 0, NAN),
    "NaN times zero": ([0x7FC0], [0x0000], 0, NAN),
}


@pytest.mark.parametrize("name", VECTORS)
def test_directed_vector(name):
    a, b, c, sm90, sm100 = VECTORS[name]
    bits = spec.float_bits(float(c))
    assert spec.bits_float(bits) == c
    assert spec.fdpa(codes(a), codes(b), bits, WGMMA_E4M3) == sm90
    assert spec.fdpa(codes(a), codes(b), bits, TCGEN05_F8F6F4) == sm100
    assert spec.fdpa(codes(a), codes(b), bits, TCGEN05_MXF8F6F4) == sm100


@pytest.mark.parametrize("name", MX_VECTORS)
def test_directed_vector_with_scales_inside(name):
    a, b, c, byte_a, byte_b, expected = MX_VECTORS[name]
    assert spec.fdpa(codes(a), codes(b), c, TCGEN05_MXF8F6F4, byte_a, byte_b) == expected


@pytest.mark.parametrize("name", BF16_VECTORS)
@pytest.mark.parametrize("mma", [WGMMA_BF16, TCGEN05_BF16])
def test_directed_vector_of_bf16(name, mma):
    a, b, c, expected = BF16_VECTORS[name]
    assert spec.fdpa(a, b, c, mma) == expected


@given(st.integers(0, 2**16 - 1))
def test_decoding_bf16_agrees_with_torch(code):
    value = torch.tensor([code], dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).double().item()
    assert spec.is_nan(code, spec.BF16) == math.isnan(value)
    assert spec.is_infinite(code, spec.BF16) == math.isinf(value)
    if math.isfinite(value):
        m, e = spec.decode(code, spec.BF16)
        assert m * 2.0 ** (e - 7) == value and e >= -126


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("mma", [WGMMA_E4M3, TCGEN05_MXF8F6F4])
def test_a_nan_code_makes_the_canonical_nan(code, mma):
    assert spec.fdpa([code], [0], 0, mma) == spec.NAN_BITS
    assert spec.fdpa([0], [code], 0, mma) == spec.NAN_BITS
    assert spec.fdpa([0], [0], 0x7FC00001, mma) == spec.NAN_BITS


@pytest.mark.parametrize("c", [0x7F800000, 0xFF800000])
def test_an_infinite_accumulator_stays(c):
    assert spec.fdpa([E4M3[1.0]], [E4M3[-448.0]], c, WGMMA_E4M3) == c


def test_rows_that_do_not_fit_the_instruction_are_refused():
    with pytest.raises(ValueError, match="33 and 33 codes"):
        spec.fdpa([0] * 33, [0] * 33, 0, WGMMA_E4M3)
    with pytest.raises(ValueError, match="2 and 1 codes"):
        spec.fdpa([0, 0], [0], 0, WGMMA_E4M3)


finite_codes = st.integers(0, 255).filter(lambda c: c & 0x7F != 0x7F)


@given(st.integers(0, 255))
def test_decoding_agrees_with_torch(code):
    value = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
    if spec.is_nan_e4m3(code):
        assert math.isnan(value)
    else:
        m, e = spec.decode_e4m3(code)
        assert m * 2.0 ** (e - 3) == value


@given(st.lists(st.tuples(finite_codes, finite_codes), min_size=1, max_size=32), st.randoms())
def test_the_order_inside_one_instruction_is_neutral(pairs, random):
    shuffled = list(pairs)
    random.shuffle(shuffled)
    for mma in (WGMMA_E4M3, TCGEN05_F8F6F4):
        one, other = (spec.fdpa([p[0] for p in x], [p[1] for p in x], 0x3F800001, mma) for x in (pairs, shuffled))
        assert one == other


@given(st.lists(st.tuples(finite_codes, finite_codes), min_size=1, max_size=32))
def test_with_unlimited_bits_the_sum_is_exact_up_to_the_output(pairs):
    """Alignment to 60 bits loses nothing, so only the truncation to 23 fraction bits is left."""
    wide = replace(WGMMA_E4M3, frac_bits=60, out_frac_bits=23)
    exact = Fraction(0)
    for a, b in pairs:
        (ma, ea), (mb, eb) = spec.decode_e4m3(a), spec.decode_e4m3(b)
        exact += Fraction(ma * mb) * Fraction(2) ** (ea + eb - 6)
    got = spec.bits_float(spec.fdpa([p[0] for p in pairs], [p[1] for p in pairs], 0, wide))
    if exact == 0:
        assert got == 0 and math.copysign(1, got) == 1
        return
    unit = Fraction(2) ** (math.floor(math.log2(abs(exact))) - 23)
    lost = abs(exact) - abs(Fraction(got))
    assert 0 <= lost < unit and (got == 0 or (got > 0) == (exact > 0))


@given(*[st.integers(0, 2**32 - 1).map(spec.bits_float)] * 3)
def test_fma_rounds_once(x, y, z):
    """float64 holds the product of two FP32 numbers exactly; the sum is checked in rational arithmetic."""
    got = spec.fma_f32(x, y, z)
    if not all(map(math.isfinite, (x, y, z))):
        assert got == x * y + z or (math.isnan(got) and math.isnan(x * y + z))
        return
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if not math.isfinite(got):
        assert abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103
        return
    spacing = Fraction(2) ** max(math.frexp(got)[1] - 24, -149)
    assert abs(Fraction(got) - exact) <= spacing / 2


@given(st.integers(0, 2**32 - 1))
def test_bf16_rounding_agrees_with_torch(bits):
    ours = spec.bf16_bits(bits)
    value = torch.tensor([bits], dtype=torch.int64).to(torch.uint32).view(torch.float32)
    theirs = value.to(torch.bfloat16).view(torch.int16).item() & 0xFFFF
    if math.isnan(value.item()):
        assert ours & 0x7F80 == 0x7F80 and ours & 0x7F
    else:
        assert ours == theirs


def test_the_promotion_of_the_chain_is_fused_and_per_128():
    """One block of 128 with general scales: sum, then one fused multiply-add; two blocks chain through FP32."""
    a, b = codes([1.5] * 256), codes([1.125] * 256)
    scales_a = [spec.bits_float(spec.float_bits(x)) for x in (1.1, 0.7)]
    scales_b = [spec.bits_float(spec.float_bits(x)) for x in (1.3, 1.9)]
    acc = 0
    for _ in range(4):
        acc = spec.fdpa(a[:32], b[:32], acc, WGMMA_E4M3)
    final = 0.0
    for sa, sb in zip(scales_a, scales_b, strict=True):
        s = spec.bits_float(spec.float_bits(sa * sb))
        exact = Fraction(s) * Fraction(spec.bits_float(acc)) + Fraction(final)
        final = spec.bits_float(spec.float_bits(float(exact)))  # float64 holds this sum: 38 bits of close exponents
        assert Fraction(float(exact)) == exact
    assert spec.chain(SM90, a, b, scales_a, scales_b) == spec.float_bits(final)


def test_the_chain_of_sm100_is_one_accumulator():
    a, b = codes([1.5] * 256), codes([1.125] * 256)
    acc = 0
    for i in range(8):
        acc = spec.fdpa(a[:32], b[:32], acc, TCGEN05_MXF8F6F4, 120 + i // 4, 130)
    assert spec.chain(SM100, a, b, [120, 121], [130, 130]) == acc
