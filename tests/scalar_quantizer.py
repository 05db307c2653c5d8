"""The quantisers once more, one value at a time in exact fractions: a second opinion on the software engine's bits.

    y0 = fma(x0, c, rn(x1*s)) ; y1 = fma(x1, c, -rn(x0*s))                     rotation in FP32 ("fma_cos")
    amax = max(floor, |y|) ; e = smallest integer with 448*2^e >= amax         (one less in the band of the log2 rule)
    code = e4m3 nearest even of y/2^e, clamped to +-448
    FP32 scales: s = rn(amax/448) or rn(amax*rn(1/448)) ; code of rn(y/s) or of rn(y*rn(1/s))

FP32 values are Python floats that FP32 holds. Sources of the arithmetic: vLLM 0.33.0
``deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py`` as compiled for sm_90, ``per_token_group_quant.cu``, DeepGEMM
54e2261 ``deep_gemm/utils/math.py``, FlashInfer 0.7.4 ``fmhaReduction.cu``, DeepSeek ``inference/model.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

# k from, k to, FP32 ulps above 448*2^k for which 2^ceil(log2(amax/448)) is still 2^k on the GPU
LOG2_BANDS = [(-4, 3, 0), (-8, 7, 1), (-16, 15, 3), (-32, 31, 8), (-43, 63, 19), (64, 127, 38)]


def fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


class Rule(NamedTuple):
    """What tells one quantiser from another."""

    scale: str  # ceil, log2, divide, multiply
    nan_code: int = 0x7F
    floor: float = fp32(1e-10)
    smallest_byte: int = 0
    largest_byte: int = 255
    nan_spreads: bool = False
    reciprocal: bool = False  # codes are y * rn(1/s)


FUSED = Rule("log2", 0x7E)
WO_B = Rule("ceil", 0xFE, smallest_byte=94)  # the scale itself has a floor of 1e-10: 2^-33
DEEP_GEMM = Rule("ceil", 0x7F, fp32(1e-4), 1, 254, nan_spreads=True)
DEEP_GEMM_FP32 = Rule("divide", 0x7F, fp32(1e-4), nan_spreads=True, reciprocal=True)
RULES = {
    "vllm-fused": FUSED,
    "rope-quant": Rule("ceil", 0xFE),
    "deep-gemm-token": DEEP_GEMM,
    "deep-gemm-token-fp32": DEEP_GEMM_FP32,
    "deep-gemm-block": DEEP_GEMM,
    "deep-gemm-block-fp32": DEEP_GEMM_FP32,
    "deep-gemm-channel": DEEP_GEMM,
    "deep-gemm-channel-fp32": DEEP_GEMM_FP32,
    "act-quant": Rule("ceil", floor=fp32(1e-4)),
    "vllm-group-packed": WO_B,
    "vllm-group-unpacked": WO_B,
    "vllm-group-fp32": Rule("divide", 0xFE),
    "vllm-triton-group": FUSED,
    "vllm-triton-group-fp32": Rule("multiply", 0x7E),
    "vllm-v41-wo-a": Rule("ceil"),
    "vllm-requantize": Rule("ceil", floor=fp32(1e-4)),
}


def bf16_value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


@cache
def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if power(guess) <= x else guess - 1


def nearest(x: Fraction, fraction_bits: int, smallest_exponent: int) -> Fraction:
    """``x`` with ``fraction_bits`` bits behind the leading one, ties to even; fixed steps below the normal range."""
    if x == 0:
        return x
    step = power(max(floor_log2(abs(x)), smallest_exponent) - fraction_bits)
    return round(x / step) * step  # Python rounds halves to even


def narrow(x: Fraction, fraction_bits: int) -> float:
    """``x != 0`` in FP32 (23 fraction bits) or BF16 (7): overflow is Inf, underflow a zero that keeps the sign."""
    value = nearest(x, fraction_bits, -126)
    return math.copysign(math.inf if abs(value) >= 2**128 else float(abs(value)), x)


def fma(a: float, b: float, c: float) -> float:
    """``a*b + c`` in FP32 with one rounding."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c  # finite products stay far inside float64, so only the operands decide
    total = Fraction(a) * Fraction(b) + Fraction(c)
    if total:
        return narrow(total, 23)
    return 0.0 if c else a * b + c  # x - x is +0; of two zeros the signs decide


def multiply(a: float, b: float) -> float:
    return fma(a, b, math.copysign(0.0, math.copysign(1.0, a) * math.copysign(1.0, b)))


def inverse_rotate(head: Sequence[float], row: Sequence[float], variant: str) -> list[float]:
    """A head with its last ``len(row)`` values turned back; ``row`` holds cosines, then sines."""
    half, nope = len(row) // 2, len(head) - len(row)
    turned = list(head[:nope])
    for j in range(half):
        c, s, even, odd = row[j], row[half + j], head[nope + 2 * j], head[nope + 2 * j + 1]
        if variant == "fma_cos":
            turned += [fma(even, c, multiply(odd, s)), fma(odd, c, -multiply(even, s))]
        elif variant == "fma_sin":
            turned += [fma(odd, s, multiply(even, c)), fma(-even, s, multiply(odd, c))]
        else:
            turned += [fma(multiply(even, c), 1.0, multiply(odd, s)), fma(multiply(odd, c), 1.0, -multiply(even, s))]
    return turned


def exact_exponent(amax: float) -> int:
    """The smallest integer e with ``448 * 2^e >= amax``, for a finite ``amax > 0``."""
    exponent = floor_log2(Fraction(amax)) - 9
    while 448 * power(exponent) < Fraction(amax):
        exponent += 1
    return exponent


def log2_exponent(amax: float) -> int:
    """``ceil(log2(amax/448))`` as the GPU evaluates it in FP32: low by one just above ``448 * 2^k``."""
    k = exact_exponent(amax) - 1
    ulps = (Fraction(amax) - 448 * power(k)) / power(k + 8 - 23)
    band = next(band for low, high, band in LOG2_BANDS if low <= k <= high)
    return k if 0 < ulps <= band else k + 1


def e4m3_code(value: Fraction, negative: bool) -> int:
    """Code of ``value`` in [-448, 448]; ``negative`` decides the sign of a zero."""
    magnitude = nearest(abs(value), 3, -6)
    if magnitude < Fraction(1, 64):
        code = int(magnitude * 512)
    else:
        exponent = floor_log2(magnitude)
        code = (exponent + 7) * 8 + int(magnitude / power(exponent) * 8) - 8
    return code | (0x80 if negative else 0)


def clamped_code(value: Fraction, negative: bool) -> int:
    return e4m3_code(max(min(value, Fraction(448)), Fraction(-448)), negative)


def is_negative(v: float) -> bool:
    return math.copysign(1, v) < 0


def maximum(y: Sequence[float], rule: Rule) -> float:
    """The block's maximum: NaN where one spreads."""
    if rule.nan_spreads and any(map(math.isnan, y)):
        return math.nan
    return max([rule.floor, *(abs(v) for v in y if not math.isnan(v))])


def scale_byte(amax: float, rule: Rule) -> int:
    if not math.isfinite(amax):
        return rule.largest_byte
    exponent = (log2_exponent if rule.scale == "log2" else exact_exponent)(amax)
    return min(max(exponent + 127, rule.smallest_byte), rule.largest_byte)


def fp32_scale(amax: float, rule: Rule) -> float:
    if not math.isfinite(amax):
        return amax
    exact = Fraction(amax) / 448 if rule.scale == "divide" else Fraction(amax) * Fraction(narrow(Fraction(1, 448), 23))
    return narrow(exact, 23)


def quotient(v: float, scale: float, rule: Rule) -> Fraction:
    """``v / scale`` of finite numbers as FP32 rounds it."""
    exact = (
        Fraction(v) * Fraction(narrow(1 / Fraction(scale), 23)) if rule.reciprocal else Fraction(v) / Fraction(scale)
    )
    return Fraction(narrow(exact, 23)) if exact else exact


def quantize_block(y: Sequence[float], rule: Rule) -> tuple[list[int], int | float]:
    """Codes of one block with its UE8M0 byte (255 stands for an infinite scale) or its FP32 scale."""
    amax, codes = maximum(y, rule), []
    mantissa = rule.scale in ("divide", "multiply")
    scale = fp32_scale(amax, rule) if mantissa else scale_byte(amax, rule)
    infinite, nan = scale == (math.inf if mantissa else 255), mantissa and math.isnan(scale)
    for v in y:
        if math.isnan(v) or nan or (infinite and math.isinf(v)):
            codes.append(rule.nan_code)
        elif infinite:
            codes.append(0x80 if is_negative(v) else 0)
        elif math.isinf(v):
            codes.append(0xFE if v < 0 else 0x7E)
        else:
            value = quotient(v, scale, rule) if mantissa else Fraction(v) / power(int(scale) - 127)
            codes.append(clamped_code(value, is_negative(v)))
    return codes, scale


def quantize_row(y: Sequence[float], block: int, rule: Rule) -> tuple[list[int], list[int | float]]:
    """Codes and bytes or FP32 scales of consecutive blocks."""
    pieces = [quantize_block(y[start : start + block], rule) for start in range(0, len(y), block)]
    return [code for codes, _ in pieces for code in codes], [scale for _, scale in pieces]
