"""Every named quantiser: its row of the checklist, all maxima, all codes and bytes, and the scalar model."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scalar_quantizer as scalar
from oproj.engines.software import quant_lanes
from oproj.engines.software.quantizer_table import QUANTIZERS, Quantizer
from oproj.engines.software.quantizers import quantize_matrix
from quantizer_calls import bf16, codes_of, exponent_bytes

INF, NAN = math.inf, math.nan
# Per quantiser: scale of a zero block (byte, or FP32 to four digits), source, then scale and codes of [NaN, 1, -1, -0]
# and of [Inf, 1, -1, -0]; None: the source does not say, so it is refused.
DEEP_GEMM_UE8M0 = (105, "DeepGEMM", (254, [0x7F, 0, 0x80, 0x80]), (254, [0x7E, 0, 0x80, 0x80]))
DEEP_GEMM_FP32 = ("2.232e-07", "DeepGEMM", (NAN, [0x7F] * 4), (INF, [0x7F, 0, 0x80, 0x80]))
LAUNDERED = (119, [0x7E, 0x78, 0xF8, 0x80])
CHECKLIST = {
    "vllm-fused": (85, "fused_inv_rope_fp8_quant.py", LAUNDERED, (255, [0x7E, 0, 0x80, 0x80])),
    "rope-quant": (85, "fmhaReduction.cu", (119, [0xFE, 0x78, 0xF8, 0x80]), None),
    "deep-gemm-token": DEEP_GEMM_UE8M0,
    "deep-gemm-token-fp32": DEEP_GEMM_FP32,
    "deep-gemm-block": DEEP_GEMM_UE8M0,
    "deep-gemm-block-fp32": DEEP_GEMM_FP32,
    "deep-gemm-channel": DEEP_GEMM_UE8M0,
    "deep-gemm-channel-fp32": DEEP_GEMM_FP32,
    "act-quant": (105, "inference/model.py", None, None),
    "vllm-group-packed": (94, "group_quant.cu", (119, [0xFE, 0x78, 0xF8, 0x80]), (255, [0xFE, 0, 0x80, 0x80])),
    "vllm-group-unpacked": (94, "group_quant.cu", (119, [0xFE, 0x78, 0xF8, 0x80]), (255, [0xFE, 0, 0x80, 0x80])),
    "vllm-group-fp32": (
        "2.232e-13",
        "group_quant.cu",
        (scalar.fp32(1 / 448), [0xFE, 0x7E, 0xFE, 0x80]),
        (INF, [0xFE, 0, 0x80, 0x80]),
    ),
    "vllm-triton-group": (85, "fp8_utils", LAUNDERED, (255, [0x7E, 0, 0x80, 0x80])),
    "vllm-triton-group-fp32": (
        "2.232e-13",
        "fp8_utils",
        (scalar.fp32(1 / 448), [0x7E, 0x7E, 0xFE, 0x80]),
        (INF, [0x7E, 0, 0x80, 0x80]),
    ),
    "vllm-v41-wo-a": (85, "V4.1", None, None),
    "vllm-requantize": (105, "fp8_utils", None, None),
}
ROWS = list(CHECKLIST)


def matrix(values: torch.Tensor, row: Quantizer) -> torch.Tensor:
    """``values`` [blocks, b] as a matrix whose blocks, in the row's shape, hold them."""
    block = values.shape[1]
    if row.shape == "channels":
        return values.T.contiguous()
    if row.shape == "tiles":
        values = torch.cat([values, values.new_zeros(len(values), block * block - block)], 1).view(-1, block)
    return values


def quantize(x: torch.Tensor, row: Quantizer, block: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Codes, and bytes or FP32 scales [blocks ...], in each of the row's scale formats."""
    found = []
    for form in row.formats:
        data, scale = quantize_matrix(x, row, group_size=block, packed=form == "packed")
        assert data.shape == x.shape and data.is_contiguous()
        assert scale.dtype == (torch.int32 if form == "packed" else torch.float32)
        found.append((codes_of(data), scale.numpy() if row.fp32_scale else exponent_bytes(scale)))
    return found


def blocks_of(values: list[float], name: str) -> list[tuple[list[int], float]]:
    """The first codes and the scale of one block, in each format; three blocks of ones fill the word."""
    row = QUANTIZERS[name]
    block = min(row.blocks)
    x = torch.zeros((1, block))
    x[0, : len(values)] = torch.tensor(values)
    x = matrix(x.to(getattr(torch, row.inputs[0])), row)
    if row.shape == "rows":
        x = torch.cat([x, torch.ones((1, 3 * block), dtype=x.dtype)], 1)
    results = quantize(x, row, block)
    return [(c.flatten()[: len(values)].tolist(), s.flatten()[0].item()) for c, s in results]


def test_the_table_holds_the_checklist_and_nothing_else() -> None:
    assert set(QUANTIZERS) == set(CHECKLIST) == set(scalar.RULES)
    for name, row in QUANTIZERS.items():
        assert row.name == name and CHECKLIST[name][1] in row.source
        assert row.evidence in ("measured", "published", "assumed")
    assert [name for name, row in QUANTIZERS.items() if row.evidence == "measured"] == ["vllm-fused"]


@pytest.mark.parametrize("name", ROWS)
def test_a_zero_block_has_the_scale_of_the_floor_and_keeps_signs(name: str) -> None:
    stated = CHECKLIST[name][0]
    for codes, scale in blocks_of([0.0, -0.0], name):
        assert codes == [0x00, 0x80]
        assert (f"{scale:.3e}" if QUANTIZERS[name].fp32_scale else scale) == stated


@pytest.mark.parametrize("special, column", [(NAN, 2), (INF, 3)], ids=["nan", "inf"])
@pytest.mark.parametrize("name", ROWS)
def test_a_nan_and_an_inf_have_the_stated_answer_or_are_refused(name: str, special: float, column: int) -> None:
    stated = CHECKLIST[name][column]
    if stated is None:
        with pytest.raises(ValueError, match=f"in 1 blocks, first at .* undefined for {name}"):
            blocks_of([special, 1.0, -1.0, -0.0], name)
        return
    for codes, scale in blocks_of([special, 1.0, -1.0, -0.0], name):
        np.testing.assert_array_equal(scale, stated[0])
        assert codes == stated[1]


def test_large_numbers_beside_an_inf_keep_codes_where_the_scale_is_clamped() -> None:
    """DeepGEMM's scale 2^127 leaves zero codes only below 2^117."""
    for codes, scale in blocks_of([INF, 2.0**127, -(2.0**117), 2.0**116], "deep-gemm-token"):
        assert (codes, scale) == ([0x7E, 0x38, 0x80, 0x00], 254)
    assert blocks_of([INF, 2.0**118], "deep-gemm-token")[0][0] == [0x7E, 0x01]


# All maxima, all codes, all bytes -----------------------------------------------------------------------------------


@cache
def scale_of_maximum(rule: scalar.Rule) -> np.ndarray:
    """Byte or FP32 scale by exact rational arithmetic for each of the 65,536 BF16 patterns alone in a block."""
    of = {bits: scalar.quantize_block([scalar.bf16_value(bits)], rule)[1] for bits in range(0x8000)}
    return np.array([of[bits & 0x7FFF] for bits in range(0x10000)], np.float32)


@pytest.mark.parametrize("name", ROWS)
def test_every_bf16_maximum_gets_its_scale_and_code(name: str) -> None:
    row, rule = QUANTIZERS[name], scalar.RULES[name]
    # Tiles are the same kernel on longer blocks: 65,536 of them as rows.
    row = replace(row, shape="rows") if row.shape == "tiles" else row
    bits = np.arange(0x10000)
    if row.nan_code is None or not row.inf_stated:
        bits = bits[bits & 0x7FFF < 0x7F80]
    bits = bits[: len(bits) // 4 * 4]
    block, dtype = min(row.blocks), getattr(torch, row.inputs[0])
    x = torch.zeros((len(bits), block), dtype=dtype)
    x[:, 5] = bf16(bits).to(dtype)
    expected = scale_of_maximum(rule)[bits]
    if row.shape == "rows":
        x, expected = x.view(-1, 4 * block), expected.reshape(-1, 4)
    x = x.T.contiguous() if row.shape == "channels" else x
    maxima = x[5] if row.shape == "channels" else x[:, 5::block]
    for codes, scales in quantize(x, row, block):
        np.testing.assert_array_equal(scales.reshape(expected.shape), expected)
        found = codes[5] if row.shape == "channels" else codes[:, 5::block]
        finite = np.isfinite(maxima.float().numpy())
        power = scales.reshape(expected.shape).astype(np.float64)
        power = power if row.fp32_scale else 2.0 ** (power - 127)
        with np.errstate(invalid="ignore"):
            quotient = torch.from_numpy((maxima.double().numpy() / power).astype(np.float32)).clamp(-448, 448)
        assert np.array_equal(found[finite], codes_of(quotient.to(torch.float8_e4m3fn))[finite])


def test_all_bf16_inputs_are_encoded_to_the_nearest_code() -> None:
    bits = np.arange(0x10000)
    values = (bits << 16).astype(np.uint32).view(np.float32)
    found = np.array([quant_lanes.encode(v, np.int64(0x5A)) for v in values], np.uint8)
    nan = np.isnan(values)
    assert (found[nan] == 0x5A).all()
    by_torch = codes_of(torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn))
    assert np.array_equal(found[~nan], by_torch[~nan])
    near = [i for i in bits[::7].tolist() if 0x3A00 <= i & 0x7FFF < 0x4400]  # 2^-11 .. 512, every seventh
    exact = [scalar.clamped_code(scalar.Fraction(scalar.bf16_value(i)), i >= 0x8000) for i in near]
    assert found[near].tolist() == exact


@pytest.mark.parametrize("name", [name for name in ROWS if not QUANTIZERS[name].fp32_scale])
def test_all_codes_and_all_scale_bytes_come_back(name: str) -> None:
    """Codes times a scale that they fill quantise to themselves, for every byte from the floor to FP32's end."""
    row = replace(QUANTIZERS[name], shape="rows", blocks=(128,))
    zero = CHECKLIST[name][0]
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = [0x7E, 0xFE]  # 448 instead of NaN
    exact = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().repeat(2)
    for byte in range(zero, 247):  # 448 * 2^120 is beyond FP32
        x = (exact * 2.0 ** (byte - 127)).view(1, 512).to(getattr(torch, row.inputs[0]))
        for found, scales in quantize(x, row, 128):
            assert scales.tolist() == [[byte] * 4]
            assert found.tolist() == [codes.tolist() * 2]
    for byte in range(zero):
        for _, scales in quantize(torch.full((1, 512), 2.0 ** (byte - 119)).to(x.dtype), row, 128):
            assert scales.tolist() == [[zero] * 4]


# Against the scalar model -------------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1e-10, 1e-4, 448.0, 2.0**-126, 2.0**-140, 3.3e38]
EDGES = [scalar.fp32(448 * 2.0**k * (1 + n * 2.0**-22)) for k in (-35, -20, -6, -1, 0, 5, 40) for n in range(-1, 16)]


@st.composite
def inputs(draw: st.DrawFn, row: Quantizer) -> tuple[torch.Tensor, int]:
    block = draw(st.sampled_from(row.blocks if row.shape == "rows" else row.blocks[:1]))
    rng = np.random.Generator(np.random.Philox(draw(st.integers(0, 2**32 - 1))))
    if row.shape == "tiles":
        shape = (draw(st.integers(1, 40)), draw(st.integers(1, 40)))
    elif row.shape == "channels":
        shape = (block * draw(st.integers(1, 2)), draw(st.integers(1, 5)))
    else:
        short = draw(st.sampled_from([0, 1, block - 1])) if row.pads else 0
        shape = (draw(st.integers(1, 3)), 4 * block - short)
    exponents = draw(st.lists(st.sampled_from([-140, -60, -42, -20, -9, 0, 1, 31, 118]), min_size=1, max_size=4))
    values = rng.standard_normal(shape) * np.resize(2.0 ** np.array(exponents), shape[1])
    values *= rng.uniform(size=shape) < draw(st.sampled_from([0.1, 1.0]))
    allowed = SPECIAL + EDGES + ([NAN] if row.nan_code is not None else []) + ([INF, -INF] if row.inf_stated else [])
    spots = draw(st.lists(st.tuples(st.integers(0, values.size - 1), st.sampled_from(allowed)), max_size=5))
    for index, value in spots:
        values.flat[index] = value
    dtype = getattr(torch, draw(st.sampled_from(row.inputs)))
    wide = torch.full((shape[0], shape[1] + draw(st.integers(0, 5))), NAN, dtype=dtype)
    return wide[:, : shape[1]].copy_(torch.from_numpy(values.astype(np.float32))), block


def by_scalar_model(x: torch.Tensor, row: Quantizer, block: int) -> tuple[np.ndarray, np.ndarray]:
    rule, values = scalar.RULES[row.name], x.float().numpy()
    height, width = {"rows": (1, block), "tiles": (block, block), "channels": (block, 1)}[row.shape]
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((-(-values.shape[0] // height), -(-values.shape[1] // width)), np.float32)
    for i, j in np.ndindex(scales.shape):
        tile = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        found, scales[i, j] = scalar.quantize_block(values[tile].flatten().tolist(), rule)
        codes[tile] = np.reshape(found, values[tile].shape)
    return codes, scales


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=15)
@given(data=st.data())
def test_codes_and_scales_are_those_of_the_scalar_model(name: str, data: st.DataObject) -> None:
    x, block = data.draw(inputs(QUANTIZERS[name]))
    before = x.clone()
    codes, scales = by_scalar_model(x, QUANTIZERS[name], block)
    for found_codes, found_scales in quantize(x, QUANTIZERS[name], block):
        np.testing.assert_array_equal(found_codes, codes)
        np.testing.assert_array_equal(found_scales, scales)
    np.testing.assert_array_equal(x.float(), before.float())


def test_the_log2_rule_and_the_exact_one_part_in_the_band_only() -> None:
    maxima = torch.tensor([scalar.fp32(448 * 2.0**-20 * (1 + ulps / 1.75 * 2.0**-23)) for ulps in range(-2, 12)])
    x = maxima[:, None].repeat(1, 512)
    log2, exact = (
        exponent_bytes(quantize_matrix(x, name, packed=True)[1])[:, 0] for name in ("vllm-fused", "rope-quant")
    )
    assert (exact - log2).tolist() == [0, 0, 0] + [1] * 8 + [0] * 3


def test_a_quotient_and_a_product_with_the_reciprocal_part_at_ties() -> None:
    """Scales m and values m * tie: the quotient is the tie itself, the product may pass it."""
    m = torch.arange(1, 128, 2, dtype=torch.float32)[:, None]
    x = m * torch.cat([torch.tensor([448.0]), torch.arange(17, 48) / 16]).repeat(4)
    seen = []
    for name in ("vllm-group-fp32", "vllm-triton-group-fp32", "deep-gemm-token-fp32"):
        codes, scales = by_scalar_model(x, QUANTIZERS[name], 32)
        ((found, found_scales),) = quantize(x, QUANTIZERS[name], 32)
        assert np.array_equal(found, codes) and np.array_equal(found_scales, scales)
        seen.append(found)
    assert all((a != b).any() for i, a in enumerate(seen) for b in seen[:i])
