"""reference.formats: its tables against torch's casts and fractions, dequantisation per element."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import dequantize, e4m3_to_float64, ue8m0_to_float64, unpack_ue8m0

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("device", DEVICES)
few = settings(deadline=None, max_examples=40)
every_code = torch.arange(256, dtype=torch.uint8)


def bits(values: torch.Tensor) -> list[int]:
    """Float64 bits, every NaN as one value, so that lists compare equal exactly when the values do."""
    values = torch.where(values.isnan(), torch.full_like(values, math.nan), values)
    return values.cpu().contiguous().view(torch.int64).flatten().tolist()


def random_codes(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def powers_of_two(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Float64 2^(byte - 127), NaN for 255, by Python's own arithmetic."""
    values = [math.nan if byte == 255 else 2.0 ** (byte - 127) for byte in scale_bytes.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64, device=scale_bytes.device).view(scale_bytes.shape)


def aligned(tokens: int) -> int:
    return -(-tokens // 4) * 4


@on_each_device
def test_e4m3_table_has_torchs_values_for_all_256_codes(device: str) -> None:
    expected = every_code.view(torch.float8_e4m3fn).to(torch.float64)
    assert bits(e4m3_to_float64(every_code.to(device))) == bits(expected)
    assert bits(e4m3_to_float64(every_code.to(device).view(torch.float8_e4m3fn))) == bits(expected)


def test_e4m3_landmarks_are_those_of_the_ocp_format() -> None:
    table = e4m3_to_float64(every_code)
    landmarks = {0x00: "0", 0x01: "1/512", 0x07: "7/512", 0x08: "1/64", 0x38: "1", 0x3C: "3/2", 0x7E: "448"}
    for code, value in landmarks.items():
        assert Fraction(table[code].item()) == Fraction(value)
        assert Fraction(table[code + 128].item()) == -Fraction(value)
    assert table.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert math.copysign(1, table[0x80].item()) == -1 and table[0x80] == 0


@on_each_device
def test_ue8m0_table_is_exactly_two_to_the_byte_minus_127(device: str) -> None:
    for form in (every_code, every_code.view(torch.float8_e8m0fnu)):
        values = ue8m0_to_float64(form.to(device)).tolist()
        assert [Fraction(v) for v in values[:255]] == [Fraction(2) ** (b - 127) for b in range(255)]
        assert math.isnan(values[255])


@few
@given(st.lists(st.lists(st.integers(0, 255), min_size=4, max_size=4), max_size=9))
def test_packed_words_are_little_endian(quads: list[list[int]]) -> None:
    words = [int.from_bytes(bytes(quad), "little", signed=True) for quad in quads]
    got = unpack_ue8m0(torch.tensor(words, dtype=torch.int32).view(1, -1))
    assert got.dtype == torch.uint8 and got.tolist() == [[byte for quad in quads for byte in quad]]


@few
@given(
    seed=st.integers(0, 2**32),
    lead=st.lists(st.integers(0, 3), max_size=2),
    rows=st.integers(0, 7),
    blocks=st.integers(0, 5),
    block_k=st.sampled_from([1, 2, 4]),
    block_mn=st.integers(1, 4),
    data=st.data(),
)
def test_an_element_is_its_code_times_its_blocks_scale(seed, lead, rows, blocks, block_k, block_mn, data):
    codes = random_codes(seed, *lead, rows, blocks * block_k)
    shape = [*lead, -(-rows // block_mn), blocks]
    floats = st.floats(width=32)  # NaN, infinities, subnormals and zeros included
    drawn = [data.draw(floats) for _ in range(math.prod(shape))]
    scale = torch.tensor(drawn, dtype=torch.float32).view(shape)
    got = dequantize(codes, scale, block_k=block_k, block_mn=block_mn)
    assert got.dtype == torch.float64 and got.shape == codes.shape and got.is_contiguous()
    value = codes.view(torch.float8_e4m3fn).to(torch.float64)
    for index in torch.cartesian_prod(*map(torch.arange, codes.shape)).tolist() if codes.numel() else []:
        *outer, row, column = index
        block = (*outer, row // block_mn, column // block_k)
        a, b = value[tuple(index)].item(), scale[block].item()
        assert bits(got[tuple(index)]) == bits(torch.tensor(a * b, dtype=torch.float64))
        if math.isfinite(a) and math.isfinite(b):  # a * b is exact: 4 and 24 significand bits fit in 53
            assert Fraction(got[tuple(index)].item()) == Fraction(a) * Fraction(b)


@few
@given(seed=st.integers(0, 2**32), rows=st.integers(0, 5), blocks=st.integers(0, 9))
def test_float_byte_and_packed_scales_agree(seed: int, rows: int, blocks: int) -> None:
    codes = random_codes(seed, 2, rows, 8 * blocks)
    scale_bytes = random_codes(seed + 1, 2, rows, blocks)
    floats = powers_of_two(scale_bytes).float()
    filler = torch.full((2, rows, -blocks % 4), 0xAB, dtype=torch.uint8)  # past the last block: never read
    quads = torch.cat((scale_bytes, filler), dim=-1).reshape(-1, 4).tolist()
    words = torch.tensor([int.from_bytes(bytes(q), "little", signed=True) for q in quads], dtype=torch.int32)
    by_float = dequantize(codes, floats, block_k=8)
    assert bits(dequantize(codes, words.view(2, rows, -(-blocks // 4)), block_k=8)) == bits(by_float)
    assert bits(dequantize(codes, scale_bytes, block_k=8)) == bits(by_float)
    assert bits(dequantize(codes, scale_bytes.view(torch.float8_e8m0fnu), block_k=8)) == bits(by_float)
    assert bits(dequantize(codes, floats.double(), block_k=8)) == bits(by_float)


@on_each_device
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5])
def test_served_activation_layouts_are_read_and_their_padding_is_not(tokens: int, device: str) -> None:
    groups, k, ta = 2, 4096, aligned(tokens)
    physical = random_codes(tokens, groups, tokens, k).to(device)
    codes = physical.as_strided((tokens, groups, k), (k, tokens * k, 1)).view(torch.float8_e4m3fn)
    exponents = random_codes(7, tokens, groups, k // 128).to(device)
    exponents[exponents == 255] = 1
    scales = powers_of_two(exponents)
    fp32 = torch.full((groups * 32 * ta,), math.nan, device=device)
    fp32 = fp32.as_strided((tokens, groups, 32), (1, 32 * ta, ta)).copy_(scales)
    packed = torch.full((groups * 8 * ta,), -1, dtype=torch.int32, device=device)
    packed = packed.as_strided((tokens, groups, 8), (1, 8 * ta, ta))
    packed.copy_(exponents.view(torch.int32))  # a contiguous row of four bytes is a little-endian word
    values = physical.transpose(0, 1).view(torch.float8_e4m3fn).double()
    expected = values * scales.repeat_interleave(128, dim=-1)
    assert bits(dequantize(codes, fp32, block_k=128)) == bits(expected)
    assert bits(dequantize(codes, packed, block_k=128)) == bits(expected)


@on_each_device
@pytest.mark.parametrize("lead", [(2,), ()], ids=["wo_a [G, R, K]", "wo_b [hidden, K]"])
def test_served_weight_layouts_are_read(lead: tuple[int, ...], device: str) -> None:
    rows, k = 256, 1024
    codes = random_codes(3, *lead, rows, k).to(device)
    codes[codes & 127 == 127] = 0
    tile = torch.arange(math.prod(lead) * 16, device=device).view(*lead, 2, 8) + 100  # no two tiles alike
    fp32 = powers_of_two(tile).float()
    by_row = tile.to(torch.uint8).repeat_interleave(128, dim=-2)
    words = by_row.contiguous().view(torch.int32)
    packed = words.transpose(-1, -2).contiguous().transpose(-1, -2)  # row index has stride 1
    assert packed.stride()[-2:] == (1, rows)
    got = dequantize(codes, fp32, block_k=128, block_mn=128)
    per_element = fp32.double().repeat_interleave(128, dim=-2).repeat_interleave(128, dim=-1)
    expected = codes.view(torch.float8_e4m3fn).double() * per_element
    assert bits(got) == bits(expected)
    assert bits(dequantize(codes, packed, block_k=128)) == bits(expected)
    swapped = fp32.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert bits(dequantize(codes, swapped, block_k=128, block_mn=128)) == bits(expected)


def test_inputs_are_not_modified() -> None:
    codes, scale = random_codes(1, 2, 3, 8), torch.rand(2, 3, 2)
    words = torch.tensor([[[-1], [5], [-7]]] * 2, dtype=torch.int32)
    before = codes.clone(), scale.clone(), words.clone()
    dequantize(codes, scale, block_k=4)
    dequantize(codes, words, block_k=4)
    assert all(torch.equal(a, b) for a, b in zip((codes, scale, words), before, strict=True))


@pytest.mark.parametrize(
    "codes, scale, block_k, block_mn",
    [
        ((2, 3, 8), (2, 3, 3), 4, 1),  # one block too many
        ((2, 3, 8), (2, 3, 1), 4, 1),  # one too few: would broadcast
        ((2, 3, 8), (2, 1, 2), 4, 1),  # would broadcast over rows
        ((1, 3, 8), (2, 3, 2), 4, 1),  # would broadcast over groups
        ((2, 3, 8), (3, 2), 4, 1),  # another rank
        ((8,), (2,), 4, 1),  # no rows
        ((2, 3, 9), (2, 3, 2), 4, 1),  # K is no multiple of the block
        ((2, 7, 8), (2, 2, 2), 4, 3),  # 7 rows are 3 blocks of 3
        ((2, 6, 8), (2, 3, 2), 4, 3),
        ((2, 3, 8), (2, 3, 2), 0, 1),
        ((2, 3, 8), (2, 3, 2), 4, 0),
    ],
)
def test_shapes_that_do_not_fit_are_refused(codes, scale, block_k, block_mn) -> None:
    zeros = torch.zeros(codes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=re.escape(f"codes {list(codes)}, scale {list(scale)}")):
        dequantize(zeros, torch.ones(scale), block_k=block_k, block_mn=block_mn)


def test_a_wrong_number_of_packed_words_is_refused() -> None:
    codes = torch.zeros(3, 32, dtype=torch.uint8)
    for words in (1, 3):
        with pytest.raises(ValueError, match="8 blocks need 2 packed words"):
            dequantize(codes, torch.zeros(3, words, dtype=torch.int32), block_k=4)


def test_wrong_dtypes_are_refused() -> None:
    codes, scale = torch.zeros(3, 8, dtype=torch.uint8), torch.ones(3, 2)
    for bad in (codes.int(), codes.float(), codes.view(torch.float8_e5m2), codes.view(torch.int8)):
        with pytest.raises(TypeError, match="float8_e4m3fn"):
            dequantize(bad, scale, block_k=4)
    for bad in (scale.bfloat16(), scale.half(), scale.long(), codes[:, :2].view(torch.float8_e4m3fn)):
        with pytest.raises(TypeError, match="scale"):
            dequantize(codes, bad, block_k=4)
    with pytest.raises(TypeError, match="int32"):
        unpack_ue8m0(codes)
