"""The fused quantiser bit for bit: against a scalar model in exact fractions, and against stated bits."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scalar_quantizer as scalar
from oproj.engines.software import SoftwareEngine
from oproj.quantize import fused_inv_rope_fp8_quant
from quantizer_calls import Call, bf16, bits_of, call, codes_of, exponent_bytes, model, random_call, table_of

NAN, INF, MINUS_ZERO, MAX = 0x7FC0, 0x7F80, 0x8000, 0x43E0  # BF16 bits; MAX is 448
SPECIAL = [0, MINUS_ZERO, 1, 0x8001, 0x7F, 0x80, 0x2EDB, 0x2EDC, 0x3F80, MAX, 0xC3E1, 0x7F7F, INF, 0xFF80, NAN, 0xFF81]
EXPONENTS = [-140, -133, -126, -60, -48, -42, -33, -20, -9, -1, 0, 1, 9, 31, 60, 118, 126]
VARIANTS = ["fma_cos", "mul_mul_add"]


def assert_same_as_model(args: Call, variant: str) -> None:
    """Equal codes and scale bytes, in FP32 and in packed scales."""
    _, codes, scale_bytes = model(args, variant)
    packable = (args["nope_dim"] + args["rope_dim"]) // args["quant_group_size"] % 4 == 0
    for packed in (False, True) if packable else (False,):
        engine = SoftwareEngine("sm100" if packed else "sm90")
        data, scale = engine.inv_rope_fp8_quant(**args, tma_aligned_scales=packed, variant=variant)
        assert scale.dtype == (torch.int32 if packed else torch.float32)
        assert np.array_equal(exponent_bytes(scale), scale_bytes)
        assert np.array_equal(codes_of(data), codes)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Heads of blocks with drawn magnitudes and planted special values; rows of a table on the unit circle."""
    nope, rope, block = draw(st.sampled_from([(64, 64, 32), (64, 64, 64), (64, 64, 128), (30, 2, 32), (0, 128, 32)]))
    groups, per_group, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rng = np.random.Generator(np.random.Philox(draw(st.integers(0, 2**32 - 1))))
    shape = (tokens, groups * per_group, nope + rope)
    exponents = draw(st.lists(st.sampled_from(EXPONENTS), min_size=1, max_size=5))
    spread = 2.0 ** np.resize(exponents, (*shape[:2], shape[2] // 16)).repeat(16, axis=2)
    o = bits_of(torch.from_numpy(rng.standard_normal(shape) * spread).bfloat16()).copy()
    for index, special in draw(st.lists(st.tuples(st.integers(0, o.size - 1), st.sampled_from(SPECIAL)), max_size=6)):
        o.flat[index] = special
    angles = rng.uniform(-4, 4, (5, rope // 2)) * rng.integers(0, 2, (5, 1))  # some rows do not rotate
    positions = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=tokens, max_size=tokens)))
    sizes = {"n_groups": groups, "heads_per_group": per_group, "quant_group_size": block}
    return call(bf16(o), table_of(angles), positions=positions, **sizes)


@settings(max_examples=150)
@given(args=calls(), variant=st.sampled_from(VARIANTS))
def test_codes_and_scales_are_those_of_the_scalar_model(args: Call, variant: str) -> None:
    assert_same_as_model(args, variant)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("variant", VARIANTS)
def test_production_heads_of_512(block: int, variant: str) -> None:
    assert_same_as_model(random_call(2, quant_group_size=block), variant)


def assert_bf16_mode_as_model(args: Call, variant: str) -> None:
    """One rounding of the rotated value; NaN stays NaN and Inf stays Inf."""
    values, _, _ = model(args, variant)
    rounded = [v if v == 0 or not math.isfinite(v) else scalar.narrow(Fraction(v), 7) for v in values.flat]
    expected = torch.tensor(rounded, dtype=torch.float64).view(values.shape).bfloat16()
    found, scale = SoftwareEngine("sm90").inv_rope_fp8_quant(**args, quantize=False, variant=variant)
    assert found.dtype == torch.bfloat16 and scale.shape == (0,)
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert np.array_equal(bits_of(found)[~nan.numpy()], bits_of(expected)[~nan.numpy()])


@settings(max_examples=60)
@given(args=calls(), variant=st.sampled_from(VARIANTS))
def test_bf16_mode_rounds_the_rotated_value_once_and_keeps_nan_and_inf(args: Call, variant: str) -> None:
    assert_bf16_mode_as_model(args, variant)


def cancelling_call() -> Call:
    """Pairs that the rotation nearly cancels, even lanes in the first tokens and odd ones in the last.

    Rounding errors are all that is left, so it shows which product was fused.
    """
    pairs = torch.from_numpy(np.random.default_rng(1).standard_normal((16, 1, 32, 2))).bfloat16()
    even, odd = pairs[:, 0].double().unbind(-1)
    angles = torch.cat([torch.atan2(-even, odd)[:8], torch.atan2(odd, even)[8:]])
    return call(pairs.flatten(2), table_of(angles.numpy()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_pairs_that_cancel_show_which_product_is_fused(variant: str) -> None:
    assert_bf16_mode_as_model(cancelling_call(), variant)


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("variant, code", [("fma_cos", 0x39), ("mul_mul_add", 0x38)])
def test_the_fused_product_decides_a_code_next_to_a_tie(lane: int, variant: str, code: int) -> None:
    """1.0625, half-way between two codes, is passed by the exact 1.25 * c + d only: rn(1.25 * c) is the tie itself."""
    c, d = 14260634 * 2.0**-24, 3 * 2.0**-26
    o = torch.full((1, 1, 32), 448.0, dtype=torch.bfloat16)  # scale 1
    o[0, 0, 30 + lane], o[0, 0, 31 - lane] = 1.25, 1.0
    args = call(o, torch.tensor([[c, d if lane == 0 else -d]]))
    data, _ = SoftwareEngine("sm90").inv_rope_fp8_quant(**args, variant=variant)
    assert codes_of(data)[0, 0, 30 + lane] == code
    assert_same_as_model(args, variant)


def test_the_variants_differ_where_pairs_cancel_and_the_fused_one_is_served() -> None:
    args, engine = cancelling_call(), SoftwareEngine("sm90")
    fused, separate = (engine.inv_rope_fp8_quant(**args, quantize=False, variant=v)[0] for v in VARIANTS)
    default, _ = fused_inv_rope_fp8_quant(**args, quantize=False)
    assert torch.equal(default, fused)
    for half in (slice(0, 8), slice(8, 16)):
        assert not torch.equal(fused[half], separate[half])


# Stated bits of un-rotated blocks -----------------------------------------------------------------------------------


def quantize_blocks(bits: np.ndarray | list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n, 32] and bytes [n] of un-rotated blocks of BF16 bits [n, 32]; the one rotated pair stands apart."""
    o = np.zeros((len(bits), 1, 64), np.uint16)
    o[:, 0, :32] = bits
    positions = torch.zeros(len(bits), dtype=torch.int64)
    data, scale = fused_inv_rope_fp8_quant(**call(bf16(o), table_of(np.zeros((1, 1))), positions=positions))
    return codes_of(data)[:, 0, :32], exponent_bytes(scale)[:, 0, 0]


def test_a_zero_block_has_byte_85_and_keeps_the_sign_of_zero() -> None:
    args = call(bf16([[[0, MINUS_ZERO] * 63 + [MINUS_ZERO, 0]]]), table_of(np.zeros((1, 1))))
    data, words = fused_inv_rope_fp8_quant(**args, tma_aligned_scales=True)
    assert words.tolist() == [[[0x55555555]]]
    assert codes_of(data).flatten().tolist() == [0x00, 0x80] * 63 + [0x00, 0x00]  # the rotation adds +0 to -0
    _, scale = fused_inv_rope_fp8_quant(**args)
    assert scale.tolist() == [[[2.0**-42] * 4]]


def test_all_bf16_values_up_to_448_are_rounded_to_the_nearest_even_code() -> None:
    """Scale 1 by one 448 in each block; with the test of all maxima below this covers all 65,536 inputs."""
    magnitudes = np.arange(MAX + 1, dtype=np.uint16)
    nans = np.arange(INF + 1, 0x8000, dtype=np.uint16)
    inputs = np.concatenate([magnitudes, nans, magnitudes | 0x8000, nans | 0x8000])
    blocks = np.full((-(-len(inputs) // 31), 32), MAX, np.uint16)
    blocks[:, 1:].flat[: len(inputs)] = inputs
    codes, scale_bytes = quantize_blocks(blocks)
    assert (scale_bytes == 127).all() and (codes[:, 0] == 0x7E).all()
    expected = [
        0x7E if math.isnan(v) else scalar.e4m3_code(Fraction(v), bits > 0x7FFF)
        for bits, v in ((bits, scalar.bf16_value(bits)) for bits in inputs.tolist())
    ]
    assert codes[:, 1:].flatten()[: len(inputs)].tolist() == expected


def test_all_bf16_maxima_get_the_smallest_scale_that_holds_them() -> None:
    """No BF16 maximum lies in the band of the log2 rule, so the exact rule decides every one."""
    exact = scalar.FUSED._replace(scale="ceil")
    maxima = np.arange(INF, dtype=np.uint16)
    expected = [scalar.quantize_block([scalar.bf16_value(bits)], exact) for bits in maxima.tolist()]
    for sign in (0, 0x8000):
        blocks = np.zeros((len(maxima), 32), np.uint16)
        blocks[:, 5] = maxima | sign
        codes, scale_bytes = quantize_blocks(blocks)
        assert scale_bytes.tolist() == [byte for _, byte in expected]
        assert codes[:, 5].tolist() == [code | sign >> 8 for (code,), _ in expected]


@pytest.mark.parametrize("nan", [0x7F81, NAN, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF])
def test_nan_becomes_448_and_takes_no_part_in_the_maximum(nan: int) -> None:
    codes, scale_bytes = quantize_blocks([[0x3F80] * 31 + [nan], [nan] * 32, [0x3F80] * 32])
    assert scale_bytes.tolist() == [119, 85, 119]  # 2^-8 holds a maximum of 1
    assert codes.tolist() == [[0x78] * 31 + [0x7E], [0x7E] * 32, [0x78] * 32]


@pytest.mark.parametrize("infinity", [INF, INF | 0x8000])
def test_an_infinite_maximum_has_an_infinite_scale_and_leaves_zeros(infinity: int) -> None:
    block = [infinity, 0x3F80, 0xC000, 0, MINUS_ZERO, NAN, 0x7F7F, 0xFF7F, *[0x3F80] * 24]
    codes, scale_bytes = quantize_blocks([block, [0x3F80] * 32])
    assert scale_bytes.tolist() == [255, 119]
    assert codes[0].tolist() == [0x7E, 0x00, 0x80, 0x00, 0x80, 0x7E, 0x00, 0x80, *[0x00] * 24]
    o = bf16([[[*block, *[0x3F80] * 96]]])
    _, scale = fused_inv_rope_fp8_quant(**call(o, table_of(np.zeros((1, 1)))))
    assert scale.tolist() == [[[math.inf, 2.0**-8, 2.0**-8, 2.0**-8]]]
    _, words = fused_inv_rope_fp8_quant(**call(o, table_of(np.zeros((1, 1)))), tma_aligned_scales=True)
    assert words.tolist() == [[[0x777777FF]]]


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("quantize", [False, True])
def test_nan_in_one_rotated_lane_spoils_its_pair_alone(lane: int, quantize: bool) -> None:
    o = np.full((1, 1, 64), 0x3F80, np.uint16)
    o[0, 0, 40 + lane] = NAN
    args = call(bf16(o), table_of(np.full((1, 16), 0.5)))
    values, _ = fused_inv_rope_fp8_quant(**args, quantize=quantize)
    spoilt = codes_of(values)[0, 0] == 0x7E if quantize else values[0, 0].isnan().numpy()
    assert np.flatnonzero(spoilt).tolist() == [40, 41]


# Any FP32 value, through the table ----------------------------------------------------------------------------------


def quantize_fp32(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n, 16] and bytes [n] of blocks that hold FP32 values [n, 16] beside 16 zeros.

    An even lane is a power of two and its cosine the rest of the value: the product is exact, and a sine of -0 keeps
    the sign of a zero.
    """
    mantissas, exponents = np.frexp(values.astype(np.float64))
    powers = np.clip(exponents, -126, 127)
    o = np.zeros((*values.shape, 2))
    o[..., 0] = 2.0**powers
    table = np.concatenate([np.ldexp(mantissas, exponents - powers), np.full_like(values, -0.0)], axis=1)
    args = call(torch.from_numpy(o.reshape(-1, 1, 32)).bfloat16(), torch.from_numpy(table.astype(np.float32)))
    data, scale = fused_inv_rope_fp8_quant(**args)
    return codes_of(data)[:, 0, ::2], exponent_bytes(scale)[:, 0, 0]


def test_codes_change_at_the_midpoint_and_a_tie_goes_to_the_even_code() -> None:
    values = np.array([scalar_value(code) for code in range(127)])
    ties = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    for sign, signed in ((1, 0), (-1, 0x80)):
        for step, expected in ((-1, np.arange(126)), (0, (np.arange(126) + 1) // 2 * 2), (1, np.arange(1, 127))):
            near = np.nextafter(ties, np.float32(step * np.inf)) if step else ties
            block = np.full((126, 16), 448, np.float32)
            block[:, 3] = sign * near
            codes, scale_bytes = quantize_fp32(block)
            assert (scale_bytes == 127).all()
            assert np.array_equal(codes[:, 3], expected | signed)


def scalar_value(code: int) -> float:
    """An e4m3 code from 0 to 126, bias 7 and three mantissa bits."""
    exponent, mantissa = code >> 3, code & 7
    return math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)


@given(values=st.lists(st.floats(-448, 448, width=32), min_size=15, max_size=15))
def test_any_fp32_value_is_rounded_to_the_nearest_even_code(values: list[float]) -> None:
    codes, scale_bytes = quantize_fp32(np.array([[448.0, *values]], np.float32))
    assert scale_bytes.tolist() == [127]
    assert codes[0, 1:].tolist() == [scalar.e4m3_code(Fraction(v), math.copysign(1, v) < 0) for v in values]


@pytest.mark.parametrize("low, high, band", scalar.LOG2_BANDS)
def test_maxima_just_above_a_power_of_two_times_448_keep_the_lower_scale(low: int, high: int, band: int) -> None:
    """The log2 rule: within the band the scale stays 2^k and the maximum is clamped, one ulp further it is 2^(k+1)."""
    inner = [(a, b) for a, b, n in scalar.LOG2_BANDS if n < band]
    for k in range(max(low, -42), min(high, 118) + 1):
        if any(a <= k <= b for a, b in inner):
            continue
        ulps = np.array([-2, -1, 0, 1, band, band + 1, band + 2, 40])
        maxima = (np.float32(448 * 2.0**k).view(np.int32) + ulps.astype(np.int32)).view(np.float32)
        block = np.zeros((len(ulps), 16), np.float32)
        block[:, 7] = maxima
        codes, scale_bytes = quantize_fp32(block)
        assert scale_bytes.tolist() == [k + 127 + (n > band) for n in ulps.tolist()]
        assert codes[:, 7].tolist() == [0x76 if n > band else 0x7E for n in ulps.tolist()]


@given(
    k=st.integers(-42, 117),
    ulps=st.lists(st.integers(-3, 45), min_size=1, max_size=4),
    rest=st.lists(st.floats(-1, 1, width=16), min_size=2, max_size=2),
)
def test_blocks_around_the_band_of_the_log2_rule(k: int, ulps: list[int], rest: list[float]) -> None:
    maxima = [struct.unpack("<f", struct.pack("<i", np.float32(448 * 2.0**k).view(np.int32) + n))[0] for n in ulps]
    block = np.array([[m, *(v * 448 * 2.0**k for v in rest * 7), -m / 2] for m in maxima], np.float32)
    codes, scale_bytes = quantize_fp32(block)
    expected = [scalar.quantize_block(row, scalar.FUSED) for row in block.tolist()]
    assert scale_bytes.tolist() == [byte for _, byte in expected]
    assert codes.tolist() == [row for row, _ in expected]
