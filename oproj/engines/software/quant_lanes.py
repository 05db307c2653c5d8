"""The quantisers bit by bit, compiled by Numba: rotation, block maximum, power-of-two scale, e4m3 codes.

Source of the arithmetic: vLLM 0.33.0 ``deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py`` as compiled by Triton
for sm_90 and sm_100 (the cosine product is fused), measured on an H200 without a differing bit.
"""

from __future__ import annotations

import numpy as np

from oproj.engines.software.lanes import as_f32, as_i32, fma, jit

E4M3_MAX = np.float32(448.0)
RECIPROCAL_448 = np.float32(1.0) / E4M3_MAX  # 0x3B124925
INF_BITS = np.int32(0x7F800000)
SUBNORMAL_MAGIC = np.float32(2.0**14)  # its FP32 ulp is 2**-9, the step of e4m3 subnormals


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
    """Exponent field of the smallest power of two s with ``448 * s >= amax`` (UE8M0 byte); 255 for an infinite amax.

    ``log2_rule`` reproduces ``exp2(ceil(log2(amax / 448)))`` in FP32, one octave lower just above ``448 * 2**k``.
    """
    if amax_bits == INF_BITS:
        return np.int32(255)
    raw = as_i32(as_f32(amax_bits) * RECIPROCAL_448)
    field = (raw >> np.int32(23)) + np.int32((raw & np.int32(0x7FFFFF)) != 0)
    if log2_rule:
        above = amax_bits - (((field + np.int32(7)) << np.int32(23)) | np.int32(0x600000))  # 448 * 2**(field-1-127)
        if 0 < above <= log2_band(field - 1 - 127):
            field -= np.int32(1)
    return field


@jit
def quantize_block(y, start, block, floor_bits, min_field, log2_rule, nan_code, codes, base):
    """Quantise ``y[start : start+block]`` into ``codes[base : base+block]``; returns the scale's exponent field.

    NaN takes no part in the maximum and gets ``nan_code``, as does Inf/Inf in a block with an infinite maximum.
    """
    amax = np.int32(floor_bits)
    for i in range(start, start + block):
        magnitude = as_i32(y[i]) & np.int32(0x7FFFFFFF)
        amax = max(amax, np.int32(0) if magnitude > INF_BITS else magnitude)
    field = max(scale_exponent(amax, log2_rule), np.int32(min_field))
    inverse = np.float32(0.0) if field == 255 else as_f32((np.int32(254) - field) << np.int32(23))
    for i in range(block):
        value = y[start + i] * inverse  # exact: a power of two; below 2**-126 every result is a zero code
        clamped = min(max(value, -E4M3_MAX), E4M3_MAX)
        codes[base + i] = e4m3_rne(clamped) if value == value else np.uint8(nan_code)
    return field


@jit
def inverse_rotate(y, nope_dim, rope_dim, row, fused):
    """Rotate the last ``rope_dim`` values of ``y`` back in place; ``row`` holds cosines, then sines (FP32)."""
    half = rope_dim // 2
    for j in range(half):
        c, s = row[j], row[half + j]
        even, odd = y[nope_dim + 2 * j], y[nope_dim + 2 * j + 1]
        if fused:
            y[nope_dim + 2 * j] = fma(even, c, odd * s)
            y[nope_dim + 2 * j + 1] = fma(odd, c, -(even * s))
        else:
            y[nope_dim + 2 * j] = even * c + odd * s
            y[nope_dim + 2 * j + 1] = odd * c - even * s


@jit
def load_rotated(o, at, y, nope_dim, rope_dim, row, fused):
    """One head of BF16 bits ``o[at:]`` as rotated FP32 in ``y``."""
    for i in range(nope_dim + rope_dim):
        y[i] = as_f32(np.int32(np.uint32(o[at + i]) << np.uint32(16)))
    inverse_rotate(y, nope_dim, rope_dim, row, fused)


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
    fused,
    block,
    floor_bits,
    min_field,
    log2_rule,
    nan_code,
    codes,
    fields,
):
    """Tokens ``t0:t1`` of the fused kernel.

    o: BF16 bits of the buffer, 1-D, addressed by ``strides`` (token, head); codes: uint8 [G, T, heads_per_group*
    head_dim]; fields: uint8 UE8M0 bytes [G, K-blocks, T or more].
    """
    head_dim = nope_dim + rope_dim
    blocks = head_dim // block
    y = np.empty(head_dim, np.float32)
    for t in range(t0, t1):
        row = table[positions[t]]
        for group in range(codes.shape[0]):
            line = codes[group, t]
            for i in range(heads_per_group):
                head = group * heads_per_group + i
                load_rotated(o, t * strides[0] + head * strides[1], y, nope_dim, rope_dim, row, fused)
                for j in range(blocks):
                    at = i * head_dim + j * block
                    fields[group, i * blocks + j, t] = quantize_block(
                        y, j * block, block, floor_bits, min_field, log2_rule, nan_code, line, at
                    )


@jit
def rotate_tokens(o, strides, t0, t1, positions, table, heads_per_group, nope_dim, rope_dim, fused, out):
    """BF16 mode of the fused kernel: rotation in FP32, one rounding to BF16 bits in ``out`` [G, T, K]."""
    head_dim = nope_dim + rope_dim
    y = np.empty(head_dim, np.float32)
    for t in range(t0, t1):
        row = table[positions[t]]
        for group in range(out.shape[0]):
            line = out[group, t]
            for i in range(heads_per_group):
                head = group * heads_per_group + i
                load_rotated(o, t * strides[0] + head * strides[1], y, nope_dim, rope_dim, row, fused)
                for k in range(head_dim):
                    bits = as_i32(y[k])
                    rounded = bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))
                    nan = (bits & np.int32(0x7FFFFFFF)) > INF_BITS
                    line[i * head_dim + k] = np.uint16(0x7FFF) if nan else np.uint16(rounded >> np.int32(16))


@jit
def quantize_rows(x, stride, t0, t1, k, block, floor_bits, min_field, log2_rule, nan_code, codes, fields):
    """Rows ``t0:t1`` of BF16 bits ``x`` (1-D, row stride ``stride``) per 1 x block."""
    y = np.empty(k, np.float32)
    for t in range(t0, t1):
        for i in range(k):
            y[i] = as_f32(np.int32(np.uint32(x[t * stride + i]) << np.uint32(16)))
        for j in range(k // block):
            fields[j, t] = quantize_block(
                y, j * block, block, floor_bits, min_field, log2_rule, nan_code, codes[t], j * block
            )
