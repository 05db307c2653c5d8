"""cos/sin tables of the two layer kinds, FP32, the same bits on every machine.

Sliding-window layers use plain RoPE with theta 10,000, compressed layers theta 160,000 with YaRN (vLLM 0.33.0
``deepseek_v4/common/rope.py``). The serving engine forms ``angle = fl32(position) * inverse_frequency`` in FP32 and
takes FP32 cosines; so do these tables, except that the cosine itself is evaluated in float64 and rounded once, since
FP32 library cosines differ between machines in their last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


@dataclass(frozen=True)
class Rope:
    """Frequencies of one layer kind. ``factor`` 1 is plain RoPE; the amplitude is exactly 1 (mscale 0)."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position: int = 1_048_576
    beta_fast: float = 32.0
    beta_slow: float = 1.0


ROPES: dict[str, Rope] = {rope.kind: rope for rope in (Rope("plain", 10_000.0), Rope("yarn", 160_000.0, 16.0, 65_536))}


def get_rope(kind: Rope | str) -> Rope:
    """A layer kind by name ("plain", "yarn"); ``ValueError`` lists the known ones."""
    if isinstance(kind, Rope):
        return kind
    try:
        return ROPES[kind]
    except KeyError:
        raise ValueError(f"rope kind={kind!r} is unknown; known kinds: {', '.join(ROPES)}") from None


def correction_range(rope: Rope, rope_dim: int) -> tuple[int, int]:
    """Pairs between which YaRN ramps from unscaled to scaled frequencies (15 and 25 for V4's compressed layers)."""

    def pair(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * np.pi)
        return rope_dim * np.log(turns) / (2 * np.log(rope.theta))

    return max(int(np.floor(pair(rope.beta_fast))), 0), min(int(np.ceil(pair(rope.beta_slow))), rope_dim - 1)


def inverse_frequencies(kind: Rope | str, rope_dim: int = 64) -> np.ndarray:
    """FP32 inverse frequencies ``[rope_dim/2]``."""
    rope = get_rope(kind)
    one = np.float32(1)
    power = (rope.theta ** (np.arange(0, rope_dim, 2) / rope_dim)).astype(np.float32)
    plain = one / power
    if rope.factor == 1.0:
        return plain
    low, high = correction_range(rope, rope_dim)
    ramp = (np.arange(rope_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 0.001))
    keep = one - np.clip(ramp, 0, 1).astype(np.float32)
    scaled = one / (np.float32(rope.factor) * power)
    return scaled * (one - keep) + plain * keep


def cos_sin_rows(kind: Rope | str, positions: np.ndarray, rope_dim: int = 64) -> np.ndarray:
    """FP32 table rows ``[n, rope_dim]`` (cosines, then sines) of integer positions ``[n]``."""
    angle = positions.astype(np.float32)[:, None] * inverse_frequencies(kind, rope_dim)
    exact = angle.astype(np.float64)
    return np.concatenate([np.cos(exact), np.sin(exact)], axis=1).astype(np.float32)


def cos_sin_cache(kind: Rope | str, max_position: int, rope_dim: int = 64) -> torch.Tensor:
    """The FP32 table ``[max_position, rope_dim]`` of a layer kind (256 MiB at 2**20); shared: do not write to it.

    Raises ``ValueError`` for an unknown kind, a non-positive length or an odd ``rope_dim``.
    """
    if max_position < 1 or rope_dim < 2 or rope_dim % 2:
        raise ValueError(f"max_position={max_position} must be positive and rope_dim={rope_dim} even and positive")
    return _table(get_rope(kind), max_position, rope_dim)


@lru_cache(maxsize=4)
def _table(rope: Rope, max_position: int, rope_dim: int) -> torch.Tensor:
    table = np.empty((max_position, rope_dim), np.float32)
    for start in range(0, max_position, 1 << 16):  # in pieces: the float64 angles never need more than 32 MiB
        piece = slice(start, min(start + (1 << 16), max_position))
        table[piece] = cos_sin_rows(rope, np.arange(piece.start, piece.stop), rope_dim)
    return torch.from_numpy(table)
