"""The quantisers bit by bit, compiled by Numba: rotation, block maximum, scale, e4m3 codes.

One model for all of them; what differs is a ``Rule`` of numbers, filled by the rows of ``quantizer_table``. As the
row ``vllm-fused`` it is measured: no differing bit against the serving engine's kernel on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oproj.engines.software.lanes import as_f32, as_i32, fma, jit

E4M3_MAX = np.float32(448.0)
RECIPROCAL_448 = np.float32(1.0) / E4M3_MAX  # 0x3B124925
INF_BITS = np.int32(0x7F800000)
NAN_BITS = np.int32(0x7FC00000)
SUBNORMAL_MAGIC = np.float32(2.0**14)  # its FP32 ulp is 2**-9, the step of e4m3 subnormals

ROTATIONS = {"mul_mul_add": 0, "fma_cos": 1, "fma_sin": 2}  # which product is fused into the sum


class Rule(NamedTuple):
    """A quantiser as the kernels take it."""

    floor_bits: np.int32  # floor of the block maximum, FP32 bits
    log2_rule: bool  # 2**ceil(log2(amax/448)) in FP32 instead of the exact ceiling
    min_field: int  # bounds of a power-of-two scale's exponent field
    max_field: int
    fp32_scale: bool  # the scale is amax/448 itself, no power of two
    divides: bool  # ... as a division; else amax * fl(1/448)
    divides_codes: bool  # ... and codes are y / scale; else y * fl(1/scale)
    nan_spreads: bool  # a NaN is the block's maximum instead of being ignored by it
    nan_code: int


@jit
def e4m3_rne(value):
    """e4m3 code of an FP32 value in [-448, 448], round to nearest, ties to even; -0 keeps its sign."""
    bits = as_i32(value)
    sign, magnitude = (bits >> np.int32(24)) & np.int32(0x80), bits & np.int32(0x7FFFFFFF)
    odd = (magnitude >> np.int32(20)) & np.int32(1)
    normal = ((magnitude + np.int32(0x7FFFF) + odd) >> np.int32(20)) - np.int32(120 << 3)
    subnormal = as_i32(as_f32(magnitude) + SUBNORMAL_MAGIC) - as_i32(SUBNORMAL_MAGIC)
    return np.uint8(sign | (normal if magnitude >= np.int32(121 << 23) else subnormal))


@jit
def log2_band(k):
    """FP32 ulps above ``448 * 2**k`` for which ``ceil(log2(.))`` in FP32 still returns ``k``.

    From exact emulation of the CUDA libdevice polynomial over every mantissa.
    """
    if -4 <= k <= 3:
        return 0
    if -8 <= k <= 7:
        return 1
    if -16 <= k <= 15:
        return 3
    if -32 <= k <= 31:
        return 8
    if k <= 63:
        return 19
    return 38


@jit
def scale_exponent(amax_bits, log2_rule):
    """Exponent field of the smallest power of two s with ``448 * s >= amax`` (UE8M0 byte); 255 for Inf and NaN.

    ``log2_rule`` reproduces ``exp2(ceil(log2(amax / 448)))`` in FP32, one octave lower just above ``448 * 2**k``.
    """
    if amax_bits >= INF_BITS:
        return np.int32(255)
    raw = as_i32(as_f32(amax_bits) * RECIPROCAL_448)
    field = (raw >> np.int32(23)) + np.int32((raw & np.int32(0x7FFFFF)) != 0)
    if log2_rule:
        above = amax_bits - (((field + np.int32(7)) << np.int32(23)) | np.int32(0x600000))  # 448 * 2**(field-1-127)
        if 0 < above <= log2_band(field - 1 - 127):
            field -= np.int32(1)
    return field


@jit
def block_scale(amax, rule):
    """FP32 bits of a block's scale, from the bits of its maximum (which a NaN passes only where it spreads)."""
    if rule.fp32_scale:
        if amax > INF_BITS:
            return NAN_BITS
        return as_i32(as_f32(amax) / E4M3_MAX if rule.divides else as_f32(amax) * RECIPROCAL_448)
    field = max(scale_exponent(amax, rule.log2_rule), np.int32(rule.min_field))
    return min(field, np.int32(rule.max_field)) << np.int32(23)


@jit
def encode(value, nan_code):
    """e4m3 code of any FP32 value: clamped to +-448, then nearest even."""
    clamped = min(max(value, -E4M3_MAX), E4M3_MAX)
    return e4m3_rne(clamped) if value == value else np.uint8(nan_code)


@jit
def quantize_block(y, start, block, rule, codes, base):
    """Quantise ``y[start : start+block]`` into ``codes[base : base+block]``; returns the FP32 bits of the scale.

    ``rule.nan_code`` is also the code of Inf/Inf, in a block with an infinite scale.
    """
    amax = np.int32(rule.floor_bits)
    for i in range(start, start + block):
        magnitude = as_i32(y[i]) & np.int32(0x7FFFFFFF)
        amax = max(amax, np.int32(0) if magnitude > INF_BITS and not rule.nan_spreads else magnitude)
    scale = block_scale(amax, rule)
    if rule.fp32_scale and rule.divides_codes:
        for i in range(block):
            codes[base + i] = encode(y[start + i] / as_f32(scale), rule.nan_code)
    else:
        inverse = np.float32(1.0) / as_f32(scale)  # of a power of two exact, as the product is up to zero codes
        for i in range(block):
            codes[base + i] = encode(y[start + i] * inverse, rule.nan_code)
    return scale


@jit
def inverse_rotate(y, nope_dim, rope_dim, row, rotation):
    """Rotate the last ``rope_dim`` values of ``y`` back in place; ``row`` holds cosines, then sines (FP32).

    ``rotation``: a value of ``ROTATIONS``.
    """
    half = rope_dim // 2
    for j in range(half):
        c, s = row[j], row[half + j]
        even, odd = y[nope_dim + 2 * j], y[nope_dim + 2 * j + 1]
        if rotation == 1:
            y[nope_dim + 2 * j] = fma(even, c, odd * s)
            y[nope_dim + 2 * j + 1] = fma(odd, c, -(even * s))
        elif rotation == 2:
            y[nope_dim + 2 * j] = fma(odd, s, even * c)
            y[nope_dim + 2 * j + 1] = fma(-even, s, odd * c)
        else:
            y[nope_dim + 2 * j] = even * c + odd * s
            y[nope_dim + 2 * j + 1] = odd * c - even * s


@jit
def load(x, at, count, y):
    """``count`` values of the bits ``x[at:]`` as FP32 in ``y``: BF16 is uint16, FP32 is uint32."""
    shift = np.uint32(32 - 8 * x.itemsize)
    for i in range(count):
        y[i] = as_f32(np.int32(np.uint32(x[at + i]) << shift))


@jit
def quantize_tokens(
    o,
    strides,
    t0,
    t1,
    positions,
    table,
    heads_per_group,
    nope_dim,
    rope_dim,
    rotation,
    block,
    rule,
    codes,
    scales,
):
    """Tokens ``t0:t1``: heads rotated back, then quantised.

    o: BF16 or FP32 bits of the buffer, 1-D, addressed by ``strides`` (token, head); codes: uint8 [G, T,
    heads_per_group*head_dim]; scales: FP32 bits, int32 [G, K-blocks, T or more].
    """
    head_dim = nope_dim + rope_dim
    blocks = head_dim // block
    y = np.empty(head_dim, np.float32)
    for t in range(t0, t1):
        row = table[positions[t]]
        for group in range(codes.shape[0]):
            line = codes[group, t]
            for i in range(heads_per_group):
                load(o, t * strides[0] + (group * heads_per_group + i) * strides[1], head_dim, y)
                inverse_rotate(y, nope_dim, rope_dim, row, rotation)
                for j in range(blocks):
                    at = i * head_dim + j * block
                    scales[group, i * blocks + j, t] = quantize_block(y, j * block, block, rule, line, at)


@jit
def rotate_tokens(o, strides, t0, t1, positions, table, heads_per_group, nope_dim, rope_dim, rotation, out):
    """BF16 mode of the fused kernel: rotation in FP32, one rounding to BF16 bits in ``out`` [G, T, K]."""
    head_dim = nope_dim + rope_dim
    y = np.empty(head_dim, np.float32)
    for t in range(t0, t1):
        row = table[positions[t]]
        for group in range(out.shape[0]):
            line = out[group, t]
            for i in range(heads_per_group):
                load(o, t * strides[0] + (group * heads_per_group + i) * strides[1], head_dim, y)
                inverse_rotate(y, nope_dim, rope_dim, row, rotation)
                for k in range(head_dim):
                    bits = as_i32(y[k])
                    rounded = bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))
                    nan = (bits & np.int32(0x7FFFFFFF)) > INF_BITS
                    line[i * head_dim + k] = np.uint16(0x7FFF) if nan else np.uint16(rounded >> np.int32(16))


@jit
def quantize_rows(x, stride, t0, t1, k, block, rule, codes, scales):
    """Rows ``t0:t1`` of BF16 or FP32 bits ``x`` (1-D, row stride ``stride``) per 1 x block, the last one cut at ``k``.

    codes: uint8 [rows, k]; scales: FP32 bits, int32 [K-blocks, rows or more].
    """
    y = np.empty(k, np.float32)
    for t in range(t0, t1):
        load(x, t * stride, k, y)
        for j in range(-(-k // block)):
            width = min(block, k - j * block)
            scales[j, t] = quantize_block(y, j * block, width, rule, codes[t], j * block)
