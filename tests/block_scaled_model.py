"""The block-scaled instruction in rational numbers, with one fact changed at a time; written apart from ``oproj``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

NAN, INF, LARGEST = 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF


@dataclass(frozen=True)
class Facts:
    """What tcgen05 ``kind::mxf8f6f4.block_scale``, and DeepGEMM's chain of it, are believed to do."""

    frac_bits: int = 25
    out_frac_bits: int = 23
    zero_exponent: int = -133
    group: int = 32  # products in one sum
    align: str = "truncate"  # or "floor", "nearest"
    output: str = "truncate"  # or "nearest"
    renormalise_products: bool = False
    normalise_subnormal_codes: bool = False
    accumulator_in_sum: bool = True
    scale_in_sum: bool = True
    nan: bool = True  # False: NaN codes and the NaN byte are read as numbers
    infinity: bool = True  # False: the largest finite number instead
    flush_codes: bool = False
    flush_accumulator: bool = False
    flush_results: bool = False
    promotion_k: int | None = None  # a fresh accumulator, added up in FP32


MUTANTS = {
    "F = 24": Facts(frac_bits=24),
    "F = 26": Facts(frac_bits=26),
    "22 output bits": Facts(out_frac_bits=22),
    "13 output bits": Facts(out_frac_bits=13),
    "a zero with exponent -132": Facts(zero_exponent=-132),
    "a zero with exponent -134": Facts(zero_exponent=-134),
    "two sums of 16": Facts(group=16),
    "floor instead of truncation": Facts(align="floor"),
    "nearest instead of truncation": Facts(align="nearest"),
    "output rounded to nearest": Facts(output="nearest"),
    "renormalised products": Facts(renormalise_products=True),
    "normalised subnormal codes": Facts(normalise_subnormal_codes=True),
    "accumulator added after the sum": Facts(accumulator_in_sum=False),
    "scale applied after the sum": Facts(scale_in_sum=False),
    "NaN dropped": Facts(nan=False),
    "Inf dropped": Facts(infinity=False),
    "subnormal codes flushed": Facts(flush_codes=True),
    "subnormal accumulators flushed": Facts(flush_accumulator=True),
    "subnormal results flushed": Facts(flush_results=True),
}
CHAIN_MUTANTS = {
    "promotion every 128": Facts(promotion_k=128),
    "promotion every 256": Facts(promotion_k=256),
    "promotion every 32": Facts(promotion_k=32),
}


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def e4m3(code: int, facts: Facts) -> tuple[Fraction, int]:
    """Value and exponent of an e4m3 code; 0x7F counts as 480 here."""
    field, fraction = code >> 3 & 15, code & 7
    exponent = max(field, 1) - 7
    value = (Fraction(fraction, 8) + (1 if field else 0)) * power(exponent)
    if field == 0 and facts.flush_codes:
        value = Fraction(0)
    if field == 0 and fraction and facts.normalise_subnormal_codes:
        exponent = math.frexp(value)[1] - 1
    return (-value if code & 0x80 else value), exponent


def f32(bits: int, facts: Facts) -> tuple[Fraction, int]:
    """Value and exponent of finite FP32 bits."""
    field, fraction = bits >> 23 & 255, bits & 0x7FFFFF
    exponent = max(field, 1) - 127
    value = (Fraction(fraction, 1 << 23) + (1 if field else 0)) * power(exponent)
    if field == 0 and facts.flush_accumulator:
        value = Fraction(0)
    return (-value if bits >> 31 else value), exponent


def cut(value: Fraction, unit: Fraction, how: str) -> Fraction:
    """A multiple of ``unit``."""
    count = value / unit
    rounded = {"truncate": math.trunc, "floor": math.floor, "nearest": round}[how](count)
    return rounded * unit


def aligned_sum(terms: Sequence[tuple[Fraction, int]], facts: Facts) -> Fraction:
    """The terms (value, exponent) cut at ``frac_bits`` below the largest exponent, and added up."""
    top = max(exponent if value else facts.zero_exponent for value, exponent in terms)
    return sum((cut(value, power(top - facts.frac_bits), facts.align) for value, _ in terms), Fraction(0))


def to_f32(value: Fraction, facts: Facts) -> int:
    """FP32 bits with ``out_frac_bits`` fraction bits."""
    if value == 0:
        return 0
    exponent = max(floor_log2(abs(value)), -126)
    value = cut(value, power(exponent - facts.out_frac_bits), facts.output)
    sign = 1 << 31 if value < 0 else 0
    if abs(value) >= power(128):
        return sign | (INF if facts.infinity else LARGEST)
    if value == 0 or (abs(value) < power(-126) and facts.flush_results):
        return 0
    exponent = max(floor_log2(abs(value)), -126)
    significand = int(abs(value) / power(exponent - 23))
    return sign | (significand + (exponent + 126 << 23))


def floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if power(guess) <= value else guess - 1


def fused_sum(a: Sequence[int], b: Sequence[int], c: int, byte_a: int, byte_b: int, facts: Facts | None = None) -> int:
    """FP32 bits of one block-scaled instruction on e4m3 codes and UE8M0 bytes."""
    facts = facts or Facts()
    if len(a) > facts.group:
        half = fused_sum(a[: facts.group], b[: facts.group], c, byte_a, byte_b, facts)
        return fused_sum(a[facts.group :], b[facts.group :], half, byte_a, byte_b, facts)
    c_special = c >> 23 & 255 == 255
    if (c_special and c & 0x7FFFFF) or (facts.nan and has_nan(a, b, byte_a, byte_b)):
        return NAN
    if c_special and facts.infinity:
        return c
    start = f32(c & 0x80000000 | LARGEST if c_special else c, facts)
    scale = byte_a + byte_b - 254
    products = [product(x, y, scale if facts.scale_in_sum else 0, facts) for x, y in zip(a, b, strict=True)]
    if not facts.scale_in_sum:
        return to_f32(aligned_sum(products, facts) * power(scale) + start[0], facts)
    if facts.accumulator_in_sum:
        return to_f32(aligned_sum([*products, start], facts), facts)
    return added(to_f32(aligned_sum(products, facts), facts), c)


def has_nan(a: Sequence[int], b: Sequence[int], byte_a: int, byte_b: int) -> bool:
    return 255 in (byte_a, byte_b) or any(code & 0x7F == 0x7F for code in (*a, *b))


def product(x: int, y: int, scale: int, facts: Facts) -> tuple[Fraction, int]:
    """Value and exponent of one product."""
    (value_x, exponent_x), (value_y, exponent_y) = e4m3(x, facts), e4m3(y, facts)
    value, exponent = value_x * value_y * power(scale), exponent_x + exponent_y + scale
    if facts.renormalise_products and abs(value) >= power(exponent + 1):
        exponent += 1
    return value, exponent


def added(x: int, y: int) -> int:
    """FP32 addition to nearest even."""
    left, right = (np.array([bits], np.uint32).view(np.float32) for bits in (x, y))
    with np.errstate(all="ignore"):
        total = left + right
    return NAN if np.isnan(total[0]) else int(total.view(np.uint32)[0])


def chain(
    a: Sequence[int], b: Sequence[int], bytes_a: Sequence[int], bytes_b: Sequence[int], facts: Facts | None = None
) -> int:
    """FP32 bits over all of K, one byte of each scale per 32 elements."""
    facts = facts or Facts()
    total = final = 0
    for step, k in enumerate(range(0, len(a), 32)):
        if facts.promotion_k and k and k % facts.promotion_k == 0:
            final, total = added(final, total), 0
        total = fused_sum(a[k : k + 32], b[k : k + 32], total, bytes_a[step], bytes_b[step], facts)
    return added(final, total) if facts.promotion_k else total
