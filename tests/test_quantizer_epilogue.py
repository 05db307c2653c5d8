"""Epilogues that rotate and quantise without a rounding between: bits, refusals, and how often they part from BF16."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scalar_quantizer as scalar
from oproj.activation import unpack_ue8m0
from oproj.engines.software.quantizer_table import QUANTIZERS
from oproj.engines.software.quantizers import inv_rope_fp8_quant, rotate_and_quantize
from quantizer_calls import codes_of, exponent_bytes, table_of

ROUTES = [(row.name, rotation) for row in QUANTIZERS.values() for rotation in row.rotations]


def call(tokens: int, groups: int, seed: int, exponents: list[int], dtype: torch.dtype) -> dict:
    """Arguments with two heads of 512 a group, blocks of several magnitudes, in a buffer with padding heads."""
    rng = np.random.default_rng(seed)
    shape = (tokens, 2 * groups, 512)
    spread = np.resize(2.0 ** np.array(exponents), (*shape[:2], 16)).repeat(32, axis=2)
    buffer = torch.full((tokens, 2 * groups + 1, 512), math.nan, dtype=dtype)
    o = buffer[:, :-1].copy_(torch.from_numpy((rng.standard_normal(shape) * spread).astype(np.float32)))
    table = table_of(rng.uniform(-4, 4, (5, 32)))
    positions = torch.from_numpy(rng.integers(0, 5, tokens))
    return {"o": o, "positions": positions, "cos_sin_cache": table, "n_groups": groups, "heads_per_group": 2}


@pytest.mark.parametrize("name, rotation", ROUTES)
@settings(max_examples=8)
@given(
    tokens=st.integers(1, 3),
    groups=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
    exponents=st.lists(st.sampled_from([-60, -30, -9, 0, 1, 40]), min_size=1, max_size=4),
    nan=st.booleans(),
    data=st.data(),
)
def test_bits_are_those_of_the_scalar_rotation_and_quantiser(
    name, rotation, tokens, groups, seed, exponents, nan, data
):
    row = QUANTIZERS[name]
    dtype = getattr(torch, data.draw(st.sampled_from(row.inputs)))
    args = call(tokens, groups, seed, exponents, dtype)
    if nan and row.nan_code is not None:
        args["o"][0, 0, seed % 512] = math.nan
    data_, scale = rotate_and_quantize(**args, quantizer=name, rotation=rotation)
    block = max(row.blocks)
    assert data_.stride() == (1024, tokens * 1024, 1) and scale.dtype == torch.int32
    aligned = -(-tokens // 4) * 4
    columns = 1024 // block // 4
    assert scale.shape == (tokens, groups, columns) and scale.stride() == (1, columns * aligned, aligned)
    expected = []
    for token, position in zip(args["o"].tolist(), args["positions"].tolist(), strict=True):
        for head in token:
            y = scalar.inverse_rotate(head, args["cos_sin_cache"][position].tolist(), rotation)
            expected.append(scalar.quantize_row(y, block, scalar.RULES[name]))
    codes, scale_bytes = (np.array(part).reshape(tokens, groups, -1) for part in zip(*expected, strict=True))
    np.testing.assert_array_equal(codes_of(data_), codes)
    np.testing.assert_array_equal(exponent_bytes(scale), scale_bytes)


def pairs_next_to_ties(lane: int) -> dict:
    """One head a token with scale 1, whose rotated lanes come within an ulp of a tie: the rounded product decides."""
    rng = np.random.default_rng(3)
    even, odd, c = rng.uniform(1, 2, (3, 8, 32)).astype(np.float32).astype(np.float64)
    tie = rng.choice(np.arange(17, 32, 2) / 16, (8, 32))
    s = (tie - even * c) / odd if lane == 0 else (odd * c - tie) / even
    o = np.zeros((8, 1, 512), np.float32)
    o[:, 0, 384] = 448
    o[:, 0, 448::2], o[:, 0, 449::2] = even, odd
    table = torch.from_numpy(np.concatenate([c, s], axis=1).astype(np.float32))
    turn = {"positions": torch.arange(8), "cos_sin_cache": table}
    return {"o": torch.from_numpy(o), **turn, "n_groups": 1, "heads_per_group": 1}


@pytest.mark.parametrize("lane", [0, 1])
def test_each_fused_side_decides_codes_of_its_own(lane: int) -> None:
    args, seen = pairs_next_to_ties(lane), []
    for rotation in QUANTIZERS["rope-quant"].rotations:
        found = codes_of(rotate_and_quantize(**args, rotation=rotation)[0])[:, 0, 448 + lane :: 2]
        for t, (head,) in enumerate(args["o"].tolist()):
            y = scalar.inverse_rotate(head, args["cos_sin_cache"][t].tolist(), rotation)
            expected = scalar.quantize_row(y[384:], 128, scalar.RULES["rope-quant"])[0]
            assert found[t].tolist() == expected[64 + lane :: 2]
        seen.append(found)
    assert all((a != b).any() for i, a in enumerate(seen) for b in seen[:i])


def test_an_empty_row_is_minus_448_at_the_floor_and_an_inf_is_refused() -> None:
    args = call(2, 1, 0, [0], torch.float32)
    args["o"][1] = math.nan  # 0/0: no keys
    data, scale = rotate_and_quantize(**args)
    assert (codes_of(data)[1] == 0xFE).all() and (exponent_bytes(scale)[1] == 85).all()
    args["o"][0, 1, 130] = -math.inf
    with pytest.raises(ValueError, match=r"an Inf in 1 blocks, .* = \(0, 5, 0\): undefined for rope-quant"):
        rotate_and_quantize(**args)


@pytest.mark.parametrize("value, where", [(math.nan, 0), (math.inf, 500)])
def test_what_the_v41_kernel_does_with_nan_and_inf_is_not_guessed(value: float, where: int) -> None:
    args = call(1, 1, 0, [0], torch.bfloat16)
    args["o"][0, 0, where] = value
    with pytest.raises(ValueError, match="a NaN or an Inf in 1 blocks"):
        rotate_and_quantize(**args, quantizer="vllm-v41-wo-a")


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"quantizer": "act-quant"}, ValueError, "rotation='fma_cos' is not declared by act-quant; declared: none"),
        (
            {"quantizer": "vllm-fused", "rotation": "fma_sin"},
            ValueError,
            "rotation='fma_sin' is not declared by vllm-f",
        ),
        (
            {"o": torch.ones((1, 2, 512)).bfloat16()},
            TypeError,
            r"o has dtype torch\.bfloat16; rope-quant takes torch\.f",
        ),
        ({"o": torch.ones((1, 3, 512))}, ValueError, "o has 3 heads"),
        ({"o": torch.ones((1, 2, 1024))[..., ::2]}, ValueError, "o has strides .*; the last one must be 1"),
        ({"positions": torch.tensor([7])}, ValueError, r"positions lie in 7\.\.7"),
    ],
)
def test_bad_arguments_are_named(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        rotate_and_quantize(**(call(1, 1, 0, [0], torch.float32) | changes))


# How often the epilogue parts from quantising the BF16 output --------------------------------------------------------


@cache
def disagreement() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bytes [heads, 4] and codes [heads, 4, 128] of both routes: 100,000 blocks, magnitudes log-uniform by head."""
    rng = np.random.default_rng(1)
    shape = (200, 125, 512)
    spread = 2.0 ** rng.uniform(-8, 8, (*shape[:2], 1))
    o = torch.from_numpy((rng.standard_normal(shape) * spread).astype(np.float32))
    turn = {"positions": torch.arange(200), "cos_sin_cache": table_of(rng.uniform(-np.pi, np.pi, (200, 32)))}
    sizes = {"n_groups": 25, "heads_per_group": 5}
    fused = rotate_and_quantize(o, **turn, **sizes)
    unfused = inv_rope_fp8_quant(o.bfloat16(), **turn, **sizes, tma_aligned_scales=True)
    split = [(unpack_ue8m0(s).reshape(-1, 4).numpy(), codes_of(d).reshape(-1, 4, 128)) for d, s in (fused, unfused)]
    return split[0][0].astype(int), split[1][0].astype(int), split[0][1], split[1][1]


def deviation(rate: float, count: int) -> float:
    return math.sqrt(rate * (1 - rate) / count)


def test_scale_bytes_part_in_three_of_a_thousand_blocks() -> None:
    """BF16 rounds a maximum within half an ulp above 448 * 2^k down to it: log2(1 + 1/448) = 0.32 % of magnitudes."""
    fused, unfused, _, _ = disagreement()
    plain, rate = (fused != unfused)[:, :3], math.log2(1 + 1 / 448)
    assert abs(plain.mean() - rate) <= 4 * deviation(rate, plain.size)
    assert set((unfused - fused)[:, :3][plain].tolist()) == {-1}  # where nothing is rotated, always one lower
    slack = 3 * deviation(rate, fused.size)
    assert 0.0030 - slack <= (fused != unfused).mean() <= 0.0033 + slack
    assert set(np.unique(unfused - fused)) <= {-1, 0, 1}


def test_codes_part_in_three_of_a_hundred_by_one_step() -> None:
    fused, unfused, codes, others = disagreement()
    same = fused == unfused
    differ = (codes != others) & same[..., None]
    rate = differ.sum() / (same.sum() * 128)
    assert 0.0305 <= rate <= 0.0325
    steps = np.where(codes < 128, codes.astype(int), 128 - codes.astype(int)) - np.where(
        others < 128, others.astype(int), 128 - others.astype(int)
    )
    assert set(np.unique(steps[:, :3][differ[:, :3]])) == {-1, 1}  # rotated pairs may cancel and part further


def test_the_difference_is_smaller_than_quantisation_noise() -> None:
    fused, unfused, codes, others = disagreement()
    first, second = (
        torch.from_numpy(c).view(torch.float8_e4m3fn).double().numpy() * 2.0 ** (b - 127)[..., None]
        for c, b in ((codes, fused), (others, unfused))
    )
    relative = math.sqrt(((first - second) ** 2).sum() / (first**2).sum())
    assert 0.0150 <= relative <= 0.0165
