"""Batches of single fused sums with any accumulator, on the engine's own kernel and on 64-bit integers, for tests.

A batch is a row of ``lanes.WIDTH`` columns: codes a ``[rows, k]``, b ``[rows, k, WIDTH]``, FP32 C bits and UE8M0 bytes
``[rows, WIDTH]``. Every column is one sum of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from oproj.arch import MMA
from oproj.engines.software import gemm, lanes, spec

NAN = np.uint32(spec.NAN_BITS)


@dataclass(frozen=True)
class Sums:
    """a: codes [rows, k]; b: codes [rows, k, WIDTH]; c: FP32 bits [rows, WIDTH]; scale_a: UE8M0 bytes [rows, 1];
    scale_b: [rows, WIDTH]; the bytes are 127 for an instruction that takes no scales."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    scale_a: np.ndarray
    scale_b: np.ndarray

    @property
    def scale(self) -> np.ndarray:
        """Exponent that both scales add to each product, int32 [rows, WIDTH]."""
        return self.scale_a.astype(np.int32) + self.scale_b.astype(np.int32) - 254

    def one(self, row: int, lane: int) -> tuple[list[int], list[int], int, int, int]:
        """The arguments of ``spec.fdpa`` for one sum: a, b, c, byte a, byte b."""
        numbers = (self.c[row, lane], self.scale_a[row, 0], self.scale_b[row, lane])
        c, byte_a, byte_b = (int(number) for number in numbers)
        return self.a[row].tolist(), self.b[row, :, lane].tolist(), c, byte_a, byte_b


def by_lanes(mma: MMA, sums: Sums) -> np.ndarray:
    """FP32 bits [rows, WIDTH] from ``lanes.fused_step``; NaN is put in afterwards, as ``gemm.matmul`` does."""
    values, exponents = gemm.code_tables()
    acc = np.ascontiguousarray(sums.c).view(np.float32).copy()
    nan = np.isnan(acc) | (sums.scale_a == 255) | (sums.scale_b == 255)
    nan |= ((sums.a & 0x7F) == 0x7F).any(1)[:, None] | ((sums.b & 0x7F) == 0x7F).any(1)
    numbers = (np.int32(mma.frac_bits), np.int32(mma.out_frac_bits), np.int32(mma.zero_exponent))
    _step(values[sums.a], exponents[sums.a], values[sums.b], exponents[sums.b], sums.scale, acc, *numbers)
    return np.where(nan, NAN, acc.view(np.uint32))


@njit(nogil=True, error_model="numpy")
def _step(a, ea, b, eb, scale, acc, frac_bits, out_frac_bits, zero_exponent):
    for row in range(a.shape[0]):
        work = lanes.work_arrays()
        lanes.fused_step(
            a[row], ea[row], 0, b[row], eb[row], 0, scale[row], acc[row],
            frac_bits, out_frac_bits, zero_exponent, work,
        )  # fmt: skip


def by_integers(mma: MMA, sums: Sums) -> np.ndarray:
    """FP32 bits [rows, WIDTH] of any row without scales, in int64; NaN and infinity as ``spec`` has them."""
    significands, exponents, kinds = _tables(mma)
    out = np.empty(sums.c.shape, np.uint32)
    numbers = (spec.FORMATS[mma.operand].fraction_bits, mma.frac_bits, mma.out_frac_bits, mma.zero_exponent)
    _integer_sums(sums.a, sums.b, sums.c, significands, exponents, kinds, out, *numbers)
    return out


def _tables(mma: MMA) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Significand, exponent and kind (0 finite, 1 infinite, 2 NaN) of every code."""
    form = spec.FORMATS[mma.operand]
    codes = range(1 << (1 + form.exponent_bits + form.fraction_bits))
    pairs = np.array([spec.decode(code, form) for code in codes], np.int64)
    kinds = [2 if spec.is_nan(code, form) else int(spec.is_infinite(code, form)) for code in codes]
    return pairs[:, 0].copy(), pairs[:, 1].copy(), np.array(kinds, np.int64)


@njit(nogil=True)
def _integer_sums(a, b, c, significands, exponents, kinds, out, fraction, frac_bits, out_frac_bits, zero_exponent):
    for row in range(a.shape[0]):
        for lane in range(c.shape[1]):
            out[row, lane] = _integer_sum(
                a[row], b[row, :, lane], np.int64(c[row, lane]), significands, exponents, kinds,
                fraction, frac_bits, out_frac_bits, zero_exponent,
            )  # fmt: skip


@njit
def _cut(m, shift):
    """``m * 2**shift`` toward zero."""
    magnitude = abs(m) << shift if shift >= 0 else abs(m) >> min(-shift, 62)
    return -magnitude if m < 0 else magnitude


@njit
def _integer_sum(a, b, c, significands, exponents, kinds, fraction, frac_bits, out_frac_bits, zero_exponent):
    field, mantissa = (c >> 23) & 255, c & 0x7FFFFF
    nan, plus, minus = field == 255 and mantissa != 0, False, False
    if field == 255:
        plus, minus = c >> 31 == 0, c >> 31 == 1
    c_m = mantissa + ((1 << 23) if field else 0)
    c_m, c_e = (-c_m if c >> 31 else c_m), max(field, 1) - 127
    top = c_e if c_m != 0 else zero_exponent
    for k in range(a.size):
        x, y = a[k], b[k]
        product = significands[x] * significands[y]
        nan |= kinds[x] == 2 or kinds[y] == 2
        if kinds[x] == 1 or kinds[y] == 1:
            nan |= product == 0
            plus |= product > 0
            minus |= product < 0
        top = max(top, exponents[x] + exponents[y] if product != 0 else zero_exponent)
    if nan or (plus and minus):
        return np.uint32(0x7FFFFFFF)
    if plus or minus:
        return np.uint32(0x7F800000 if plus else 0xFF800000)
    total = _cut(c_m, frac_bits - 23 + c_e - top)
    for k in range(a.size):
        shift = frac_bits - 2 * fraction + exponents[a[k]] + exponents[b[k]] - top
        total += _cut(significands[a[k]] * significands[b[k]], shift)
    return _truncated_f32(total, top - frac_bits, out_frac_bits)


@njit
def _truncated_f32(m, exponent, fraction_bits):
    """FP32 bits of ``m * 2**exponent``, toward zero."""
    magnitude, length = abs(m), 0
    while magnitude >> length:
        length += 1
    e = max(length - 1 + exponent, -126)
    significand = abs(_cut(magnitude, exponent - e + fraction_bits)) << (23 - fraction_bits)
    if m == 0 or significand == 0:
        return np.uint32(0)
    sign = 0x80000000 if m < 0 else 0
    if e > 127:
        return np.uint32(sign | 0x7F800000)
    return np.uint32(sign | ((e + 127 if significand >> 23 else 0) << 23) | (significand & 0x7FFFFF))
