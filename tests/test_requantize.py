"""FP32 checkpoint scales become powers of two: bits by the scalar model, and what it costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scalar_quantizer as scalar
from oproj.arch import SM100
from oproj.engines.software.quantizers import quantize_matrix
from oproj.weights import layout_weight_scales, requantize_to_ue8m0
from quantizer_calls import codes_of, exponent_bytes


def weight(shape: tuple[int, ...], block: int, seed: int = 0, spread: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Any e4m3 codes but NaN, with FP32 scales that differ by block."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7F, shape).astype(np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
    blocks = (*shape[:-2], -(-shape[-2] // block), -(-shape[-1] // block))
    scale = rng.uniform(1, 2, blocks) * 2.0 ** rng.integers(-spread, spread + 1, blocks)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scale.astype(np.float32))


def values(codes: torch.Tensor, scale: torch.Tensor, block: int) -> np.ndarray:
    """FP32 product of codes and scales, element by element of one matrix."""
    grid = scale.numpy().repeat(block, 0).repeat(block, 1)[: codes.shape[0], : codes.shape[1]]
    return codes.float().numpy() * grid


@settings(max_examples=25)
@given(
    rows=st.integers(1, 70),
    k=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0, 6, 30]),
    groups=st.sampled_from([(), (1,), (2,), (2, 1)]),
)
def test_codes_scales_and_report_are_those_of_exact_arithmetic(rows, k, seed, spread, groups) -> None:
    codes, scale = weight((*groups, rows, k), 32, seed, spread)
    before = (codes.view(torch.uint8).clone(), scale.clone())
    found = requantize_to_ue8m0(codes, scale, (32, 32))
    assert found.codes.shape == codes.shape and found.scale.shape == scale.shape and found.scale.is_contiguous()
    old_values, new_values = [], []
    for index in np.ndindex(*groups):
        old = values(codes[index], scale[index], 32)
        for i, j in np.ndindex(scale[index].shape):
            tile = np.s_[i * 32 : i * 32 + 32, j * 32 : j * 32 + 32]
            block_codes, byte = scalar.quantize_block(old[tile].flatten().tolist(), scalar.RULES["vllm-requantize"])
            assert codes_of(found.codes[index])[tile].flatten().tolist() == block_codes
            assert found.scale[index][i, j].item() == 2.0 ** (byte - 127)
        old_values.append(old.astype(np.float64))
        new_values.append(values(found.codes[index], found.scale[index], 32).astype(np.float64))
    old, new = np.concatenate(old_values), np.concatenate(new_values)
    change = np.abs(new - old)[old != 0] / np.abs(old[old != 0])
    # Two orders of a float64 sum: equal to the digits that a report shows.
    assert f"{found.max_relative_change:.9e}" == f"{change.max() if change.size else 0.0:.9e}"
    norm = np.linalg.norm(old)
    assert f"{found.relative_frobenius:.9e}" == f"{np.linalg.norm(new - old) / norm if norm else 0.0:.9e}"
    assert torch.equal(codes.view(torch.uint8), before[0]) and torch.equal(scale, before[1])


def test_gaussian_weights_lose_the_reported_share() -> None:
    """2.65 % in the Frobenius norm (vllm #58157)."""
    w = torch.from_numpy(np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)) * 0.02
    found = requantize_to_ue8m0(*quantize_matrix(w, "deep-gemm-block-fp32"))
    assert 0.0260 <= found.relative_frobenius <= 0.0270
    assert 0.06 <= found.max_relative_change <= 1.0  # a code that was the smallest may go


@pytest.mark.parametrize("exponent", [-13, 0, 9])
def test_powers_of_two_that_their_codes_fill_stay_as_they_are(exponent: int) -> None:
    codes, scale = weight((128, 256), 128)
    codes.view(torch.uint8)[0, ::128] = 0x7E  # 448: the scale is the smallest that holds the block
    scale = torch.full_like(scale, 2.0**exponent)
    found = requantize_to_ue8m0(codes, scale)
    assert torch.equal(found.scale, scale) and np.array_equal(codes_of(found.codes), codes_of(codes))
    assert (found.max_relative_change, found.relative_frobenius) == (0.0, 0.0)


def test_a_zero_weight_has_the_scale_of_the_floor() -> None:
    found = requantize_to_ue8m0(torch.zeros((256, 128)).to(torch.float8_e4m3fn), torch.ones((2, 1)))
    assert found.scale.tolist() == [[2.0**-22]] * 2 and not codes_of(found.codes).any()
    assert (found.max_relative_change, found.relative_frobenius) == (0.0, 0.0)


def test_the_scales_fit_the_packed_layout_that_refused_the_old_ones() -> None:
    codes, scale = weight((2, 256, 512), 128)
    with pytest.raises(ValueError, match="is not a power of two"):
        layout_weight_scales(scale, arch=SM100, rows=256)
    found = requantize_to_ue8m0(codes, scale)
    words = layout_weight_scales(found.scale, arch=SM100, rows=256)
    assert np.array_equal(exponent_bytes(words)[:, ::128], exponent_bytes(found.scale))


GOOD = weight((128, 256), 128)
BAD_SCALES = [0.0, -1.0, math.nan, math.inf]


@pytest.mark.parametrize("value", BAD_SCALES)
def test_a_scale_that_is_not_positive_and_finite_is_named(value: float) -> None:
    scale = GOOD[1].clone()
    scale[0, 1] = value
    with pytest.raises(ValueError, match=rf"scale\[0, 1\] = {value!r}; expected a positive finite number"):
        requantize_to_ue8m0(GOOD[0], scale)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_is_named(code: int) -> None:
    codes = GOOD[0].clone()
    codes.view(torch.uint8)[3, 200] = code
    with pytest.raises(ValueError, match=r"codes\[3, 200\] is a NaN"):
        requantize_to_ue8m0(codes, GOOD[1])


@pytest.mark.parametrize(
    "codes, scale, block, error, message",
    [
        (GOOD[0].float(), GOOD[1], (128, 128), TypeError, r"codes has dtype torch\.float32"),
        (GOOD[0], GOOD[1].double(), (128, 128), TypeError, r"scale has dtype torch\.float64; expected torch\.float32"),
        (GOOD[0], GOOD[1].T, (128, 128), ValueError, r"scale has shape \(2, 1\); codes \(128, 256\) need \(1, 2\)"),
        (GOOD[0], GOOD[1], (64, 128), ValueError, r"block=\(64, 128\) must be square"),
        (GOOD[0][0], GOOD[1], (128, 128), ValueError, r"codes has shape \(256,\)"),
    ],
)
def test_bad_arguments_are_named(codes, scale, block, error, message) -> None:
    with pytest.raises(error, match=message):
        requantize_to_ue8m0(codes, scale, block)
