"""Operands for the tests of the bounds: codes that stress a tensor core, scales in each architecture's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import exact_fp8 as exact
from oproj.arch import ARCHS

ONE = 0x38
SUBNORMAL = [*range(1, 8), *range(0x81, 0x88)]
FINITE = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
E4M3_VALUES = np.array([float(exact.value(c)) if c & 0x7F != 0x7F else np.nan for c in range(256)])
FAMILIES = ("any", "normal", "subnormal", "positive", "cancelling", "sparse", "breaks_kappa_1")


def codes(rng: np.random.Generator, family: str, shape: tuple[int, ...], other: bool) -> np.ndarray:
    """e4m3 codes of a family; ``other`` is the weight side."""
    if family == "normal":
        scaled = torch.from_numpy(rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6)).clamp(-448, 448)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if family == "subnormal":
        tiny = rng.random(shape) < 0.8
        return np.where(tiny, rng.choice(SUBNORMAL, shape), rng.choice(FINITE, shape)).astype(np.uint8)
    drawn = rng.choice(FINITE, shape)
    if family == "positive":
        return drawn & 0x7F
    if family == "sparse":
        return np.where(rng.random(shape) < 0.9, rng.choice([0, 0x80], shape), drawn).astype(np.uint8)
    if family == "cancelling":
        drawn[..., 1::2] = drawn[..., ::2] ^ (0 if other else 0x80)
        drawn[..., -1] = rng.integers(1, 0x40)
    if family == "breaks_kappa_1":  # 2^-9 * 256, then 31 products of 1.875*2^-6 * 2^-6, in every step of 32
        drawn[...] = 0x08 if other else 0x0F
        drawn[..., ::32] = 0x78 if other else 0x01
    return drawn


@dataclass(frozen=True)
class Problem:
    """Operands in the layout of ``arch``, and the scales of one output as the scalar chain takes them."""

    arch: str
    a: np.ndarray
    a_scales: torch.Tensor
    w: np.ndarray
    w_scales: torch.Tensor
    gran_k: int | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.arch, torch.from_numpy(self.a), self.a_scales, torch.from_numpy(self.w), self.w_scales

    def scales(self, t: int, g: int, r: int) -> list:
        if self.gran_k is None:
            return list(zip(self.a_scales[t, g].tolist(), self.w_scales[g, r // 128].tolist(), strict=True))
        steps = [words.contiguous().view(torch.uint8).tolist() for words in (self.a_scales[t, g], self.w_scales[g, r])]
        sums = [x + y - 254 for x, y in zip(*steps, strict=True)][: self.a.shape[2] // self.gran_k]
        return [s for s in sums for _ in range(self.gran_k // 32)]

    def output(self, t: int, g: int, r: int, fused: bool = True) -> exact.Output:
        row = exact.ROWS[self.arch]
        return exact.chain(row, self.a[t, g].tolist(), self.w[g, r].tolist(), self.scales(t, g, r), fused)


def problem(arch: str, family: str, scales: str, seed: int, shape: tuple[int, int, int, int]) -> Problem:
    """Random operands; scales: ``general`` FP32 (bytes 0-159), ``tiny`` (FP32-subnormal terms) or ``powers`` of 2."""
    rng, (tokens, groups, rows, depth) = np.random.default_rng(seed), shape
    a = codes(rng, family, (tokens, groups, depth), other=False)
    w = codes(rng, family, (groups, rows, depth), other=True)
    if exact.ROWS[arch].promotion:
        shapes = (tokens, groups, depth // 128), (groups, -(-rows // 128), depth // 128)
        low, high = (-62, -50) if scales == "tiny" else (-12, 5)
        drawn = [np.exp2(rng.integers(low, high, s)) * (1 if scales == "powers" else rng.random(s) + 1) for s in shapes]
        fp32 = [torch.from_numpy(s.astype(np.float32)) for s in drawn]
        return Problem(arch, a, fp32[0], w, fp32[1])
    gran_k = int(rng.choice([32, 128]))
    words = -(-depth // (4 * gran_k)) * 4
    low, high = {"general": (0, 160), "tiny": (0, 70), "powers": (110, 130)}[scales]
    packed = [
        torch.from_numpy(rng.integers(low, high, (*s, words)).astype(np.uint8)).view(torch.int32)
        for s in ((tokens, groups), (groups, rows))
    ]
    return Problem(arch, a, packed[0], w, packed[1], gran_k)


def indices(p: Problem) -> list[tuple[int, int, int]]:
    return list(np.ndindex(p.a.shape[0], p.a.shape[1], p.w.shape[1]))


problems = st.builds(
    problem,
    st.sampled_from(sorted(ARCHS)),
    st.sampled_from(FAMILIES),
    st.sampled_from(["powers", "general", "tiny"]),
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.sampled_from([128, 256, 512])),
)


def unit_scales(arch: str, a: np.ndarray, w: np.ndarray) -> Problem:
    """Codes ``[T, G, K]`` and ``[G, R, K]`` with scales of one."""
    depth = a.shape[2]
    if exact.ROWS[arch].promotion:
        blocks = depth // 128
        return Problem(arch, a, torch.ones(*a.shape[:2], blocks), w, torch.ones(len(w), -(-w.shape[1] // 128), blocks))
    words = [torch.full((*codes.shape[:2], -(-depth // 512)), 0x7F7F7F7F, dtype=torch.int32) for codes in (a, w)]
    return Problem(arch, a, words[0], w, words[1], 128)


def one_step(arch: str, a: dict[int, int], w: dict[int, int], depth: int = 128) -> Problem:
    """One output of unit scales: the given codes at the given k, zero elsewhere."""
    sides = np.zeros((2, 1, 1, depth), np.uint8)
    for side, placed in zip(sides, (a, w), strict=True):
        side[0, 0, list(placed)] = list(placed.values())
    return unit_scales(arch, sides[0], sides[1])


def quantize(y: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Nearest e4m3 value times scale: the quotient in FP32, ties to even codes, clamped to 448."""
    quotient = (y.astype(np.float32) / scales.astype(np.float32)).astype(np.float64)
    codes = torch.from_numpy(np.clip(quotient, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return E4M3_VALUES[codes] * scales
