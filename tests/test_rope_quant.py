"""RopeQuant: when it applies, its buffers and positions, and the model of its epilogue as a producer for ``wo_a``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scalar_quantizer as scalar
from o_proj_arguments import RANK, fp8_weight, same_bits
from oproj.engines.software import SoftwareEngine
from oproj.o_proj import deep_gemm_fp8_o_proj
from oproj.rope_quant import (
    query_positions,
    rope_quant_attn_out,
    rope_quant_unsupported_reason,
    software_rope_quant,
)
from quantizer_calls import table_of

E4M3 = torch.float8_e4m3fn


def raw_words(scale: torch.Tensor) -> torch.Tensor:
    """All int32 words of a scale's storage, padding included."""
    return torch.empty(0, dtype=torch.int32).set_(scale.untyped_storage())


# When it applies ----------------------------------------------------------------------------------------------------


def layer(heads: int = 128, cache: torch.dtype = E4M3, weight: torch.dtype = E4M3) -> Any:
    wo_a = SimpleNamespace(weight=torch.empty(1, dtype=weight))
    return SimpleNamespace(n_local_heads=heads, kv_cache_torch_dtype=cache, wo_a=wo_a)


@pytest.mark.parametrize(
    "found, reason",
    [
        (layer(), None),
        (layer(64), "n_local_heads is 64"),
        (layer(64, torch.bfloat16, torch.bfloat16), "n_local_heads is 64"),
        (layer(cache=torch.bfloat16), "kv_cache_torch_dtype is torch.bfloat16"),
        (layer(cache=torch.uint8, weight=torch.bfloat16), "kv_cache_torch_dtype is torch.uint8"),
        (layer(weight=torch.bfloat16), "wo_a.weight has dtype torch.bfloat16"),
    ],
)
def test_the_first_reason_in_order_is_told(found: Any, reason: str | None) -> None:
    told = rope_quant_unsupported_reason(found)
    assert told is None if reason is None else told is not None and told.startswith(reason)


# Buffers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5])
def test_buffers_have_the_layout_and_a_zeroed_tail(tokens: int) -> None:
    for _ in range(2):  # freed memory is used again, so that zeros are not there by accident
        raw_words(rope_quant_attn_out(tokens).scale).fill_(-1)
    x, aligned = rope_quant_attn_out(tokens), (tokens + 3) // 4 * 4
    assert (x.data.dtype, x.data.shape) == (E4M3, (tokens, 16, 4096)) and x.orig_dtype == torch.bfloat16
    assert (x.scale.dtype, x.scale.shape) == (torch.int32, (tokens, 16, 8)) and x.orig_shape == x.data.shape
    if tokens:
        assert x.data.stride() == (4096, 4096 * tokens, 1)
        assert x.scale.stride() == (1, 8 * aligned, aligned)
        words = raw_words(x.scale)
        assert words.shape == (16 * 8 * aligned,)
        assert not words.view(128, aligned)[:, tokens:].any()


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens=-1"):
        rope_quant_attn_out(-1)


# Positions ----------------------------------------------------------------------------------------------------------


@given(requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9000)), min_size=1, max_size=5))
def test_positions_count_up_to_the_last_of_each_request(requests: list[tuple[int, int]]) -> None:
    expected = [past + i for q_len, past in requests for i in range(q_len)]
    seq_lens = torch.tensor([q_len + past for q_len, past in requests], dtype=torch.int32)
    cumulative = torch.tensor(np.cumsum([0] + [q_len for q_len, _ in requests]), dtype=torch.int32)
    found = query_positions(seq_lens, cum_seq_lens_q=cumulative)
    assert found.dtype == torch.int64 and found.tolist() == expected
    q_len = requests[0][0]
    same = torch.tensor([q_len + past for _, past in requests])
    assert query_positions(same, q_len=q_len).tolist() == [past + i for _, past in requests for i in range(q_len)]


LENS = torch.tensor([4, 2])


@pytest.mark.parametrize(
    "seq_lens, keywords, message",
    [
        (LENS, {}, "expected exactly one"),
        (LENS, {"q_len": 1, "cum_seq_lens_q": LENS}, "expected exactly one"),
        (LENS, {"q_len": -1}, "q_len=-1"),
        (LENS, {"q_len": 3}, r"seq_lens=\[4, 2\] must be at least the query lengths \[3, 3\]"),
        (LENS.float(), {"q_len": 1}, "seq_lens has shape .* torch.float32"),
        (LENS, {"cum_seq_lens_q": torch.tensor([0, 1])}, r"cum_seq_lens_q=\[0, 1\] must have 3 entries"),
        (LENS, {"cum_seq_lens_q": torch.tensor([1, 1, 2])}, "must have 3 entries from 0 on"),
        (LENS, {"cum_seq_lens_q": torch.tensor([0, 2, 1])}, "must not fall"),
    ],
)
def test_bad_lengths_are_named(seq_lens: torch.Tensor, keywords: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        query_positions(seq_lens, **keywords)


# The epilogue's model -----------------------------------------------------------------------------------------------


def accumulators(tokens: int, seed: int = 0) -> torch.Tensor:
    """FP32 [T, 128, 512] with more bits than BF16 and magnitudes that differ by token, head and block."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, 128, 512)) * 2.0 ** rng.integers(-20, 20, (tokens, 128, 4)).repeat(
        128, axis=2
    )
    return torch.from_numpy(values.astype(np.float32))


@settings(max_examples=6)
@given(tokens=st.integers(1, 5), seed=st.integers(0, 99), lanes=st.sets(st.integers(0, 127), min_size=2, max_size=3))
def test_codes_and_scale_bytes_lie_where_the_consumer_reads_them(tokens: int, seed: int, lanes: set[int]) -> None:
    o, table = accumulators(tokens, seed), table_of(np.random.default_rng(seed).uniform(-4, 4, (9, 32)))
    positions = torch.arange(tokens) + seed % 4
    x, m = software_rope_quant(o, positions, table), (tokens + 3) // 4 * 4
    codes = torch.empty(0, dtype=torch.uint8).set_(x.data.untyped_storage()).numpy().reshape(16, tokens, 4096)
    scale_bytes = raw_words(x.scale).numpy().view(np.uint8)
    for t, h in ((t, h) for t in range(tokens) for h in lanes):
        y = np.array(scalar.inverse_rotate(o[t, h].tolist(), table[positions[t]].tolist(), "fma_cos"), np.float64)
        found = codes[h // 8, t, h % 8 * 512 : h % 8 * 512 + 512]
        for block in range(4):
            lane = slice(128 * block, 128 * block + 128)
            byte = int(scale_bytes[((h // 8 * 8 + h % 8) * m + t) * 4 + block])
            amax = max(np.abs(y[lane]).max(), np.float32(1e-10))
            assert amax <= 448 * 2.0 ** (byte - 127) < 2 * amax
            scaled = torch.from_numpy((y[lane] * 2.0 ** (127 - byte)).astype(np.float32))
            assert np.array_equal(found[lane], scaled.to(E4M3).view(torch.uint8).numpy())


def test_an_empty_row_is_minus_448_with_the_floor_as_scale() -> None:
    o = torch.zeros(1, 128, 512)
    o[0, 1] = torch.nan
    x = software_rope_quant(o, torch.zeros(1, dtype=torch.int64), table_of(np.zeros((1, 32))))
    assert set(x.data.view(torch.uint8)[0, 0, 512:1024].tolist()) == {0xFE}
    assert set(x.data.view(torch.uint8)[0, 0, :512].tolist()) == {0}
    assert x.scale[0, 0].tolist() == [0x55555555] * 8


def test_padding_words_of_a_given_buffer_stay_as_they_are() -> None:
    out = rope_quant_attn_out(3)
    raw_words(out.scale).fill_(-1)
    args = (accumulators(3), torch.arange(3), table_of(np.ones((3, 32))))
    assert software_rope_quant(*args, out) is out
    assert (raw_words(out.scale).view(128, 4)[:, 3] == -1).all() and not (out.scale == -1).any()
    fresh = software_rope_quant(*args)
    assert torch.equal(fresh.scale, out.scale) and torch.equal(fresh.data.view(torch.uint8), out.data.view(torch.uint8))
    assert len(software_rope_quant(args[0][:0], args[1][:0], args[2]).data) == 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"o": torch.zeros(2, 64, 512)}, r"o has shape \(2, 64, 512\)"),
        ({"o": torch.zeros(2, 128, 512).bfloat16()}, "o has dtype torch.bfloat16"),
        ({"positions": torch.tensor([0, 3])}, "positions lie in 0..3"),
        ({"positions": torch.tensor([0])}, "positions has 1 entries"),
        ({"out": rope_quant_attn_out(3)}, r"out.data has shape \(3, 16, 4096\)"),
    ],
)
def test_bad_arguments_of_the_model_are_named(changes: dict[str, Any], message: str) -> None:
    basis: dict[str, Any] = {"o": torch.zeros(2, 128, 512), "positions": torch.arange(2)}
    with pytest.raises((TypeError, ValueError), match=message):
        software_rope_quant(**basis | {"cos_sin_cache": torch.zeros(3, 64)} | changes)


# Its consumer -------------------------------------------------------------------------------------------------------


def weight(groups: int) -> Any:
    rng = np.random.default_rng(5)
    codes = rng.choice(np.array([0x38, 0x40, 0xB8, 0xC0], np.uint8), (groups, RANK, 4096))
    return fp8_weight("sm100", codes, 2.0 ** rng.integers(-3, 3, (groups, 1, 32)).astype(np.float32))


def consume(o: Any, positions: torch.Tensor, table: torch.Tensor, groups: int, wo_b: Any = lambda flat: flat) -> Any:
    sizes = {"n_groups": groups, "heads_per_group": 8, "nope_dim": 448, "rope_dim": 64, "o_lora_rank": RANK}
    how = {"einsum_recipe": (1, 1, 128), "tma_aligned_scales": True, "engine": SoftwareEngine("sm100")}
    return deep_gemm_fp8_o_proj(o, positions, table, weight(groups), wo_b, **sizes, **how)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("groups", [16, 3])
def test_the_consumer_gets_the_unfused_z_where_bf16_loses_nothing(tokens: int, groups: int) -> None:
    """Quarter turns and BF16 values: rotation is exact and rounding to BF16 changes nothing, so the paths agree."""
    o = accumulators(tokens).bfloat16()
    turns = np.random.default_rng(2).integers(0, 4, (8, 32))
    cos, sin = np.array([1.0, 0, -1, 0])[turns], np.array([0.0, 1, 0, -1])[turns]
    table = torch.from_numpy(np.concatenate([cos, sin], 1).astype(np.float32))
    positions = query_positions(torch.tensor([tokens + 2]), q_len=tokens)
    x = software_rope_quant(o.float(), positions, table)
    x.data.view(torch.uint8)[:, groups:], x.scale[:, groups:] = 0x7F, -1  # dead slots hold NaN
    live = o[:, : 8 * groups]
    z = consume(x, positions, table, groups)
    assert z.shape == (tokens, groups * RANK) and not z.isnan().any()
    assert same_bits(z, consume(live, positions, table, groups))
    if tokens:
        assert not same_bits(z, consume(live, positions + 1, table, groups)), "the rotation must count"


def test_a_scale_from_other_slots_does_not_pass() -> None:
    o, positions, table = accumulators(2), torch.arange(2), table_of(np.ones((2, 32)))
    x, wrong = software_rope_quant(o, positions, table), rope_quant_attn_out(2)
    wrong.data = x.data
    wrong.scale.copy_(x.scale.roll(1, 1))
    assert not same_bits(consume(x, positions, table, 3), consume(wrong, positions, table, 3))
