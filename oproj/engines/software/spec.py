"""The tensor core in Python integers: the readable specification that the fast twins are proven equal to.

Truncated fused dot-product-add (T-FDPA): all products and the accumulator C enter one exact integer sum after each
was truncated toward zero to ``frac_bits`` fraction bits of the largest exponent; the sum is truncated once more to
``out_frac_bits``. Sources: MMA-Sim (arXiv 2511.10909), Khattak & Mikaitis (arXiv 2512.07004).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from oproj.arch import MMA, Arch, OperandFormat

NAN_BITS = 0x7FFFFFFF
INF_BITS = 0x7F800000


@dataclass(frozen=True)
class Format:
    """How the bits of a number are read: sign, exponent field, fraction."""

    exponent_bits: int
    fraction_bits: int
    bias: int
    has_infinity: bool  # else the largest exponent holds numbers too, and only all ones is NaN

    @property
    def largest_field(self) -> int:
        """The exponent field of all ones."""
        return (1 << self.exponent_bits) - 1

    def fields(self, code: int) -> tuple[int, int, int]:
        """``(sign, exponent field, fraction)``."""
        fraction = code & ((1 << self.fraction_bits) - 1)
        field = code >> self.fraction_bits & self.largest_field
        return code >> (self.exponent_bits + self.fraction_bits) & 1, field, fraction


FORMATS: dict[OperandFormat, Format] = {
    "e4m3": Format(exponent_bits=4, fraction_bits=3, bias=7, has_infinity=False),
    "bf16": Format(exponent_bits=8, fraction_bits=7, bias=127, has_infinity=True),
}
E4M3, BF16 = FORMATS["e4m3"], FORMATS["bf16"]
F32 = Format(exponent_bits=8, fraction_bits=23, bias=127, has_infinity=True)
E4M3_FRACTION = E4M3.fraction_bits


def decode(code: int, form: Format) -> tuple[int, int]:
    """``(m, e)`` with value ``m * 2**(e - fraction_bits)`` of a finite number.

    Subnormals keep the smallest exponent and are not normalised.
    """
    sign, field, fraction = form.fields(code)
    magnitude = fraction if field == 0 else (1 << form.fraction_bits) + fraction
    return (-magnitude if sign else magnitude), max(field, 1) - form.bias


def is_nan(code: int, form: Format) -> bool:
    """A number with the largest exponent and a fraction: any but zero where there is an infinity, else all ones."""
    _, field, fraction = form.fields(code)
    return field == form.largest_field and fraction >= (1 if form.has_infinity else (1 << form.fraction_bits) - 1)


def is_infinite(code: int, form: Format) -> bool:
    """Plus or minus infinity; e4m3 has none."""
    _, field, fraction = form.fields(code)
    return form.has_infinity and field == form.largest_field and fraction == 0


def decode_e4m3(code: int) -> tuple[int, int]:
    """``(m, e)`` with value ``m * 2**(e-3)`` of an e4m3 code that is not NaN."""
    return decode(code, E4M3)


def is_nan_e4m3(code: int) -> bool:
    """0x7F and 0xFF."""
    return is_nan(code, E4M3)


def fdpa(a: Sequence[int], b: Sequence[int], c: int, mma: MMA, scale_a: int = 127, scale_b: int = 127) -> int:
    """One output of one instruction.

    a, b: codes of ``mma.operand`` (at most ``mma.k``); c: FP32 bits; scale_a, scale_b: UE8M0 bytes, used where the row
    takes scales inside. Returns FP32 bits.
    """
    if len(a) != len(b) or len(a) > mma.k:
        raise ValueError(f"{len(a)} and {len(b)} codes; one {mma.name} takes two equal rows of at most {mma.k}")
    form, pairs = FORMATS[mma.operand], list(zip(a, b, strict=True))
    if mma.scales_inside and 255 in (scale_a, scale_b):
        return NAN_BITS
    special = _not_finite(pairs, c, form)
    if special is not None:
        return special
    scale = scale_a + scale_b - 254 if mma.scales_inside else 0
    factors = [(decode(x, form), decode(y, form)) for x, y in pairs]
    terms = [(ma * mb, ea + eb + scale, 2 * form.fraction_bits) for (ma, ea), (mb, eb) in factors]
    terms.append((*decode(c, F32), F32.fraction_bits))
    top = max(e if m else mma.zero_exponent for m, e, _ in terms)
    total = sum(_truncated(m, mma.frac_bits - fraction + e - top) for m, e, fraction in terms if m)
    return _truncated_f32(total, top - mma.frac_bits, mma.out_frac_bits)


def _not_finite(pairs: Sequence[tuple[int, int]], c: int, form: Format) -> int | None:
    """FP32 bits of a sum with a NaN or an infinity in it, as IEEE has it; None where all terms are finite.

    Decided by mmasim 2.1.1: a NaN, infinity times zero and infinities of both signs give the one NaN 0x7FFFFFFF.
    """
    if is_nan(c, F32) or any(is_nan(x, form) or is_nan(y, form) for x, y in pairs):
        return NAN_BITS
    signs = {F32.fields(c)[0]} if is_infinite(c, F32) else set()
    for x, y in pairs:
        if is_infinite(x, form) or is_infinite(y, form):
            if decode(x, form)[0] == 0 or decode(y, form)[0] == 0:
                return NAN_BITS
            signs.add(form.fields(x)[0] ^ form.fields(y)[0])
    if len(signs) == 2:
        return NAN_BITS
    return signs.pop() << 31 | INF_BITS if signs else None


def _truncated(m: int, shift: int) -> int:
    """``m * 2**shift`` toward zero: the magnitude is shifted, no guard bit and no sticky bit."""
    magnitude = abs(m) << shift if shift >= 0 else abs(m) >> -shift
    return -magnitude if m < 0 else magnitude


def _truncated_f32(m: int, exponent: int, fraction_bits: int) -> int:
    """FP32 bits of ``m * 2**exponent`` cut toward zero to ``fraction_bits``; a zero sum is +0, overflow is Inf."""
    if m == 0:
        return 0
    sign, magnitude = (0x80000000, -m) if m < 0 else (0, m)
    e = max(magnitude.bit_length() - 1 + exponent, -126)
    significand = abs(_truncated(magnitude, exponent - (e - fraction_bits))) << (23 - fraction_bits)
    if e > 127:
        return sign | INF_BITS
    if significand == 0:  # underflow: declared +0 for either sign, as mmasim has it (unmeasured)
        return 0
    return sign | ((e + 127 if significand >> 23 else 0) << 23) | (significand & 0x7FFFFF)


def float_bits(value: float) -> int:
    """FP32 bits of a value that FP32 holds (or rounds to nearest even)."""
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return INF_BITS | (0x80000000 if value < 0 else 0)


def bits_float(bits: int) -> float:
    """The value of FP32 bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def fma_f32(x: float, y: float, z: float) -> float:
    """``x*y + z`` of FP32 values with one rounding to nearest even, in exact rational arithmetic when finite."""
    if not all(map(math.isfinite, (x, y, z))):
        return x * y + z
    (xn, xd), (yn, yd), (zn, zd) = x.as_integer_ratio(), y.as_integer_ratio(), z.as_integer_ratio()
    numerator, denominator = xn * yn * zd + zn * xd * yd, xd * yd * zd
    if numerator == 0:  # IEEE: the sign of an exact zero comes from the signs of its terms
        return x * y + z if x * y != 0 or z != 0 else math.copysign(x * y, x * y) + z
    return bits_float(_rounded_f32(numerator, denominator.bit_length() - 1))


def _rounded_f32(numerator: int, log2_denominator: int) -> int:
    """FP32 bits of ``numerator / 2**log2_denominator``, round to nearest, ties to even."""
    sign, magnitude = (0x80000000, -numerator) if numerator < 0 else (0, numerator)
    e = max(magnitude.bit_length() - 1 - log2_denominator, -126)
    shift = log2_denominator + e - 23
    if shift <= 0:
        significand = magnitude << -shift
    else:
        significand = magnitude >> shift
        rest, half = magnitude & ((1 << shift) - 1), 1 << (shift - 1)
        significand += rest > half or (rest == half and significand & 1)
    if significand >> 24:
        significand, e = significand >> 1, e + 1
    if e > 127:
        return sign | INF_BITS
    return sign | ((e + 127 if significand >> 23 else 0) << 23) | (significand & 0x7FFFFF)


def bf16_bits(bits: int) -> int:
    """BF16 bits of FP32 bits, round to nearest even; NaN stays NaN."""
    if bits & 0x7FFFFFFF > INF_BITS:
        return 0x7FFF
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 & 0xFFFF


def reduce_add(x: int, y: int) -> int:
    """FP32 bits of ``x + y`` as the store engine adds a result onto memory, to nearest even.

    Subnormals, taken or made, become a zero of their sign. DeepGEMM SM100 stores with ``cp.reduce.async.bulk.tensor``
    (``epilogue/sm100_store_cd.cuh``); its rounding and flushing: PTX ISA 9.0, ``cp.reduce.async.bulk``. Unmeasured.
    """
    total = fma_f32(1.0, bits_float(_flushed(x)), bits_float(_flushed(y)))
    return NAN_BITS if math.isnan(total) else _flushed(float_bits(total))


def _flushed(bits: int) -> int:
    return bits & 0x80000000 if bits & INF_BITS == 0 else bits


def chain(
    arch: Arch, a: Sequence[int], b: Sequence[int], scales_a: Sequence, scales_b: Sequence, gran_k: int = 128
) -> int:
    """FP32 bits of one output over all of K, as DeepGEMM chains the instruction on ``arch``.

    scales_a, scales_b: one per ``gran_k`` of K; FP32 values where scales enter outside (SM90), else UE8M0 bytes.
    Source: DeepGEMM 54e2261 ``sm90_fp8_gemm_1d2d.cuh`` and ``sm100_fp8_fp4_gemm_1d1d.cuh``.
    """
    mma, final = arch.mma, 0
    for start in range(0, len(a), mma.k):
        piece, block = slice(start, start + mma.k), start // gran_k
        if arch.promotion_k is None:
            final = fdpa(a[piece], b[piece], final, mma, scales_a[block], scales_b[block])
            continue
        if start % arch.promotion_k == 0:
            accumulator = 0
        accumulator = fdpa(a[piece], b[piece], accumulator, mma)
        if (start + mma.k) % arch.promotion_k == 0:
            scale = bits_float(float_bits(scales_a[block] * scales_b[block]))
            final = float_bits(fma_f32(scale, bits_float(accumulator), bits_float(final)))
    return final
