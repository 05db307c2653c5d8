"""The fast twin of ``spec``: one fused sum for a tile of output columns at once, compiled by Numba.

Exactness in machine words: a product of two e4m3 significands has at most 8 bits, so ``a*b*2**shift`` is exact in
FP32 and its conversion to int32 truncates toward zero, which is the alignment of the tensor core. Sixteen aligned
products stay below 2**31 for ``frac_bits <= 25``; two such halves and the aligned accumulator add up exactly in
float64. The innermost loops run over columns, so that LLVM turns them into SIMD code.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

WIDTH = 64  # output columns of a tile
BLOCK_K = 128  # K elements decoded at a time
STEP_K = 32  # products in one fused sum
ZERO_CODE_EXPONENT = np.int8(-60)  # of a zero code: below every real exponent, and two of them fit int8
NO_PRODUCT = np.int32(-40)  # a largest product exponent below this means that all products are zero

jit = njit(cache=True, nogil=True, error_model="numpy")


@intrinsic
def fma(typingctx, x, y, z):
    """FP32 fused multiply-add with one rounding (LLVM ``llvm.fma``)."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def as_f32(typingctx, bits):
    """The FP32 value of int32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def as_i32(typingctx, value):
    """The int32 bits of an FP32 value."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def as_f64(typingctx, bits):
    """The float64 value of int64 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic
def as_i64(typingctx, value):
    """The int64 bits of a float64 value."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), codegen


@jit
def max_exponents(ea, ka, eb, kb, top):
    """``top[l] = max_k ea[ka+k] + eb[kb+k, l]`` over one step; exponents are those of the codes, not normalised."""
    for lane in range(WIDTH):
        top[lane] = -128
    for i in range(0, STEP_K, 4):  # four rows a pass: each pass loads and stores top once
        e0, e1, e2, e3 = ea[ka + i], ea[ka + i + 1], ea[ka + i + 2], ea[ka + i + 3]
        k = kb + i
        for lane in range(WIDTH):
            m01 = max(np.int8(e0 + eb[k, lane]), np.int8(e1 + eb[k + 1, lane]))
            m23 = max(np.int8(e2 + eb[k + 2, lane]), np.int8(e3 + eb[k + 3, lane]))
            top[lane] = max(top[lane], max(m01, m23))


@jit
def sum_products(a, ka, b, kb, shift, total):
    """``total[l] = sum_k trunc(a[ka+k] * shift[l] * b[kb+k, l])`` over half a step."""
    for lane in range(WIDTH):
        total[lane] = 0
    for i in range(0, STEP_K // 2, 4):
        a0, a1, a2, a3 = a[ka + i], a[ka + i + 1], a[ka + i + 2], a[ka + i + 3]
        k = kb + i
        for lane in range(WIDTH):
            s = shift[lane]
            t01 = np.int32(a0 * s * b[k, lane]) + np.int32(a1 * s * b[k + 1, lane])
            t23 = np.int32(a2 * s * b[k + 2, lane]) + np.int32(a3 * s * b[k + 3, lane])
            total[lane] += t01 + t23


@jit
def truncate_f32(value, out_frac_bits):
    """FP32 of a float64, toward zero, with ``out_frac_bits`` fraction bits; subnormals kept, overflow is Inf."""
    mask = ~((np.int64(1) << np.int64(52 - out_frac_bits)) - np.int64(1))
    normal = as_f64(as_i64(value) & mask)
    unit = as_f64(np.int64(1023 + 126 + out_frac_bits) << np.int64(52))
    tiny = np.trunc(value * unit) / unit + 0.0  # + 0.0: an underflow of either sign is +0
    return np.float32(tiny if abs(value) < 2.0**-126 else normal)


@jit
def fused_step(a, ea, ka, b, eb, kb, scale, acc, frac_bits, out_frac_bits, zero_exponent, work):
    """One instruction for WIDTH columns: ``acc[l]`` becomes the fused sum of STEP_K products and itself.

    a, ea: FP32 values and int8 exponents of one token's codes; b, eb: the same of the weights, ``[K, WIDTH]``;
    scale: int32 [WIDTH], exponent added to every product (0 where scales stay outside).
    """
    top8, top, shift, low, high = work
    max_exponents(ea, ka, eb, kb, top8)
    for lane in range(WIDTH):
        exponent = (as_i32(acc[lane]) >> np.int32(23)) & np.int32(255)
        acc_top = max(exponent, np.int32(1)) - np.int32(127)
        if acc[lane] == 0:
            acc_top = np.int32(zero_exponent)
        product_top = np.int32(top8[lane])
        largest = product_top + scale[lane] if product_top > NO_PRODUCT else np.int32(zero_exponent)
        top[lane] = max(max(largest, acc_top), np.int32(zero_exponent))
        # Products further down than 100 bits vanish either way; the clamp keeps 2**shift an FP32 number.
        relative = min(max(top[lane] - scale[lane], np.int32(-40)), np.int32(100))
        shift[lane] = as_f32((np.int32(127 + frac_bits) - relative) << np.int32(23))
    sum_products(a, ka, b, kb, shift, low)
    sum_products(a, ka + STEP_K // 2, b, kb + STEP_K // 2, shift, high)
    for lane in range(WIDTH):
        unit = as_f64(np.int64(1023 + top[lane] - frac_bits) << np.int64(52))  # weight of the last kept bit
        inverse = as_f64(np.int64(1023 - top[lane] + frac_bits) << np.int64(52))
        aligned = np.trunc(np.float64(acc[lane]) * inverse)
        total = np.float64(low[lane]) + np.float64(high[lane]) + aligned
        result = truncate_f32(total * unit, out_frac_bits)
        acc[lane] = acc[lane] if abs(acc[lane]) == np.inf else result


@jit
def decode_block(codes, n0, n1, k0, values, exponents, lut, exponent_lut):
    """Decode weight codes ``[n0:n1, k0:k0+BLOCK_K]`` into ``[BLOCK_K, WIDTH]`` tiles; missing columns are zero."""
    for lane in range(WIDTH):
        n = n0 + lane
        for k in range(BLOCK_K):
            code = codes[n, k0 + k] if n < n1 else np.uint8(0)
            values[k, lane] = lut[code]
            exponents[k, lane] = exponent_lut[code]


@jit
def work_arrays():
    """Scratch of ``fused_step``: int8 top, int32 top, FP32 shift, two int32 halves."""
    return (
        np.empty(WIDTH, np.int8),
        np.empty(WIDTH, np.int32),
        np.empty(WIDTH, np.float32),
        np.empty(WIDTH, np.int32),
        np.empty(WIDTH, np.int32),
    )


@jit
def promoted_tile(a, ea, sa, codes, sb, n0, out, lut, exponent_lut, frac_bits, out_frac_bits, zero_exponent):
    """Scales outside (SM90): a fresh accumulator per BLOCK_K, then ``out = fma(sa*sb, acc, out)`` in FP32.

    a, ea: [T, K]; sa: FP32 [T, K/BLOCK_K]; codes: uint8 [N, K]; sb: FP32 [N, K/BLOCK_K]; out: FP32 [T, N], columns
    ``n0 : n0+WIDTH`` are written.
    """
    tokens, k = a.shape
    n1 = min(n0 + WIDTH, codes.shape[0])
    values, exponents = np.empty((BLOCK_K, WIDTH), np.float32), np.empty((BLOCK_K, WIDTH), np.int8)
    work, no_scale, acc = work_arrays(), np.zeros(WIDTH, np.int32), np.empty(WIDTH, np.float32)
    final = np.zeros((tokens, WIDTH), np.float32)
    column_scale = np.zeros(WIDTH, np.float32)
    for block in range(k // BLOCK_K):
        decode_block(codes, n0, n1, block * BLOCK_K, values, exponents, lut, exponent_lut)
        for n in range(n0, n1):
            column_scale[n - n0] = sb[n, block]
        for t in range(tokens):
            acc[:] = 0
            for k0 in range(0, BLOCK_K, STEP_K):
                fused_step(
                    a[t],
                    ea[t],
                    block * BLOCK_K + k0,
                    values,
                    exponents,
                    k0,
                    no_scale,
                    acc,
                    frac_bits,
                    out_frac_bits,
                    zero_exponent,
                    work,
                )
            token_scale = sa[t, block]
            for lane in range(WIDTH):
                final[t, lane] = fma(token_scale * column_scale[lane], acc[lane], final[t, lane])
    for t in range(tokens):
        for n in range(n0, n1):
            out[t, n] = final[t, n - n0]


@jit
def scaled_tile(a, ea, sa, codes, sb, n0, out, lut, exponent_lut, gran_k, frac_bits, out_frac_bits, zero_exponent):
    """Scales inside (SM100, SM120): one truncating accumulator over all of K.

    As ``promoted_tile``, but sa: int32 UE8M0 exponents [T, K/gran_k] (bias removed), sb: int32 [N, K/gran_k].
    """
    tokens, k = a.shape
    n1 = min(n0 + WIDTH, codes.shape[0])
    values, exponents = np.empty((BLOCK_K, WIDTH), np.float32), np.empty((BLOCK_K, WIDTH), np.int8)
    work, scale = work_arrays(), np.zeros(WIDTH, np.int32)
    final = np.zeros((tokens, WIDTH), np.float32)
    column_scale = np.zeros((BLOCK_K // STEP_K, WIDTH), np.int32)
    for block in range(k // BLOCK_K):
        decode_block(codes, n0, n1, block * BLOCK_K, values, exponents, lut, exponent_lut)
        for step in range(BLOCK_K // STEP_K):
            for n in range(n0, n1):
                column_scale[step, n - n0] = sb[n, (block * BLOCK_K + step * STEP_K) // gran_k]
        for t in range(tokens):
            for step in range(BLOCK_K // STEP_K):
                token_scale = sa[t, (block * BLOCK_K + step * STEP_K) // gran_k]
                for lane in range(WIDTH):
                    scale[lane] = token_scale + column_scale[step, lane]
                k0 = step * STEP_K
                fused_step(
                    a[t],
                    ea[t],
                    block * BLOCK_K + k0,
                    values,
                    exponents,
                    k0,
                    scale,
                    final[t],
                    frac_bits,
                    out_frac_bits,
                    zero_exponent,
                    work,
                )
    for t in range(tokens):
        for n in range(n0, n1):
            out[t, n] = final[t, n - n0]
