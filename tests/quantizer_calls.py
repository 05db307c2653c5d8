"""What the tests of the quantisers share: how a call is made, how scales are read, and what the scalar model says."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

import scalar_quantizer as scalar

Call = dict[str, Any]


def bf16(bits: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits, np.uint16).view(np.int16)).view(torch.bfloat16)


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def codes_of(data: torch.Tensor) -> np.ndarray:
    assert data.dtype == torch.float8_e4m3fn
    return data.contiguous().view(torch.uint8).numpy()


def table_of(angles: Any) -> torch.Tensor:
    """FP32 rows of cosines, then sines; angles [rows, rope_dim/2]."""
    return torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))


def call(o: torch.Tensor, table: torch.Tensor, **changes: Any) -> Call:
    """Arguments of one call: one group of all heads, positions 0, 1, ..., blocks of 32."""
    tokens, heads, head_dim = o.shape
    rope_dim = table.shape[1]
    basis: Call = {"o": o, "positions": torch.arange(tokens), "cos_sin_cache": table}
    basis |= {"n_groups": 1, "heads_per_group": heads, "nope_dim": head_dim - rope_dim, "rope_dim": rope_dim}
    return basis | {"quant_group_size": 32} | changes


def random_call(tokens: int, groups: int = 2, seed: int = 0, **changes: Any) -> Call:
    """Heads of 448 + 64 dims, two a group, with magnitudes that differ by block and a table that rotates."""
    rng = np.random.default_rng(seed)
    shape = (tokens, 2 * groups, 512)
    o = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, (*shape[:2], 16)).repeat(32, axis=2)
    table = table_of(rng.uniform(-4, 4, (tokens + 3, 32)))
    basis = call(torch.from_numpy(o).bfloat16(), table, n_groups=groups, heads_per_group=2, quant_group_size=128)
    return basis | {"positions": torch.from_numpy(rng.integers(0, tokens + 3, tokens))} | changes


def exponent_bytes(scale: torch.Tensor) -> np.ndarray:
    """UE8M0 bytes [..., blocks] of either scale format, by struct alone; an infinite FP32 scale reads as 255."""
    words = scale.contiguous().view(torch.int32).numpy()
    if scale.dtype == torch.int32:
        packed = struct.pack(f"<{words.size}i", *words.flatten().tolist())
        return np.frombuffer(packed, np.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])
    assert not (words & 0x007FFFFF).any() and (words >= 0).all(), "an FP32 scale is no power of two"
    return (words >> 23).astype(np.uint8)


def model(args: Call, variant: str = "fma_cos") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotated values (float64) and codes [T, G, K], bytes [T, G, blocks] of the scalar model."""
    rows = args["cos_sin_cache"].tolist()
    values, codes, scale_bytes = [], [], []
    for token, position in zip(bits_of(args["o"]).tolist(), args["positions"].tolist(), strict=True):
        for head in token:
            y = scalar.inverse_rotate([scalar.bf16_value(b) for b in head], rows[position], variant)
            c, b = scalar.quantize_row(y, args["quant_group_size"], scalar.FUSED)
            values.append(y)
            codes.append(c)
            scale_bytes.append(b)
    shape = (len(args["o"]), args["n_groups"], -1)
    return (
        np.array(values, np.float64).reshape(shape),
        np.array(codes, np.uint8).reshape(shape),
        np.array(scale_bytes, np.uint8).reshape(shape),
    )
