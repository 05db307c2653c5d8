"""A third model of the chain, in vectorised NumPy integers, with one fact of the hardware changed at a time.

Independent of ``oproj``: golden vectors must accept ``Facts()`` and refuse every mutant, so a wrong fact in the
software engine cannot pass either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Facts:
    """What the SM90 chain is believed to do."""

    frac_bits: int = 13
    out_frac_bits: int = 13
    zero_exponent: int = -133
    group: int = 32  # products in one fused sum
    promotion_k: int = 128
    fused_promotion: bool = True
    renormalise_products: bool = False
    normalise_subnormal_codes: bool = False
    flush_subnormal_codes: bool = False
    align: str = "truncate"  # or "floor", "nearest"
    output: str = "truncate"  # or "nearest"
    accumulator_in_sum: bool = True
    nan_codes: str = "nan"  # or "number" (0x7F is 480), "zero"
    infinity: str = "kept"  # or "largest": what overflows stays the largest finite number
    flush_subnormal_results: bool = False


MUTANTS = {
    "F = 12": Facts(frac_bits=12),
    "F = 14": Facts(frac_bits=14),
    "23 output bits": Facts(out_frac_bits=23),
    "12 output bits": Facts(out_frac_bits=12),
    "14 output bits": Facts(frac_bits=14, out_frac_bits=14),
    "25 bits inside": Facts(frac_bits=25),
    "renormalised products": Facts(renormalise_products=True),
    "normalised subnormal codes": Facts(normalise_subnormal_codes=True),
    "flushed subnormal codes": Facts(flush_subnormal_codes=True),
    "floor instead of truncation": Facts(align="floor"),
    "nearest instead of truncation": Facts(align="nearest"),
    "output rounded to nearest": Facts(output="nearest"),
    "two sums of 16": Facts(group=16),
    "accumulator added after the sum": Facts(accumulator_in_sum=False),
    "unfused promotion": Facts(fused_promotion=False),
    "promotion every 256": Facts(promotion_k=256),
}
# Seen by the sets of special values.
SPECIAL_MUTANTS = {
    "NaN codes read as numbers": Facts(nan_codes="number"),
    "NaN codes read as zeros": Facts(nan_codes="zero"),
    "Inf dropped": Facts(infinity="largest"),
    "subnormal results flushed": Facts(flush_subnormal_results=True),
}


def decode(codes: np.ndarray, facts: Facts) -> tuple[np.ndarray, np.ndarray]:
    """Integer significands (3 fraction bits) and exponents of e4m3 codes; NaN codes are the caller's."""
    field, mantissa = (codes >> 3).astype(np.int64) & 15, codes.astype(np.int64) & 7
    m = np.where(field == 0, mantissa, 8 + mantissa)
    e = np.maximum(field, 1) - 7
    if facts.flush_subnormal_codes:
        m = np.where(field == 0, 0, m)
    if facts.nan_codes == "zero":
        m = np.where(codes & 0x7F == 0x7F, 0, m)
    if facts.normalise_subnormal_codes:
        for _ in range(3):
            small = (m > 0) & (m < 8)
            m, e = np.where(small, m * 2, m), np.where(small, e - 1, e)
    return np.where(codes & 0x80, -m, m), e


def shifted(m: np.ndarray, shift: np.ndarray, how: str) -> np.ndarray:
    """``m * 2**shift`` as an integer."""
    left, right = np.maximum(shift, 0), np.minimum(np.maximum(-shift, 0), 62)
    if how == "floor":
        return (m << left) >> right
    sign, magnitude = np.sign(m), np.abs(m) << left
    cut = magnitude >> right
    if how == "nearest":
        rest, half = magnitude - (cut << right), np.where(right > 0, np.int64(1) << np.maximum(right - 1, 0), 0)
        cut = cut + ((right > 0) & ((rest > half) | ((rest == half) & (cut & 1 == 1))))
    return sign * cut


def bit_length(x: np.ndarray) -> np.ndarray:
    return np.frexp(np.abs(x).astype(np.float64))[1].astype(np.int64)


def fused_sum(m: np.ndarray, e: np.ndarray, acc: np.ndarray, facts: Facts) -> np.ndarray:
    """One instruction: products ``m * 2**(e-6)`` along the last axis and the FP32 values ``acc``, to float64."""
    zero = facts.zero_exponent
    if facts.renormalise_products:
        high = np.abs(m) >= 128  # a product of two normal significands in [2, 4)
        m, e, fraction = np.where(high, m, m * 2), np.where(high, e + 1, e), 7
    else:
        fraction = 6
    c_m, c_e = np.frexp(acc)
    c_m, c_e = (c_m * 2.0**24).astype(np.int64), c_e.astype(np.int64) - 1
    top = np.where(m != 0, e, zero).max(-1)
    if facts.accumulator_in_sum:
        top = np.maximum(top, np.where(c_m != 0, c_e, zero))
    total = shifted(m, facts.frac_bits - fraction + e - top[..., None], facts.align).sum(-1)
    if facts.accumulator_in_sum:
        total = total + shifted(c_m, facts.frac_bits - 23 + c_e - top, facts.align)
    drop = np.maximum(bit_length(total) - 1 - facts.out_frac_bits, 0)
    how = "nearest" if facts.output == "nearest" else "truncate"
    result = (shifted(total, -drop, how) << drop) * np.exp2((top - facts.frac_bits).astype(np.float64))
    return result if facts.accumulator_in_sum else (result + acc).astype(np.float32).astype(np.float64)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """FP32 ``x*y + z`` with one rounding: the exact float64 product, the sum rounded to odd, then to FP32."""
    product, z = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = product + z
        back = total - product
        error = (product - (total - back)) + (z - back)
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        toward = np.where((error > 0) == (total > 0), 1, -1)
        return np.where(inexact, (bits + toward).view(np.float64), total).astype(np.float32)


def chain(a: np.ndarray, sa: np.ndarray, b: np.ndarray, sb: np.ndarray, facts: Facts | None = None) -> np.ndarray:
    """BF16 bits ``[T, N]`` of SM90's chain. a [T, K], b [N, K] codes; sa [T, K/128], sb [N, K/128] FP32."""
    facts = facts or Facts()
    (ma, ea), (mb, eb) = decode(a, facts), decode(b, facts)
    final = np.zeros((a.shape[0], b.shape[0]), np.float32)
    acc = np.zeros(final.shape)
    for k in range(0, a.shape[1], facts.group):
        piece = slice(k, k + facts.group)
        if k % facts.promotion_k == 0:
            acc = np.zeros(final.shape)
        acc = fused_sum(ma[:, None, piece] * mb[None, :, piece], ea[:, None, piece] + eb[None, :, piece], acc, facts)
        if (k + facts.group) % facts.promotion_k == 0 or k + facts.group == a.shape[1]:
            with np.errstate(all="ignore"):
                scale = sa[:, None, k // 128] * sb[None, :, k // 128]
                partial = acc.astype(np.float32)
                final = fma(scale, partial, final) if facts.fused_promotion else scale * partial + final
    if facts.infinity == "largest":
        final = np.where(np.isinf(final), np.copysign(np.float32(3e38), final), final)
    if facts.flush_subnormal_results:
        final = np.where(np.abs(final) < 2.0**-126, np.float32(0), final)
    nan = ((a & 0x7F) == 0x7F).any(1)[:, None] | ((b & 0x7F) == 0x7F).any(1)[None, :]
    nan &= facts.nan_codes == "nan"
    bits = np.where(nan, np.float32(np.nan), final).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(final) | nan, np.uint16(0x7FFF), rounded)


def same_bits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Elementwise equality of BF16 bits, NaN equal to NaN."""
    nan_x, nan_y = (x & 0x7FFF) > 0x7F80, (y & 0x7FFF) > 0x7F80
    return (x == y) | (nan_x & nan_y)


def with_change(**changes: object) -> Facts:
    """The believed facts with some changed."""
    return replace(Facts(), **changes)  # type: ignore[arg-type]
