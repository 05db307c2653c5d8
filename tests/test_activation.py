"""Layouts of quantised activations, and UE8M0 bytes against struct and exact powers of two."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oproj.activation import (
    QuantizedActivation,
    empty_scales,
    empty_values,
    float_to_ue8m0,
    pack_ue8m0,
    scale_columns,
    tma_aligned_size,
    ue8m0_to_float,
    unpack_ue8m0,
)

byte_rows = st.integers(1, 6).flatmap(lambda words: st.binary(min_size=4 * words, max_size=4 * words))


@pytest.fixture
def dirty_memory() -> Iterator[None]:
    """New tensors come filled with NaN, or the largest integer, instead of what the allocator had left there."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan() and torch.empty(1, dtype=torch.int32) != 0
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def aligned_to_4(tokens: int) -> int:
    return math.ceil(tokens / 4) * 4


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_values_are_group_major_for_every_token_count(groups: int, dtype: torch.dtype) -> None:
    for tokens in range(1, 34):
        values = empty_values(tokens, groups, 128, dtype)
        assert values.shape == (tokens, groups, 128) and values.dtype == dtype
        assert values.stride() == (128, tokens * 128, 1)
        assert values.untyped_storage().nbytes() == tokens * groups * 128 * dtype.itemsize
    assert empty_values(0, groups, 128, dtype).shape == (0, groups, 128)


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_scales_are_token_major_in_aligned_columns_for_every_token_count(groups: int, packed: bool) -> None:
    for tokens in range(34):
        scales = empty_scales(tokens, groups, 8, packed)
        aligned = aligned_to_4(tokens)
        assert scales.shape == (tokens, groups, 8)
        assert scales.dtype == (torch.int32 if packed else torch.float32)
        assert scales.stride() == (1, 8 * aligned, aligned)
        assert scales.untyped_storage().nbytes() == 4 * groups * 8 * aligned and scales.data_ptr() % 16 == 0


@pytest.mark.usefixtures("dirty_memory")
@pytest.mark.parametrize("packed", [False, True])
def test_rows_behind_the_tokens_are_zero_though_memory_was_dirty(packed: bool) -> None:
    for tokens in range(34):
        aligned = aligned_to_4(tokens)
        buffer = empty_scales(tokens, 3, 5, packed).as_strided((3, 5, aligned), (5 * aligned, aligned, 1))
        padding = buffer[:, :, tokens:].contiguous().view(torch.int32)  # as words, so that -0.0 would be seen
        assert padding.numel() == 15 * (aligned - tokens)
        assert not padding.any()


@pytest.mark.parametrize("size, step", [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)])
def test_tma_alignment_is_the_next_multiple_of_16_bytes(size: int, step: int) -> None:
    for n in range(70):
        aligned = tma_aligned_size(n, size)
        assert aligned % step == 0 and n <= aligned < n + step


@pytest.mark.parametrize("size", [0, -4, 3, 5, 32])
def test_tma_alignment_refuses_an_element_that_does_not_divide_16_bytes(size: int) -> None:
    with pytest.raises(ValueError, match=f"element_size={size} must divide 16"):
        tma_aligned_size(7, size)


@pytest.mark.parametrize(
    "k, block, fp32, packed",
    [(4096, 128, 32, 8), (4096, 64, 64, 16), (4096, 32, 128, 32), (640, 128, 5, 2), (100, 32, 4, 1)],
)
def test_scale_columns(k: int, block: int, fp32: int, packed: int) -> None:
    assert (scale_columns(k, block, False), scale_columns(k, block, True)) == (fp32, packed)


@given(rows=st.lists(byte_rows, min_size=1, max_size=4).filter(lambda rows: len({len(r) for r in rows}) == 1))
def test_packing_is_little_endian(rows: list[bytes]) -> None:
    exponent_bytes = torch.tensor([list(row) for row in rows], dtype=torch.uint8)
    words = pack_ue8m0(exponent_bytes)
    assert words.dtype == torch.int32
    assert words.tolist() == [list(struct.unpack(f"<{len(row) // 4}i", row)) for row in rows]
    assert torch.equal(unpack_ue8m0(words), exponent_bytes)
    strided = torch.empty_strided(words.shape, (1, 4 * words.shape[0]), dtype=torch.int32).copy_(words)
    assert torch.equal(unpack_ue8m0(strided), exponent_bytes)


def test_every_byte_fits_every_place_of_a_word() -> None:
    exponent_bytes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for place in range(4):
        quads = torch.full((256, 4), 0xFF, dtype=torch.uint8)
        quads[:, place] = exponent_bytes
        assert torch.equal(unpack_ue8m0(pack_ue8m0(quads)), quads)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float32])
def test_packing_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"exponent_bytes has dtype {dtype}"):
        pack_ue8m0(torch.zeros(4, dtype=dtype))
    with pytest.raises(TypeError, match=f"exponent_bytes has dtype {dtype}"):
        ue8m0_to_float(torch.zeros(4, dtype=dtype))


def test_packing_refuses_blocks_that_leave_a_word_open() -> None:
    with pytest.raises(ValueError, match="6 blocks do not fill int32 words"):
        pack_ue8m0(torch.zeros((2, 6), dtype=torch.uint8))


def test_unpacking_refuses_other_dtypes() -> None:
    with pytest.raises(TypeError, match=r"words has dtype torch\.uint8"):
        unpack_ue8m0(torch.zeros(4, dtype=torch.uint8))


def test_all_255_powers_of_two_round_trip() -> None:
    exponent_bytes = torch.arange(255, dtype=torch.int32).to(torch.uint8)
    scales = ue8m0_to_float(exponent_bytes)
    assert scales.dtype == torch.float32
    assert scales.tolist() == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert torch.equal(float_to_ue8m0(scales), exponent_bytes)
    transposed = scales.view(5, 51).t()
    assert torch.equal(float_to_ue8m0(transposed), exponent_bytes.view(5, 51).t())


def test_byte_255_is_nan() -> None:
    assert ue8m0_to_float(torch.tensor([255], dtype=torch.uint8)).isnan()


def is_ue8m0_value(value: float) -> bool:
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5 and value >= 2.0**-127


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=5))
def test_a_scale_with_a_mantissa_or_a_sign_is_refused_and_named(values: list[float]) -> None:
    scales = torch.tensor(values, dtype=torch.float32)
    bad = [i for i, value in enumerate(scales.tolist()) if not is_ue8m0_value(value)]
    if bad:
        with pytest.raises(ValueError, match=rf"^scale\[{bad[0]}\] = "):
            float_to_ue8m0(scales)
    else:
        assert torch.equal(ue8m0_to_float(float_to_ue8m0(scales)), scales)


@pytest.mark.parametrize("exponent", [-127, -126, -60, 0, 60, 127])
@pytest.mark.parametrize("steps", [-1, 1])
def test_the_neighbours_of_a_power_of_two_are_refused(exponent: int, steps: int) -> None:
    power = torch.tensor([2.0**exponent])
    assert float_to_ue8m0(power).tolist() == [exponent + 127]
    neighbour = (power.view(torch.int32) + steps).view(torch.float32)
    with pytest.raises(ValueError, match=r"scale\[0, 1\] = .* is not a power of two"):
        float_to_ue8m0(torch.stack([power, neighbour], dim=1))


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, -(2.0**-127), math.inf, -math.inf, math.nan, 2.0**-128, 2.0**-149])
def test_values_that_ue8m0_does_not_have_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"^scale\[2\] = "):
        float_to_ue8m0(torch.tensor([1.0, 2.0, value, 3.0]))


def test_other_dtypes_of_a_scale_are_refused() -> None:
    with pytest.raises(TypeError, match=r"scale has dtype torch\.float64"):
        float_to_ue8m0(torch.ones(4, dtype=torch.float64))


def wide_activation(slots: int) -> QuantizedActivation:
    scale = empty_scales(3, slots, 2, True)
    scale.copy_(torch.arange(3 * slots * 2, dtype=torch.int32).view(3, slots, 2))
    data = empty_values(3, slots, 1024, torch.float8_e4m3fn)
    data.view(torch.uint8).copy_((torch.arange(3 * slots * 1024) % 251).view(3, slots, 1024))
    return QuantizedActivation(data, scale)


@pytest.mark.parametrize("live", [1, 3, 8])
def test_slots_are_sliced_from_the_front_of_data_and_scale_without_a_copy(live: int) -> None:
    wide = wide_activation(8)
    x = wide.sliced(live)
    assert torch.equal(x.data.view(torch.uint8), wide.data.view(torch.uint8)[:, :live])
    assert torch.equal(x.scale, wide.scale[:, :live])
    assert x.data.data_ptr() == wide.data.data_ptr() and x.scale.data_ptr() == wide.scale.data_ptr()
    assert x.data.stride() == wide.data.stride() and x.scale.stride() == wide.scale.stride()
    assert wide.data.shape[1] == 8


@pytest.mark.parametrize("n_groups", [9, 0, -1])
def test_more_groups_than_slots_or_none_are_refused(n_groups: int) -> None:
    with pytest.raises(ValueError, match=f"n_groups={n_groups}"):
        wide_activation(8).sliced(n_groups)


def test_data_and_scale_of_other_slots_are_refused() -> None:
    mixed = QuantizedActivation(wide_activation(8).data, wide_activation(4).scale)
    with pytest.raises(ValueError, match=r"data \(3, 8, 1024\) and scale \(3, 4, 2\)"):
        mixed.sliced(2)
    flat = QuantizedActivation(wide_activation(8).data.flatten(1), wide_activation(8).scale)
    with pytest.raises(ValueError, match=r"data \(3, 8192\)"):
        flat.sliced(2)


def test_a_weak_reference_shares_the_storage() -> None:
    x = wide_activation(2)
    x.orig_shape, x.quant_key = torch.Size([3, 2, 1024]), "per-128"
    weak = x.weak_ref()
    assert weak is not x and weak.data.data_ptr() == x.data.data_ptr() and weak.scale.data_ptr() == x.scale.data_ptr()
    assert (weak.orig_dtype, weak.orig_shape, weak.quant_key) == (torch.bfloat16, x.orig_shape, "per-128")
