"""The running error bound of a chain of tensor-core steps, 64 columns at a time.

The kernel replays the T-FDPA chain of an architecture row (MMA-Sim, arXiv 2511.10909) and adds up, beside every
accumulator, what alignment, output truncation and promotion may have lost. The inequality and the numbers of its
slack stand in ``conformance/bounds.py``; here is only its evaluation. It shares no code with the software engine.

Inside one step every product is held in units of ``lsb = 2**(e_max - F)``: it has at most 8 significant bits, so
float32 holds it exactly; sums of truncated products are float32 where they stay below 2**24 (SM90), else float64.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numba
import numpy as np
import torch

from conformance.operands import E4M3_POWERS, E4M3_VALUES, GemmOperands
from oproj.arch import Arch

COLUMNS = 64  # lanes of the inner loops; a compile-time constant, so that LLVM sees disjoint rows of the state
TOKENS = 32  # tokens that share one decoded slice of weights
ACC, STEP, ABS, FINAL, BOUND, TOTAL, OVERFLOW, LSB, ROWS = (COLUMNS * row for row in range(9))
PEAK, INVERSE, LOSS, MAGNITUDE = (COLUMNS * row for row in range(4))  # of the float32 work array
SUM_SLACK = 1.0 + 2.0**-18  # covers the rounding of a float32 sum of up to 64 non-negative numbers
TABLES = (E4M3_VALUES.astype(np.float32), E4M3_POWERS.astype(np.float32))
U32 = 2.0**-24
HALF_MIN_F32 = 2.0**-150  # half the smallest FP32 subnormal

_jit = numba.njit(cache=True, nogil=True, error_model="numpy")


class RunningBound(NamedTuple):
    """Per output, float64 ``[T, G, R]``: FP32 result of the model, bound on its error, and sum of magnitudes."""

    result: np.ndarray
    bound: np.ndarray
    magnitude: np.ndarray


@_jit
def _pow2(exponent: int) -> float:
    return np.int64((exponent + 1023) << 52).view(np.float64)


@_jit
def _inverse(power: float) -> float:
    """1/power for a power of two, without a division."""
    return np.int64((2046 << 52) - np.float64(power).view(np.int64)).view(np.float64)


@_jit
def _exponent(x: float) -> int:
    """floor(log2|x|) of a normal float64; -1023 for zero."""
    return ((np.float64(x).view(np.int64) >> 52) & 0x7FF) - 1023


@_jit
def _largest_power(codes_a, power_of, powers_w, work):
    """Per column the largest 2**(ea+eb) over the products of one step; 0 when all of them are zero."""
    for n in range(COLUMNS):
        work[PEAK + n] = np.float32(0)
    for k in range(codes_a.size):
        power, row = power_of[codes_a[k]], k * COLUMNS
        for n in range(COLUMNS):
            work[PEAK + n] = max(work[PEAK + n], power * powers_w[row + n])


@_jit
def _align(work, scale_a, scale_w, state, frac_bits, zero_exponent):
    """lsb = 2**(e_max - F) per column, and what turns an unscaled product into units of it."""
    for n in range(COLUMNS):
        scale = scale_a + scale_w[n]
        product = _exponent(work[PEAK + n]) + scale if work[PEAK + n] > 0 else zero_exponent
        acc = state[ACC + n]
        e_max = max(product, max(_exponent(acc), -126) if acc != 0 else zero_exponent)
        # FP32 holds neither end: below, a product counts as 2**-100 lsb and more; above, all products are zero.
        work[INVERSE + n] = np.float32(_pow2(min(max(scale - e_max + frac_bits, -100), 100)))
        state[LSB + n] = _pow2(e_max - frac_bits)


@_jit
def _products(codes_a, value_of, values_w, work, sums):
    """Per column, in lsb: sum of truncated products, sum of min(|x|, 1) over inexact ones, sum of |x|."""
    one, zero = np.float32(1), np.float32(0)
    for n in range(COLUMNS):
        sums[n], work[LOSS + n], work[MAGNITUDE + n] = 0, zero, zero
    for k in range(codes_a.size):
        value, row = value_of[codes_a[k]], k * COLUMNS
        for n in range(COLUMNS):
            total, loss, magnitude = sums[n], work[LOSS + n], work[MAGNITUDE + n]  # read before writing: vectorises
            x = value * values_w[row + n] * work[INVERSE + n]
            kept, size = np.trunc(x), abs(x)
            sums[n] = total + kept
            work[LOSS + n] = loss + (min(size, one) if kept != x else zero)
            work[MAGNITUDE + n] = magnitude + size


@_jit
def _close_step(state, out_frac_bits, sums, work):
    """Add the accumulator, truncate the sum, charge the step."""
    for n in range(COLUMNS):
        lsb, acc, charged = state[LSB + n], state[ACC + n], state[STEP + n]
        over, magnitude = state[OVERFLOW + n], state[ABS + n]
        x = acc * _inverse(lsb)
        kept = np.trunc(x)
        lost = work[LOSS + n] * SUM_SLACK + (min(abs(x), 1.0) if kept != x else 0.0)
        magnitude += work[MAGNITUDE + n] * SUM_SLACK * lsb
        total = (sums[n] + kept) * lsb
        exponent = max(_exponent(total), -126)
        unit = _pow2(exponent - out_frac_bits)
        rounding = unit if (unit > lsb and total != 0) else 0.0
        state[OVERFLOW + n] = max(over, np.float64(exponent > 127))
        state[ACC + n] = 0.0 if exponent > 127 else np.trunc(total * _inverse(unit)) * unit
        state[STEP + n] = charged + lost * lsb + rounding
        state[ABS + n] = magnitude


@_jit
def _to_f32(big: float, small: float) -> float:
    """RN32(big + small) for float64 operands: TwoSum, rounded to odd, then rounded once to FP32."""
    total = big + small
    part = total - big
    error = (big - (total - part)) + (small - part)
    bits = np.float64(total).view(np.int64)
    step = 0 if (error == 0 or bits & 1) else (1 if (error > 0) == (total > 0) else -1)
    return np.float64(np.float32(np.int64(bits + step).view(np.float64)))


@_jit
def _promote(state, scale_a, scale_w, fused):
    """final = fma(scale, acc, final) in FP32, and the block's share of the bound; the accumulator starts afresh."""
    exact = np.float64(scale_a) * np.float64(scale_w)
    scale = np.float64(np.float32(exact))
    product_rounding = U32 * ((scale != exact) + (not fused))
    for n in range(COLUMNS):
        term = scale * state[ACC + n]
        added = term if fused else np.float64(np.float32(term))
        final = _to_f32(added, state[FINAL + n])
        state[FINAL + n] = final
        rounding = product_rounding * abs(term) + max(U32 * abs(final), HALF_MIN_F32) + (not fused) * HALF_MIN_F32
        state[BOUND + n] += scale * state[STEP + n] * (1 + U32) + rounding
        state[TOTAL + n] += scale * (1 + U32) * state[ABS + n]
        state[ACC + n] = state[STEP + n] = state[ABS + n] = 0.0


@_jit
def _decode(codes, value_of, power_of, values, powers):
    """Values and unnormalised powers of two of one step's weight codes ``[k, COLUMNS]``."""
    for k in range(codes.shape[0]):
        for n in range(COLUMNS):
            values[k * COLUMNS + n] = value_of[codes[k, n]]
            powers[k * COLUMNS + n] = power_of[codes[k, n]]


@_jit
def _chain(a, w, row, tables, fused, sums, state):
    """All steps of one token block and one column tile.

    a: codes ``[tokens, K]``, exponents ``[tokens, K/k]``, FP32 scales ``[tokens, K/promotion_k]``; w: the same as
    ``[K, COLUMNS]``, ``[K/k, COLUMNS]``, ``[K/promotion_k]``; row: ``(k, F, frac_out, E_ZERO, promotion_k or 0)``.
    """
    (a_codes, a_exps, a_scales), (w_codes, w_exps, w_scales) = a, w
    (depth, frac_bits, out_frac_bits, zero_exponent, promotion_k), (value_of, power_of) = row, tables
    values, powers = np.empty(depth * COLUMNS, np.float32), np.empty(depth * COLUMNS, np.float32)
    work = np.empty(4 * COLUMNS, np.float32)
    for step in range(w_exps.shape[0]):
        first, last = step * depth, step * depth + depth
        _decode(w_codes[first:last], value_of, power_of, values, powers)
        for t in range(a_codes.shape[0]):
            codes, mine = a_codes[t, first:last], state[t]
            _largest_power(codes, power_of, powers, work)
            _align(work, a_exps[t, step], w_exps[step], mine, frac_bits, zero_exponent)
            _products(codes, value_of, values, work, sums)
            _close_step(mine, out_frac_bits, sums, work)
            if promotion_k and last % promotion_k == 0:
                _promote(mine, a_scales[t, first // promotion_k], w_scales[first // promotion_k], fused)


@_jit
def _finish(state, promoted, out):
    """Copy the state into ``out`` ``[3, tokens, columns]``; an overflow has infinite result."""
    for t in range(out.shape[1]):
        for n in range(out.shape[2]):
            over = state[t, OVERFLOW + n] > 0
            out[0, t, n] = np.inf if over else state[t, (FINAL if promoted else ACC) + n]
            out[1, t, n] = state[t, (BOUND if promoted else STEP) + n]
            out[2, t, n] = state[t, (TOTAL if promoted else ABS) + n]


def _row(arch: Arch) -> tuple[int, int, int, int, int]:
    mma = arch.mma
    if mma.k > 64 or mma.frac_bits > 40:
        raise ValueError(f"{mma.name}: the kernel holds k <= 64 and F <= 40; got {mma.k} and {mma.frac_bits}")
    return mma.k, mma.frac_bits, mma.out_frac_bits, mma.zero_exponent, arch.promotion_k or 0


def _column_tile(arch: Arch, operands: GemmOperands, group: int, first: int, fused: bool, out: np.ndarray) -> None:
    """One group and ``COLUMNS`` columns, all tokens; zero codes fill the columns behind R."""
    row = _row(arch)
    # Sums of truncated products and the accumulator stay below (4k+2) * 2**F units.
    sum_dtype = np.float32 if (4 * row[0] + 2) << row[1] < 1 << 24 else np.float64
    w = operands.weight_tile(group, first, COLUMNS)
    for begin in range(0, out.shape[1], TOKENS):
        block = slice(begin, begin + TOKENS)
        a = operands.activation_block(group, block)
        state = np.zeros((a[0].shape[0], ROWS))
        _chain(a, w, row, TABLES, fused, np.empty(COLUMNS, sum_dtype), state)
        _finish(state, row[4] > 0, out[:, block, group, first : first + COLUMNS])


def running_bound(
    arch: Arch, operands: GemmOperands, *, fused: bool = True, threads: int | None = None
) -> RunningBound:
    """Replay the chain of ``arch`` on ``operands`` and bound its error before any BF16 rounding.

    ``fused``: promotion as one FMA (measured on SM90) or as multiply, then add. ``threads``: tiles at a time,
    default torch's own number. A result that leaves FP32 is infinite or NaN; the caller refuses it.
    """
    tokens, groups, columns = operands.shape
    out = np.empty((3, tokens, groups, columns))
    tiles = [(group, first) for group in range(groups) for first in range(0, columns, COLUMNS)]
    with ThreadPoolExecutor(threads or torch.get_num_threads()) as pool:
        list(pool.map(lambda tile: _column_tile(arch, operands, tile[0], tile[1], fused, out), tiles))
    return RunningBound(*out)
