"""Random numbers of the input families, and where in a tensor they go.

All randomness is raw output of NumPy's Philox counter generator, one stream per tensor and group, turned into numbers
by integer and exactly rounded operations alone. `Generator.standard_normal` is not used: its tails go through libm,
and NumPy may change how a Generator method spends its bits (NEP 19), while raw bit streams are fixed. So the same
Case gives the same bits on every machine.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 128  # activation lanes that share an amplitude; also the widest quantisation block
_E4M3_MAX = 448
WEIGHT_EXPONENT = -13  # codes near 150 become weights near 0.02, as in a trained projection

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Exponents = NDArray[np.int64]
Weights = tuple[Codes, Exponents]


class Stream:
    """Counter-based random integers for one tensor, keyed by the seed and the tensor's name.

    A longer request begins with the numbers of a shorter one, so a batch of 3 tokens is the head of a batch of 64.
    """

    def __init__(self, seed: int, *name: object) -> None:
        text = "/".join(map(str, (seed, *name)))
        self._key = hashlib.sha256(text.encode()).digest()

    def raw(self, purpose: str, count: int) -> NDArray[np.uint64]:
        """`count` random 64-bit words of the sub-stream `purpose`."""
        key = hashlib.sha256(self._key + purpose.encode()).digest()
        return np.random.Philox(key=int.from_bytes(key[:16], "little")).random_raw(count)

    def below(self, purpose: str, limit: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Integers 0 .. limit-1 (limit below 2**31; the multiply-shift bias is below limit * 2**-32)."""
        words = self.raw(purpose, math.prod(shape)) >> np.uint64(32)
        return ((words * np.uint64(limit)) >> np.uint64(32)).astype(np.int64).reshape(shape)

    def bell(self, purpose: str, shape: tuple[int, ...]) -> Floats:
        """Sums of four 16-bit uniforms, centred: standard deviation 0.58, at most 2 in size, exact in FP32."""
        words = self.raw(purpose, math.prod(shape))
        pairs = (words & np.uint64(0x0000FFFF0000FFFF)) + ((words >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
        sums = ((pairs + (pairs >> np.uint64(32))) & np.uint64(0xFFFFFFFF)).astype(np.int32) - 2 * 0xFFFF
        return np.ldexp(sums.astype(np.float32), -16).reshape(shape)

    def bell_codes(self, purpose: str, shape: tuple[int, ...]) -> Codes:
        """e4m3 codes of sums of four bytes, centred (standard deviation 148), clipped at 448."""
        count = math.prod(shape)
        words = self.raw(purpose, -(-count // 2))
        pairs = (words & np.uint64(0x00FF00FF00FF00FF)) + ((words >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
        sums = ((pairs + (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)).astype("<u8").view("<u4")
        return _BELL_TABLE[sums[:count]].reshape(shape)


def e4m3_value(code: int) -> float:
    """The number of a finite e4m3 code (1-4-3, bias 7)."""
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = math.ldexp(fraction + 8 if exponent else fraction, max(exponent, 1) - 10)
    return -magnitude if code & 0x80 else magnitude


def nearest_e4m3(value: float) -> int:
    """The e4m3 code nearest to `value`, ties to even, clipped at 448."""
    target = min(abs(value), float(_E4M3_MAX))
    code = min(range(0x7F), key=lambda c: (abs(e4m3_value(c) - target), c & 1))
    return code | (0x80 if value < 0 else 0)


_BELL_TABLE = np.array([nearest_e4m3(total - 510) for total in range(1021)], dtype=np.uint8)


def per_block(values: NDArray, width: int) -> NDArray:
    """Repeat block values [T, width / 128] over the lanes."""
    return np.repeat(values, BLOCK, axis=1)[:, :width]


def blocks(width: int) -> int:
    """Activation blocks of ``width`` lanes."""
    return -(-width // BLOCK)


@dataclass(frozen=True)
class Lanes:
    """Where one group's activations live: which tokens, which group of the whole model, how heads are cut."""

    tokens: int
    group: int
    width: int
    head_dim: int
    rope_dim: int

    @property
    def shape(self) -> tuple[int, int]:
        """[T, width]."""
        return (self.tokens, self.width)

    @property
    def block_shape(self) -> tuple[int, int]:
        """[T, blocks of 128 lanes]."""
        return (self.tokens, blocks(self.width))

    @property
    def rotated(self) -> NDArray[np.bool_]:
        """Which of the `width` lanes are turned by the rotation."""
        return np.arange(self.width) % self.head_dim >= self.head_dim - self.rope_dim


@dataclass(frozen=True)
class Tile:
    """Where one group's weights live: rows x K, and rows x K of one scale."""

    group: int
    rows: int
    k: int
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, K]."""
        return (self.rows, self.k)

    @property
    def block_shape(self) -> tuple[int, int]:
        """[row blocks, K blocks]."""
        return (-(-self.rows // self.block[0]), -(-self.k // self.block[1]))
