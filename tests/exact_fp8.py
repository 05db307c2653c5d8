"""Tensor-core chains and their running bound in exact rational arithmetic, written from the published model alone.

Deliberately independent of the package: integers in units of 2**-UNIT for one step, fractions for promotion.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

UNIT = 400
U32 = Fraction(1, 1 << 24)


@dataclass(frozen=True)
class Row:
    """F, output fraction bits, and K per fresh accumulator (None: scales inside, one accumulator)."""

    frac: int
    out: int
    promotion: int | None


ROWS = {"sm90": Row(13, 13, 128), "sm100": Row(25, 23, None), "sm103": Row(25, 23, None), "sm120": Row(25, 23, None)}
ZERO_EXPONENT, STEP_K = -133, 32


def round_to(x: Fraction, bits: int, min_exponent: int) -> Fraction:
    """Round to nearest even with ``bits`` significant bits and gradual underflow below ``2**min_exponent``."""
    if x == 0:
        return x
    exponent = max(floor_log2(x), min_exponent)
    unit = Fraction(2) ** (exponent - bits + 1)
    return round(x / unit) * unit  # Python rounds a fraction to the even neighbour


def floor_log2(x: Fraction) -> int:
    """floor(log2|x|) of x != 0."""
    n, d = abs(x.numerator), x.denominator
    guess = n.bit_length() - d.bit_length()
    return guess if Fraction(n, d) >= Fraction(2) ** guess else guess - 1


def round_f32(x: Fraction) -> Fraction:
    return round_to(x, 24, -126)


def round_bf16(x: Fraction) -> Fraction:
    return round_to(x, 8, -126)


def half_ulp_bf16(x: Fraction) -> Fraction:
    return Fraction(2) ** (max(floor_log2(x) if x else -126, -126) - 8)


def decode(code: int) -> tuple[int, int]:
    """Significand in eighths and exponent of an e4m3 code; subnormals keep exponent -6."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa + (8 if exponent else 0)
    return (-size if code & 128 else size), max(exponent, 1) - 7


def value(code: int) -> Fraction:
    m, e = decode(code)
    return m * Fraction(2) ** (e - 3)


def _sign(x: int) -> int:
    return (x > 0) - (x < 0)


def step(products: list[tuple[int, int]], c: int, row: Row) -> tuple[int, int]:
    """One fused sum: products as (significand in 1/64, exponent), c in units. Result and loss bound, in units."""
    terms = [(m << (e - 6 + UNIT), e) for m, e in products if m]
    if c:
        terms.append((c, max(abs(c).bit_length() - 1 - UNIT, -126)))
    e_max = max([e for _, e in terms] + ([] if c else [ZERO_EXPONENT]))
    lsb = 1 << (e_max - row.frac + UNIT)
    total, bound = 0, 0
    for x, _ in terms:
        total += _sign(x) * (abs(x) // lsb * lsb)
        bound += min(abs(x), lsb) if x % lsb else 0
    if total == 0:
        return 0, bound
    unit = 1 << (max(abs(total).bit_length() - 1 - UNIT, -126) - row.out + UNIT)
    return _sign(total) * (abs(total) // unit * unit), bound + (unit if unit > lsb else 0)


@dataclass(frozen=True)
class Output:
    """FP32 result of the chain, exact value, running bound (before rounding to BF16), sum of magnitudes."""

    result: Fraction
    exact: Fraction
    bound: Fraction
    magnitude: Fraction


def chain(row: Row, a: list[int], b: list[int], scales: list, fused: bool = True) -> Output:
    """One output. scales: per step exponents sa+sb (inside) or per 128 of K pairs of FP32 scales (outside)."""
    products = [(ma * mb, ea + eb) for (ma, ea), (mb, eb) in zip(map(decode, a), map(decode, b), strict=True)]
    values = [Fraction(m) * Fraction(2) ** (e - 6) for m, e in products]
    width = row.promotion or STEP_K
    per_k = [s if row.promotion is None else Fraction(s[0]) * Fraction(s[1]) for s in scales for _ in range(width)]
    weights = [Fraction(2) ** s for s in per_k] if row.promotion is None else per_k
    exact = sum((v * w for v, w in zip(values, weights, strict=True)), Fraction(0))
    magnitude = sum((abs(v) * w for v, w in zip(values, weights, strict=True)), Fraction(0))
    if row.promotion is None:
        shifted = [(m, e + s) for (m, e), s in zip(products, per_k, strict=True)]
        acc, bound = _accumulate(shifted, row)
        return Output(acc, exact, bound, magnitude)
    final = total = Fraction(0)
    for (first, last), (sa, sb) in zip(pairwise(range(0, len(a) + 1, row.promotion)), scales, strict=True):
        acc, lost = _accumulate(products[first:last], row)
        final, charged = _promote(acc, final, Fraction(sa) * Fraction(sb), fused)
        scale = round_f32(Fraction(sa) * Fraction(sb))
        total += scale * lost * (1 + U32) + charged
    return Output(final, exact, total, magnitude)


def _accumulate(products: list[tuple[int, int]], row: Row) -> tuple[Fraction, Fraction]:
    acc = bound = 0
    for first in range(0, len(products), STEP_K):
        acc, lost = step(products[first : first + STEP_K], acc, row)
        bound += lost
    return Fraction(acc, 1 << UNIT), Fraction(bound, 1 << UNIT)


def _promote(acc: Fraction, final: Fraction, exact_scale: Fraction, fused: bool) -> tuple[Fraction, Fraction]:
    """New FP32 sum, and the roundings charged: scale product, separate product, sum."""
    scale, tiny = round_f32(exact_scale), Fraction(1, 1 << 150)
    term = scale * acc
    new = round_f32((term if fused else round_f32(term)) + final)
    charged = U32 * abs(term) * ((scale != exact_scale) + (not fused)) + max(U32 * abs(new), tiny)
    return new, charged + (0 if fused else tiny)
