"""Rotary position embedding (RoFormer, arXiv 2104.09864) in float64: the table, and the inverse rotation.

Pair i of a head holds two neighbours of its last rope_dim values, (2i, 2i+1), and turns by position * f_i:
    plain  f_i = theta^(-2i/rope_dim)
    YaRN   f_i = theta^(-2i/rope_dim) * ((1 - r_i) + r_i/factor)             (arXiv 2309.00071, 3.2)
           r_i = clamp((i - low)/(high - low), 0, 1),  low = floor d(beta_fast),  high = ceil d(beta_slow)
           d(n) = rope_dim * ln(original_max_position/(2 pi n)) / (2 ln theta): the pair that turns n times in
           original_max_position tokens; low and high are kept in 0 .. rope_dim-1
The cosines and sines keep amplitude 1 (DeepSeek-V4 has mscale = mscale_all_dim = 0).
Inverse, a product with the conjugate:  even' = even cos + odd sin,  odd' = odd cos - even sin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.formats import as_float64


@dataclass(frozen=True)
class Yarn:
    """YaRN parameters; the defaults are those of DeepSeek-V4's compressed layers (with theta = 160000)."""

    factor: float = 16.0
    original_max_position: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if not (self.factor > 0 and self.original_max_position > 0 and self.beta_fast >= self.beta_slow > 0):
            raise ValueError(f"{self}: all must be positive, and beta_fast at least beta_slow")

    def ramp(self, rope_dim: int, theta: float) -> tuple[int, float]:
        """(low, high): pairs up to low keep their frequency, from high on it is divided by factor."""

        def pair(turns: float) -> float:
            cycles = self.original_max_position / (2 * math.pi * turns)
            return rope_dim * math.log(cycles) / (2 * math.log(theta))

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), rope_dim - 1)
        return low, max(high, low + 0.001)  # a step instead of 0/0, as in the published code


def _check(positions: Tensor, rope_dim: int) -> None:
    if rope_dim < 2 or rope_dim % 2:
        raise ValueError(f"rope_dim = {rope_dim} must be a positive even number")
    if positions.dtype != torch.int64 or positions.dim() != 1:
        raise ValueError(f"positions must be int64 [T], got {positions.dtype} {list(positions.shape)}")


def cos_sin(positions: Tensor, *, rope_dim: int = 64, theta: float = 10000.0, yarn: Yarn | None = None) -> Tensor:
    """Table rows of int64 positions [T]: float64 [T, rope_dim], rope_dim/2 cosines, then as many sines.

    Negative positions are the opposite rotation. An angle is off by at most 16 * 2^-53 times the plain one,
    |position| * theta^(-2i/rope_dim), for rope_dim a power of two. ValueError for arguments out of range.
    """
    _check(positions, rope_dim)
    if not theta > 1:
        raise ValueError(f"theta = {theta} must be above 1")
    pairs = torch.arange(rope_dim // 2, dtype=torch.float64, device=positions.device)
    frequency = theta ** (-2 * pairs / rope_dim)
    if yarn is not None:
        low, high = yarn.ramp(rope_dim, theta)
        ramp = ((pairs - low) / (high - low)).clamp(0, 1)
        frequency = frequency * ((1 - ramp) + ramp / yarn.factor)
    angles = positions.to(torch.float64)[:, None] * frequency
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def inverse_rope(o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, rope_dim: int = 64) -> Tensor:
    """o [T, ..., D] with the last rope_dim of its D values turned back by the angle of each token's position.

    o and cos_sin_cache [max_pos, rope_dim] (rows cos || sin): BF16, FP16, FP32 or FP64 of any strides; table
    entries are taken as they are. positions: int64 [T]. Returns a new contiguous float64 tensor like o.
    ValueError for shapes that do not fit and positions outside the table, TypeError for other dtypes.
    """
    _check(positions, rope_dim)
    if o.dim() < 2 or o.shape[-1] < rope_dim:
        raise ValueError(f"o must be [T, ..., D] with D >= rope_dim = {rope_dim}, got {list(o.shape)}")
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != rope_dim:
        raise ValueError(f"cos_sin_cache must be [max_pos, {rope_dim}], got {list(cos_sin_cache.shape)}")
    if len(positions) != len(o):
        raise ValueError(f"{len(positions)} positions for {len(o)} tokens of o")
    outside = positions[(positions < 0) | (positions >= len(cos_sin_cache))]
    if outside.numel():
        raise ValueError(f"position {int(outside[0])} is outside the table's 0 .. {len(cos_sin_cache) - 1}")
    rows = as_float64(cos_sin_cache[positions], "cos_sin_cache")
    per_token = (len(o), *[1] * (o.dim() - 2), rope_dim // 2)
    cos, sin = (half.reshape(per_token) for half in rows.chunk(2, dim=-1))
    out = as_float64(o, "o").clone(memory_format=torch.contiguous_format)
    rotary = out[..., -rope_dim:]
    even, odd = rotary[..., 0::2], rotary[..., 1::2]
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1)
    rotary.copy_(turned.flatten(-2))
    return out
