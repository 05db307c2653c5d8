"""Operands of an FP8 GEMM as the bounds read them: e4m3 codes, scales in an architecture's own layout, refusals.

Everything that lies outside the hypothesis of a bound is found here, before any arithmetic, and named.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from oproj.arch import Arch

WEIGHT_BLOCK_ROWS = 128  # rows of a weight that share one FP32 scale (DeepGEMM recipe (1, 128, 128))
UE8M0_NAN = 255


class NotApplicable(ValueError):
    """The operands lie outside the hypothesis of a bound: no number is better than a loose one."""


def _e4m3_tables() -> tuple[np.ndarray, np.ndarray]:
    """Value of every e4m3 code, and ``2**e`` of its significand before normalisation (0 for a zero code)."""
    code = np.arange(256)
    exponent = np.maximum((code >> 3) & 15, 1) - 7
    significand = np.where((code >> 3) & 15, 8 + (code & 7), code & 7)
    values = np.where(code & 0x80, -1.0, 1.0) * significand * 2.0 ** (exponent - 3)
    values[(code & 0x7F) == 0x7F] = np.nan
    return values, np.where(significand, 2.0**exponent, 0.0)


E4M3_VALUES, E4M3_POWERS = _e4m3_tables()
E4M3_SUBNORMAL = np.isin(np.arange(256) & 0x7F, range(1, 8))


def to_numpy(x: Any, name: str) -> np.ndarray:
    """A NumPy view of a CPU tensor, or an array of what is given; ``ValueError`` for a tensor elsewhere."""
    if isinstance(x, torch.Tensor):
        if x.device.type != "cpu":
            raise ValueError(f"{name} is on {x.device}; bounds are computed on the CPU")
        return x.detach().numpy()
    return np.asarray(x)


def to_float64(x: Any, name: str) -> np.ndarray:
    """Values in float64, exact: any dtype of torch or NumPy, or plain numbers."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        x = x.double()
    return np.asarray(to_numpy(x, name), dtype=np.float64)


def finite_float64(x: Any, name: str) -> np.ndarray:
    """``to_float64``; ``NotApplicable`` names the first NaN or infinite element."""
    values = to_float64(x, name)
    refuse_where(~np.isfinite(values), name, values, "is not finite")
    return values


def e4m3_codes(x: Any, name: str) -> np.ndarray:
    """Codes as uint8 from a float8_e4m3fn or uint8 tensor, or a uint8 array; ``TypeError`` for another dtype."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn:
        x = x.view(torch.uint8)
    codes = to_numpy(x, name)
    if codes.dtype != np.uint8:
        raise TypeError(f"{name} has dtype {codes.dtype}; e4m3 codes are float8_e4m3fn or uint8")
    return codes


def refuse_where(bad: np.ndarray, name: str, values: np.ndarray, why: str) -> None:
    """Raise ``NotApplicable`` naming the first of the ``bad`` elements, its value and how many there are."""
    if not bad.any():
        return
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    raise NotApplicable(f"{name}{list(index)} = {values[index]!s} {why} ({int(bad.sum())} of {bad.size} elements)")


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b`` in float64 on as many threads as PyTorch may use; NumPy's own would take every core in each process."""
    return (torch.from_numpy(np.ascontiguousarray(a)) @ torch.from_numpy(np.ascontiguousarray(b))).numpy()


@dataclass(frozen=True)
class GemmOperands:
    """Codes ``[T, G, K]`` and ``[G, R, K]`` (uint8) with either kind of scales.

    exps: ``sa`` and ``sb`` of every step, int32 ``[T, G, K/k]`` and ``[G, R, K/k]`` (zero when scales are outside);
    scales: FP32 ``[T, G, K/128]`` and ``[G, R/128, K/128]`` (no columns when scales are inside).
    """

    a_codes: np.ndarray
    w_codes: np.ndarray
    a_exps: np.ndarray
    w_exps: np.ndarray
    a_scales: np.ndarray
    w_scales: np.ndarray

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(T, G, R)`` of the outputs."""
        return (*self.a_codes.shape[:2], self.w_codes.shape[1])

    @property
    def depth(self) -> int:
        """K."""
        return self.a_codes.shape[2]

    def backwards(self) -> GemmOperands:
        """The same with K from its end."""
        return GemmOperands(*(np.ascontiguousarray(getattr(self, f.name)[..., ::-1]) for f in fields(self)))

    def activation_block(self, group: int, tokens: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, exponents and scales of some tokens of one group, contiguous."""
        parts = (self.a_codes[tokens, group], self.a_exps[tokens, group], self.a_scales[tokens, group])
        return tuple(np.ascontiguousarray(part) for part in parts)  # type: ignore[return-value]

    def weight_tile(self, group: int, first: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes ``[K, columns]``, exponents ``[K/k, columns]`` (zero behind R) and scales of the tile's row block."""
        rows = slice(first, first + columns)
        codes, exps = self.w_codes[group, rows], self.w_exps[group, rows]
        padding = ((0, 0), (0, columns - codes.shape[0]))
        block = first // WEIGHT_BLOCK_ROWS
        scales = self.w_scales[group, block] if self.w_scales.size else np.empty(0, np.float32)
        parts = (np.pad(codes.T, padding), np.pad(exps.T, padding), scales)
        return tuple(np.ascontiguousarray(part) for part in parts)  # type: ignore[return-value]

    def activations(self, group: int) -> np.ndarray:
        """Dequantised activations of one group, float64 ``[T, K]``, exact."""
        return E4M3_VALUES[self.a_codes[:, group]] * self.activation_scales(group)

    def activation_scales(self, group: int) -> np.ndarray:
        """Scale of every activation of one group, float64 ``[T, K]``."""
        return _spread(self.a_exps[:, group], self.a_scales[:, group], self.depth)

    def weights(self, group: int) -> np.ndarray:
        """Dequantised weights of one group, float64 ``[R, K]``, exact."""
        rows, scales = self.w_codes.shape[1], self.w_scales[group]
        per_row = np.repeat(scales, WEIGHT_BLOCK_ROWS, axis=0)[:rows]
        return E4M3_VALUES[self.w_codes[group]] * _spread(self.w_exps[group], per_row, self.depth)


def _spread(exps: np.ndarray, scales: np.ndarray, depth: int) -> np.ndarray:
    if scales.shape[-1]:
        return np.repeat(scales.astype(np.float64), depth // scales.shape[-1], axis=-1)
    return np.repeat(np.exp2(exps.astype(np.float64)), depth // exps.shape[-1], axis=-1)


def gemm_operands(
    arch: Arch, a_codes: Any, a_scales: Any, w_codes: Any, w_scales: Any, gran_k: int | None = None
) -> GemmOperands:
    """Check and read the operands of ``z[t, g, r] = sum_k a[t, g, k] * w[g, r, k]``.

    Codes: float8_e4m3fn or uint8, ``[T, G, K]`` and ``[G, R, K]``, any strides. Scales in the layout of ``arch``:
    FP32 ``[T, G, K/128]`` and ``[G, ceil(R/128), K/128]``, or packed UE8M0 int32 ``[T, G, K/(4*gran_k)]`` and
    ``[G, R, K/(4*gran_k)]`` where ``gran_k`` (32 or 128) is told by the shapes unless K is so small that both fit.
    Raises ``ValueError``/``TypeError`` for bad arguments and ``NotApplicable`` for a NaN code, a NaN, infinite, zero,
    negative or underflowing scale, K off the granularity, or no output at all.
    """
    a, w = e4m3_codes(a_codes, "a_codes"), e4m3_codes(w_codes, "w_codes")
    if a.ndim != 3 or w.ndim != 3 or a.shape[1] != w.shape[0] or a.shape[2] != w.shape[2]:
        raise ValueError(f"a_codes {a.shape} and w_codes {w.shape} must be [T, G, K] and [G, R, K] of equal G and K")
    if a.size == 0 or w.size == 0:
        raise NotApplicable(f"a_codes {a.shape} and w_codes {w.shape} have no output to bound")
    step = arch.promotion_k or arch.mma.k
    if a.shape[2] % step:
        raise NotApplicable(f"K={a.shape[2]} is not a multiple of {step}, as the chain of {arch.name} needs")
    for codes, name in ((a, "a_codes"), (w, "w_codes")):
        refuse_where((codes & 0x7F) == 0x7F, name, codes, "is a NaN code")
    if arch.mma.scales_inside:
        return _inside(arch, a, w, a_scales, w_scales, gran_k)
    return _outside(arch, a, w, a_scales, w_scales)


def _inside(arch: Arch, a: np.ndarray, w: np.ndarray, a_scales: Any, w_scales: Any, gran_k: int | None) -> GemmOperands:
    exps = [
        _step_exponents(to_numpy(words, name), codes.shape, arch, gran_k, name)
        for words, codes, name in ((a_scales, a, "a_scales"), (w_scales, w, "w_scales"))
    ]
    none = [np.empty((*codes.shape[:2], 0), np.float32) for codes in (a, w)]
    return GemmOperands(a, w, *exps, *none)


def _step_exponents(words: np.ndarray, shape: tuple[int, ...], arch: Arch, gran_k: int | None, name: str) -> np.ndarray:
    """Exponents ``[..., K/k]`` of packed UE8M0 words ``[..., K/(4*gran_k)]``."""
    if words.dtype != np.int32:
        raise TypeError(f"{name} has dtype {words.dtype}; {arch.name} takes packed UE8M0 scales, int32")
    depth = shape[-1]
    candidates = [gran_k] if gran_k else [32, 128]
    fitting = [gran for gran in candidates if words.shape == (*shape[:-1], -(-depth // (4 * gran)))]
    if not fitting:
        expected = " or ".join(f"{(*shape[:-1], -(-depth // (4 * gran)))} (gran_k={gran})" for gran in candidates)
        raise ValueError(f"{name} has shape {words.shape}; expected {expected}")
    if len(fitting) > 1:
        raise ValueError(f"{name} {words.shape} fits gran_k=32 and 128 at K={depth}; say which with gran_k")
    if depth % fitting[0]:
        raise NotApplicable(f"K={depth} is not a multiple of gran_k={fitting[0]}")
    shifts = np.array([0, 8, 16, 24], np.int32)
    scale_bytes = ((words[..., None] >> shifts) & 0xFF).reshape(*shape[:-1], -1)[..., : depth // fitting[0]]
    refuse_where(scale_bytes == UE8M0_NAN, f"{name} (bytes)", scale_bytes, "is the NaN of UE8M0")
    return np.repeat((scale_bytes - 127).astype(np.int32), fitting[0] // arch.mma.k, axis=-1)


def _outside(arch: Arch, a: np.ndarray, w: np.ndarray, a_scales: Any, w_scales: Any) -> GemmOperands:
    blocks = a.shape[2] // (arch.promotion_k or a.shape[2])
    rows = -(-w.shape[1] // WEIGHT_BLOCK_ROWS)
    scales = []
    for given, name, shape in (
        (a_scales, "a_scales", (*a.shape[:2], blocks)),
        (w_scales, "w_scales", (w.shape[0], rows, blocks)),
    ):
        scale = to_numpy(given, name)
        if scale.dtype != np.float32:
            raise TypeError(f"{name} has dtype {scale.dtype}; {arch.name} takes float32 scales")
        if scale.shape != shape:
            raise ValueError(f"{name} has shape {scale.shape}; expected {shape}")
        refuse_where(~(np.isfinite(scale) & (scale > 0)), name, scale, "is not a positive finite scale")
        scales.append(scale)
    _refuse_extreme_products(*scales)
    none = [np.zeros((*codes.shape[:2], codes.shape[2] // arch.mma.k), np.int32) for codes in (a, w)]
    return GemmOperands(a, w, *none, *scales)


def _refuse_extreme_products(a_scales: np.ndarray, w_scales: np.ndarray) -> None:
    """Every product of an activation and a weight scale must be a normal FP32 number."""
    for pick in (np.min, np.max):
        a, w = pick(a_scales, axis=0).astype(np.float64), pick(w_scales, axis=1).astype(np.float64)
        product = a * w  # [G, K/128], the most extreme one of each block
        bad = (product < 2.0**-126) | (product >= 2.0**128 - 2.0**103)
        refuse_where(bad, "scale product [group, block]", product, "leaves the normal FP32 range")
