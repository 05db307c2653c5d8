"""Weight scales in each architecture's layout, and the second projection bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scalar_quantizer as scalar
from oproj.activation import QuantizedActivation
from oproj.arch import ARCHS, SM90, SM100, Arch
from oproj.engines.software import SoftwareEngine, spec
from oproj.engines.software.quantizers import quantize_groups
from oproj.weights import layout_weight_scales
from oproj.wo_b import fp8_wo_b, quantize_z
from quantizer_calls import bf16, codes_of, exponent_bytes

PACKED = [arch for arch in ARCHS.values() if arch is not SM90]
NAN, INF, MINUS_ZERO = 0x7FC0, 0x7F80, 0x8000


def powers(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """FP32 powers of two that differ along every axis, from 2^-127 to 2^127."""
    exponents = np.random.default_rng(seed).integers(-127, 128, shape)
    return torch.from_numpy(np.ldexp(1.0, exponents).astype(np.float32))


# Weight scales ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 32), (2, 8, 32), (1, 1, 4), (2, 3, 8, 4)])
def test_fp32_rows_keep_the_scales_contiguous(shape: tuple[int, ...]) -> None:
    scale = powers(shape)
    rows = shape[-2] * 128
    for source in (scale, scale.mT.contiguous().mT, scale.repeat(*[1] * (len(shape) - 1), 2)[..., : shape[-1]]):
        found = layout_weight_scales(source, arch=SM90, rows=rows)
        assert found.dtype == torch.float32 and found.is_contiguous() and torch.equal(found, scale)


@pytest.mark.parametrize("arch", PACKED, ids=lambda arch: arch.name)
@pytest.mark.parametrize(
    "shape, rows, block, strides",
    [
        ((8, 32), 1024, (128, 128), (1, 1024)),  # wo_b of one rank: [hidden, K/512]
        ((2, 8, 32), 1024, (128, 128), (8192, 1, 1024)),  # wo_a of V4: [G, 1024, 8]
        ((1, 8, 32), 1024, (128, 128), (8192, 1, 1024)),  # one group keeps the stride
        ((2, 32, 128), 1024, (32, 32), (32768, 1, 1024)),  # wo_a of V4.1: [G, 1024, 32]
        ((3, 2, 4), 130, (128, 128), (132, 1, 132)),  # rows that end inside a block and off a multiple of 4
        ((2, 2, 1, 4), 7, (128, 128), (16, 8, 1, 8)),
    ],
)
def test_packed_rows_repeat_a_scale_for_its_rows(arch: Arch, shape, rows, block, strides) -> None:
    scale = powers(shape)
    before = scale.clone()
    words = layout_weight_scales(scale, arch=arch, rows=rows, block=block)
    assert words.dtype == torch.int32
    assert words.shape == (*shape[:-2], rows, shape[-1] // 4) and words.stride() == strides
    found = exponent_bytes(words.flatten(0, -2)).reshape(*shape[:-2], rows, shape[-1])
    mantissas, exponents = np.frexp(scale.numpy().astype(np.float64))
    assert (mantissas == 0.5).all()
    assert np.array_equal(found, (exponents - 1 + 127)[..., np.arange(rows) // block[0], :])
    assert torch.equal(scale, before)


@pytest.mark.parametrize("arch", PACKED, ids=lambda arch: arch.name)
@pytest.mark.parametrize("value", [1.5, 0.0, -1.0, math.inf, math.nan])
def test_packed_rows_refuse_a_scale_that_is_no_power_of_two(arch: Arch, value: float) -> None:
    scale = powers((2, 3, 4))
    scale[1, 2, 3] = value
    with pytest.raises(ValueError, match=r"scale\[1, 2, 3\] = .* is not a power of two"):
        layout_weight_scales(scale, arch=arch, rows=384)
    assert layout_weight_scales(scale, arch=SM90, rows=384).shape == (2, 3, 4)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows, shape", [(1024, (7, 4)), (1025, (8, 4)), (896, (8, 4)), (128, (4,))])
def test_scale_rows_must_cover_the_rows(arch: str, rows: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"scale has shape .*; {rows} rows in blocks of 128 need {-(-rows // 128)}"):
        layout_weight_scales(torch.ones(shape), arch=arch, rows=rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_other_dtypes_of_weight_scales_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"scale has dtype {dtype}; expected float32"):
        layout_weight_scales(torch.ones((1, 4), dtype=dtype), arch=SM90, rows=128)


def test_packed_rows_refuse_k_blocks_that_leave_a_word_open() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 6\); 6 blocks do not fill int32 words; a multiple of 4"):
        layout_weight_scales(torch.ones((1, 6)), arch=SM100, rows=128)


# The quantiser of wo_b ----------------------------------------------------------------------------------------------


def row_of(block: list[int]) -> torch.Tensor:
    """z [1, 512]: one block of 128 from a pattern of 8 BF16 values, then three blocks of ones."""
    return bf16([block * 16 + [0x3F80] * 384])


@pytest.mark.parametrize(
    "block, byte, codes",
    [
        ([0, MINUS_ZERO] * 4, 94, [0x00, 0x80] * 4),  # the scale has a floor of its own: 2^-33
        ([1, 0x8001] * 4, 94, [0x00, 0x80] * 4),
        ([NAN, 0xFFC0, 0x3F80, 0xBF80] * 2, 119, [0xFE, 0xFE, 0x78, 0xF8] * 2),
        ([NAN] * 8, 94, [0xFE] * 8),
        ([INF, 0x3F80, 0xBF80, NAN] * 2, 255, [0xFE, 0x00, 0x80, 0xFE] * 2),
        ([0xFF80, 0x3F80, 0xBF80, 0] * 2, 255, [0xFE, 0x00, 0x80, 0x00] * 2),
        ([0x43E0, 0xC3E0, 0, 0] * 2, 127, [0x7E, 0xFE, 0x00, 0x00] * 2),  # 448
        ([0x43E1, 0xC3E1, 0, 0] * 2, 128, [0x76, 0xF6, 0x00, 0x00] * 2),  # 450 needs the next scale
    ],
)
def test_stated_bits_of_one_block(block: list[int], byte: int, codes: list[int]) -> None:
    packed, fp32 = quantize_z(row_of(block), SM100), quantize_z(row_of(block), SM90)
    for x in (packed, fp32):
        assert codes_of(x.data)[0, :128].tolist() == codes * 16
        assert exponent_bytes(x.scale).tolist() == [[byte, 119, 119, 119]]
    assert fp32.scale[0].tolist() == [math.inf if byte == 255 else 2.0 ** (byte - 127), *[2.0**-8] * 3]
    assert (fp32.orig_dtype, fp32.orig_shape) == (torch.bfloat16, (1, 512))


EXPONENTS = [-140, -126, -60, -48, -42, -41, -33, -25, -9, 0, 9, 60, 118, 126]
SPECIAL = [0, MINUS_ZERO, 1, 0x2EDB, 0x2EDC, 0x43E0, 0xC3E1, 0x7F7F, INF, 0xFF80, NAN, 0xFF81]


@settings(max_examples=60)
@given(
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    exponents=st.lists(st.sampled_from(EXPONENTS), min_size=1, max_size=5),
    planted=st.lists(st.tuples(st.integers(0, 255), st.sampled_from(SPECIAL)), max_size=4),
    gap=st.integers(0, 9),
    group=st.sampled_from([32, 64]),
)
def test_wo_b_quantiser_has_the_bits_of_the_scalar_model(rows, seed, exponents, planted, gap, group) -> None:
    rng = np.random.Generator(np.random.Philox(seed))
    spread = 2.0 ** np.resize(exponents, (rows, 8)).repeat(32, axis=1)
    z = torch.from_numpy(rng.standard_normal((rows, 256)) * spread).bfloat16()
    for place, special in planted:
        z.view(torch.int16)[place % rows, place] = np.uint16(special).view(np.int16).item()
    strided = bf16(np.full((rows, 256 + gap), NAN))[:, :256].copy_(z)
    values = [[scalar.bf16_value(b & 0xFFFF) for b in row] for row in z.view(torch.int16).tolist()]
    expected = [scalar.quantize_row(row, group, scalar.WO_B) for row in values]
    for packed in (False, True):
        data, scale = quantize_groups(strided, group_size=group, packed=packed)
        assert codes_of(data).tolist() == [codes for codes, _ in expected]
        assert exponent_bytes(scale).tolist() == [scale_bytes for _, scale_bytes in expected]


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_layout_of_quantised_z_for_every_token_count(arch: Arch) -> None:
    columns, dtype = (2, torch.int32) if arch.tma_aligned_scales else (8, torch.float32)
    for rows in range(10):
        x = quantize_z(torch.ones((rows, 1024), dtype=torch.bfloat16), arch)
        assert isinstance(x, QuantizedActivation)
        assert x.data.shape == (rows, 1024) and x.data.is_contiguous()
        assert x.scale.shape == (rows, columns) and x.scale.dtype == dtype
        assert x.scale.stride() == (1, -(-rows // 4) * 4)


@pytest.mark.parametrize(
    "z, changes, error, message",
    [
        (torch.ones(4, 512), {}, TypeError, r"x has dtype torch\.float32; expected torch\.bfloat16"),
        (torch.ones(512).bfloat16(), {}, ValueError, r"x has shape \(512,\)"),
        (torch.ones(4, 2, 512).bfloat16(), {}, ValueError, r"x has shape \(4, 2, 512\)"),
        (torch.ones(512, 4).bfloat16().T, {}, ValueError, r"strides \(1, 4\); expected \[M, K\] with unit last stride"),
        (torch.ones(4, 384).bfloat16(), {}, ValueError, "K=384 must be a multiple of 512"),
        (torch.ones(4, 512).bfloat16(), {"group_size": 0}, ValueError, "group_size=0 must be at least 1"),
    ],
)
def test_bad_z_is_named(z: torch.Tensor, changes: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_z(z, SM100, **changes)


# The projection -----------------------------------------------------------------------------------------------------


class Weight:
    """A random FP8 ``wo_b`` [hidden, K] with scales that differ by block, in the layout of ``arch``."""

    def __init__(self, arch: Arch, hidden: int, k: int = 512) -> None:
        rng = np.random.default_rng(11)
        codes = rng.integers(0, 0x7F, (hidden, k)).astype(np.uint8) | rng.integers(0, 2, (hidden, k), np.uint8) << 7
        self.codes = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        self.exponents = rng.integers(-9, 9, (-(-hidden // 128), k // 128))
        blocks = torch.from_numpy(np.ldexp(1.0, self.exponents).astype(np.float32))
        self.scale = layout_weight_scales(blocks, arch=arch, rows=hidden)


def expected_y(arch: Arch, z: torch.Tensor, weight: Weight) -> list[list[int]]:
    """BF16 bits by the scalar quantiser and the scalar tensor core."""
    y = []
    for row in z.view(torch.int16).tolist():
        a, a_bytes = scalar.quantize_row([scalar.bf16_value(b & 0xFFFF) for b in row], 128, scalar.WO_B)
        line = []
        for n, b in enumerate(codes_of(weight.codes).tolist()):
            b_bytes = (weight.exponents[n // 128] + 127).tolist()
            scales = (a_bytes, b_bytes)
            if not arch.mma.scales_inside:
                scales = tuple([2.0 ** (byte - 127) for byte in side] for side in scales)
            line.append(spec.bf16_bits(spec.chain(arch, a, b, *scales)))
        y.append(line)
    return y


@pytest.mark.parametrize("arch", [SM90, SM100], ids=lambda arch: arch.name)
@pytest.mark.parametrize("rows, hidden", [(3, 8), (1, 136)])
def test_y_is_the_chain_of_the_scalar_models(arch: Arch, rows: int, hidden: int) -> None:
    rng = np.random.default_rng(rows)
    spread = 2.0 ** rng.integers(-9, 9, (rows, 4)).repeat(128, axis=1)
    z = torch.from_numpy(rng.standard_normal((rows, 512)) * spread).bfloat16()
    weight = Weight(arch, hidden)
    y = fp8_wo_b(z, weight.codes, weight.scale, engine=SoftwareEngine(arch))
    assert y.shape == (rows, hidden) and y.dtype == torch.bfloat16
    assert [[bits & 0xFFFF for bits in row] for row in y.view(torch.int16).tolist()] == expected_y(arch, z, weight)


@pytest.mark.parametrize("arch", [SM90, SM100], ids=lambda arch: arch.name)
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5])
def test_out_is_written_and_returned(arch: Arch, rows: int) -> None:
    weight, engine = Weight(arch, 16), SoftwareEngine(arch)
    z = torch.from_numpy(np.random.default_rng(2).standard_normal((rows, 512))).bfloat16()
    fresh = fp8_wo_b(z, weight.codes, weight.scale, engine=engine)
    assert fresh.shape == (rows, 16)
    out = torch.full((rows, 16), torch.nan, dtype=torch.bfloat16)
    assert fp8_wo_b(z, weight.codes, weight.scale, engine=engine, out=out) is out
    assert torch.equal(out, fresh)


def test_an_out_of_another_size_or_dtype_is_refused() -> None:
    weight, engine, z = Weight(SM90, 16), SoftwareEngine(SM90), torch.ones((3, 512), dtype=torch.bfloat16)
    for out, error in ((torch.empty((3, 24), dtype=torch.bfloat16), ValueError), (torch.empty((3, 16)), TypeError)):
        with pytest.raises(error, match="d has"):
            fp8_wo_b(z, weight.codes, weight.scale, engine=engine, out=out)


def test_blocks_of_32_are_quantised_for_sm100() -> None:
    """V4.1: MXFP8 on both sides, recipe (1, 1, 32)."""
    z = torch.ones((2, 512), dtype=torch.bfloat16)
    z[:, 32:64] *= 2.0**9
    codes = torch.full((8, 512), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # ones
    scale = layout_weight_scales(torch.ones((1, 16)), arch=SM100, rows=8, block=(32, 32))
    y = fp8_wo_b(z, codes, scale, engine=SoftwareEngine(SM100), group_size=32)
    assert y.tolist() == [[float(torch.tensor(480.0 + 32 * 512).bfloat16())] * 8] * 2
    assert exponent_bytes(quantize_z(z, SM100, group_size=32).scale)[0, :3].tolist() == [119, 128, 119]
