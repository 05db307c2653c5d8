// Inverse RoPE and FP8 block quantisation of the attention output in one pass over memory.
//
// A warp takes one head of 512 values for TOKENS consecutive tokens. A lane holds 16 values of each token:
//     A: dims   0..255, 8 a lane (one 16-byte load)
//     B: dims 256..383, 4 a lane (one 8-byte load)
//     C: dims 384..511, 4 a lane (one 8-byte load); lanes 16..31 hold the 64 rotated dims, two pairs each
// so that every access of a warp is contiguous and half the lanes share the rotation. All loads of all tokens are
// issued before the first use. The scale words of the TOKENS tokens are stored together (16 bytes for 4).
//
// Arithmetic: see oproj/engines/software/quant_lanes.py, whose bits these are.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int HEAD = 512, NOPE = 448, HALF_ROPE = 32;
#ifndef WARPS
#define WARPS 8
#endif
#ifndef STREAM_STORES
#define STREAM_STORES 1
#endif
#ifndef KEEP_WRITES                       // loads leave the L2's order of eviction alone: written lines stay longer
#define KEEP_WRITES 0
#endif
#ifndef EARLY_POSITIONS
#define EARLY_POSITIONS 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif
constexpr u32 FULL = 0xFFFFFFFFu;
constexpr u32 AMAX_FLOOR = 0x2EDBE6FFu;   // fl(1e-10)
constexpr float RECIPROCAL_448 = 1.0f / 448.0f;

struct Values {                           // the 16 values of a lane
    float a[8], b[4], c[4];
};

__device__ __forceinline__ u64 evict_unchanged() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 evict_last() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint4 stream_16(const u16 *p) {
    uint4 v;
#if KEEP_WRITES
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(evict_unchanged()));
#else
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#endif
    return v;
}

__device__ __forceinline__ uint2 stream_8(const u16 *p) {
    uint2 v;
#if KEEP_WRITES
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y) : "l"(p), "l"(evict_unchanged()));
#else
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
#endif
    return v;
}

// Scales: a sector fills by stores of several warps, so it must not leave the L2 in between.
__device__ __forceinline__ void put_scales(u32 *p, uint4 v) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(evict_last()) : "memory");
}

__device__ __forceinline__ void put_scale(u32 *p, u32 v) {
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" :: "l"(p), "r"(v), "l"(evict_last()) : "memory");
}

template <typename T>
__device__ __forceinline__ void put(T *p, T v) {
#if STREAM_STORES
    __stcs(p, v);
#else
    *p = v;
#endif
}

__device__ __forceinline__ void unpack(u32 pair, float &low, float &high) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xFFFF0000u);
}

template <bool FUSED>
__device__ __forceinline__ void rotate(float &even, float &odd, float c, float s) {
    float x = even, y = odd;
    if (FUSED) {                          // the cosine product is fused, the sine product rounded
        even = __fmaf_rn(x, c, __fmul_rn(y, s));
        odd = __fmaf_rn(y, c, -__fmul_rn(x, s));
    } else {
        even = __fadd_rn(__fmul_rn(x, c), __fmul_rn(y, s));
        odd = __fsub_rn(__fmul_rn(y, c), __fmul_rn(x, s));
    }
}

// FP32 ulps above 448 * 2^k for which ceil(log2(.)) of the serving engine's compiler still returns k
__device__ __forceinline__ int log2_band(int k) {
    if (k >= -4 && k <= 3) return 0;
    if (k >= -8 && k <= 7) return 1;
    if (k >= -16 && k <= 15) return 3;
    if (k >= -32 && k <= 31) return 8;
    return k <= 63 ? 19 : 38;
}

// UE8M0 byte of the scale for a block maximum (FP32 bits, at least AMAX_FLOOR)
template <bool LOG2>
__device__ __forceinline__ u32 scale_field(u32 amax) {
    u32 raw = __float_as_uint(__fmul_rn(__uint_as_float(amax), RECIPROCAL_448));
    u32 field = (raw >> 23) + ((raw & 0x7FFFFFu) != 0);
    if (amax == 0x7F800000u) return 255;
    if (LOG2) {
        int above = (int)amax - (int)(((field + 7) << 23) | 0x600000u);
        if (above > 0 && above <= 38 && above <= log2_band((int)field - 128)) field -= 1;
    }
    return field;
}

__device__ __forceinline__ float inverse_of(u32 field) {
    return field == 255 ? 0.0f : __uint_as_float((254u - field) << 23);
}

template <int LANES>
__device__ __forceinline__ u32 maximum(float m) {   // over LANES neighbouring lanes, NaN left out
    u32 bits = max(__float_as_uint(fmaxf(m, 0.0f)), AMAX_FLOOR);
    if (LANES == 32) return __reduce_max_sync(FULL, bits);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) bits = max(bits, __shfl_xor_sync(FULL, bits, step));
    return bits;
}

// two e4m3 codes, round to nearest even, saturating. ON_NAN: 0 gives 0x7F; the serving engine's fused kernel gives
// 0x7E (1), its quantiser of z 0xFE (2)
template <int ON_NAN>
__device__ __forceinline__ u32 encode2(float low, float high, float inverse) {
    float x = low * inverse, y = high * inverse;
    if (ON_NAN == 1) x = fminf(x, 448.0f), y = fminf(y, 448.0f);
    if (ON_NAN == 2) x = fmaxf(x, -448.0f), y = fmaxf(y, -448.0f);
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
    return pair;
}

template <int ON_NAN>
__device__ __forceinline__ u32 encode4(const float *v, float inverse) {
    return encode2<ON_NAN>(v[0], v[1], inverse) | encode2<ON_NAN>(v[2], v[3], inverse) << 16;
}

template <bool FUSED>
__device__ __forceinline__ void decode(Values &v, uint4 a, uint2 b, uint2 c, float2 cosine, float2 sine, bool rope) {
    unpack(a.x, v.a[0], v.a[1]), unpack(a.y, v.a[2], v.a[3]), unpack(a.z, v.a[4], v.a[5]), unpack(a.w, v.a[6], v.a[7]);
    unpack(b.x, v.b[0], v.b[1]), unpack(b.y, v.b[2], v.b[3]);
    unpack(c.x, v.c[0], v.c[1]), unpack(c.y, v.c[2], v.c[3]);
    float r[4] = {v.c[0], v.c[1], v.c[2], v.c[3]};
    rotate<FUSED>(r[0], r[1], cosine.x, sine.x), rotate<FUSED>(r[2], r[3], cosine.y, sine.y);
#pragma unroll
    for (int i = 0; i < 4; ++i) v.c[i] = rope ? r[i] : v.c[i];
}

__device__ __forceinline__ float largest4(const float *v) {
    return fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
}

// Programmatic dependent launch: the next kernel may start now; this one reads after its producer has finished.
__device__ __forceinline__ void begin_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_producer() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <int TOKENS>
__device__ __forceinline__ void load_table(
    float2 *cosine, float2 *sine, const i64 *positions, const float *table, i64 table_row, u32 t0, u32 tokens, int lane) {
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
        if (t0 + i < tokens) {
            const float *row = table + positions[t0 + i] * table_row + (lane & 15) * 2;
            cosine[i] = *(const float2 *)row;
            sine[i] = *(const float2 *)(row + HALF_ROPE);
        }
}

// quantise: out u8 [G, T, K]; scales FP32 or packed int32 [G, columns, scale_stride]. GROUP 0: BF16 out, no scales.
template <int GROUP, bool PACKED, int TOKENS, bool FUSED, bool LOG2, bool LAUNDER>
__device__ __forceinline__ void quantize_heads(
    const u16 *o, const i64 *positions, const float *table, u8 *out, u32 *scales, u32 tokens, u32 heads,
    u32 heads_per_group, u32 scale_stride, i64 o_token, i64 o_head, i64 table_row) {
    constexpr bool QUANTIZE = GROUP != 0;
    constexpr int BLOCK = QUANTIZE ? GROUP : 128, LANES_A = BLOCK / 8, LANES_BC = BLOCK / 4;
    constexpr int BYTES = QUANTIZE ? 1 : 2;
    const int lane = threadIdx.x % 32;
    const bool rope = lane >= 16;
    // 32-bit on purpose: a 64-bit division costs more than the rest of the address arithmetic together
    const u32 warp = blockIdx.x * WARPS + threadIdx.x / 32;
    const u32 t0 = warp / heads * TOKENS;
    const u32 head = warp % heads, group = head / heads_per_group, in_group = head % heads_per_group;
    const u32 rows = QUANTIZE ? scale_stride : tokens;
    if (t0 >= rows) return;
    begin_dependents();
    float2 cosine[TOKENS], sine[TOKENS];
#if EARLY_POSITIONS                       // see the wrapper: only where no kernel in flight writes positions or table
    load_table<TOKENS>(cosine, sine, positions, table, table_row, t0, tokens, lane);
    wait_for_producer();
#else
    wait_for_producer();
#endif
    uint4 a[TOKENS];
    uint2 b[TOKENS], c[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
        if (t0 + i < tokens) {
            const u16 *p = o + (i64)(t0 + i) * o_token + (i64)head * o_head;
            a[i] = stream_16(p + lane * 8);
            b[i] = stream_8(p + 256 + lane * 4);
            c[i] = stream_8(p + 384 + lane * 4);
        }
#if !EARLY_POSITIONS
    load_table<TOKENS>(cosine, sine, positions, table, table_row, t0, tokens, lane);
#endif

    const i64 k = (i64)heads_per_group * HEAD;
    u32 fields[TOKENS];                   // scale bytes of this lane's blocks in A, B and C, one word a token
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        fields[i] = 0;                    // padding rows
        if (t0 + i >= tokens) continue;
        Values v;
        decode<FUSED>(v, a[i], b[i], c[i], cosine[i], sine[i], rope);
        u8 *p = out + (((i64)group * tokens + t0 + i) * k + in_group * HEAD) * BYTES;
        if constexpr (QUANTIZE) {
            u32 field_a = scale_field<LOG2>(maximum<LANES_A>(fmaxf(largest4(v.a), largest4(v.a + 4))));
            u32 field_b = scale_field<LOG2>(maximum<LANES_BC>(largest4(v.b)));
            u32 field_c = scale_field<LOG2>(maximum<LANES_BC>(largest4(v.c)));
            fields[i] = field_a | field_b << 8 | field_c << 16;
            float inverse = inverse_of(field_a);
            uint2 codes = {encode4<LAUNDER>(v.a, inverse), encode4<LAUNDER>(v.a + 4, inverse)};
            put((uint2 *)(p + lane * 8), codes);
            put((u32 *)(p + 256 + lane * 4), encode4<LAUNDER>(v.b, inverse_of(field_b)));
            put((u32 *)(p + 384 + lane * 4), encode4<LAUNDER>(v.c, inverse_of(field_c)));
        } else {
            u32 pair[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair[j]) : "f"(v.c[2 * j + 1]), "f"(v.c[2 * j]));
            put((uint4 *)(p + lane * 16), a[i]);
            put((uint2 *)(p + 512 + lane * 8), b[i]);
            put((uint2 *)(p + 768 + lane * 8), rope ? make_uint2(pair[0], pair[1]) : c[i]);
        }
    }
    if constexpr (!QUANTIZE) return;

    // One lane a block stores its scales: lanes 0 mod LANES_A for A, 1 and 2 mod LANES_BC for B and C.
    const bool in_a = lane % LANES_A == 0, in_b = lane % LANES_BC == 1, in_c = lane % LANES_BC == 2;
    const int part = in_b ? 1 : in_c ? 2 : 0;
    const int block = in_b ? 256 / BLOCK + lane / LANES_BC : in_c ? 384 / BLOCK + lane / LANES_BC : lane / LANES_A;
    constexpr int BLOCKS = HEAD / BLOCK, WORDS = BLOCKS / 4;
    u32 word[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        u32 mine = fields[i] >> part * 8 & 255;
        if constexpr (PACKED) {
            mine = in_a || in_b || in_c ? mine << (block % 4 * 8) : 0;
            word[i] = 0;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                u32 joined = __reduce_or_sync(FULL, block / 4 == w ? mine : 0);
                word[i] = lane == w ? joined : word[i];
            }
        } else {
            word[i] = t0 + i < tokens ? mine << 23 : 0;
        }
    }
    const bool stores = PACKED ? lane < WORDS : in_a || in_b || in_c;
    if (!stores) return;
    const u32 column = PACKED ? in_group * WORDS + lane : in_group * BLOCKS + block;
    const u32 columns = heads_per_group * (PACKED ? WORDS : BLOCKS);
    u32 *p = scales + (i64)(group * columns + column) * scale_stride + t0;
    if constexpr (TOKENS == 4) {
        put_scales(p, make_uint4(word[0], word[1], word[2], word[3]));
    } else {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i)
            if (t0 + i < rows) put_scale(p + i, word[i]);
    }
}

// CONFIG: the template arguments; one compiled kernel per configuration, so that the cubin caches by its source.
#ifdef CONFIG
extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) inv_rope_quant(
    const u16 *o, const i64 *positions, const float *table, u8 *out, u32 *scales, u32 tokens, u32 heads,
    u32 heads_per_group, u32 scale_stride, i64 o_token, i64 o_head, i64 table_row) {
    quantize_heads<CONFIG>(o, positions, table, out, scales, tokens, heads, heads_per_group, scale_stride, o_token,
                           o_head, table_row);
}
#endif

// Rows of BF16 [rows, k] per 1 x GROUP, as the serving engine quantises z for wo_b: exact ceiling, a floor of 1e-10 on
// the maximum and on the scale (byte 94). A warp takes 512 columns of a row; scales are MN-major, padding rows zero.
template <int GROUP, bool PACKED>
__device__ __forceinline__ void quantize_row(
    const u16 *x, u8 *out, u32 *scales, u32 rows, u32 k, u32 scale_stride, i64 x_row) {
    constexpr u32 MIN_FIELD = 94;
    constexpr int LANES = GROUP / 4, BLOCKS = 128 / GROUP;   // blocks of 128 columns
    const int lane = threadIdx.x % 32;
    const u32 warp = blockIdx.x * WARPS + threadIdx.x / 32;
    const u32 chunks = (k + 511) / 512, row = warp / chunks, chunk = warp % chunks;
    if (row >= scale_stride) return;
    begin_dependents();
    wait_for_producer();
    u32 word = 0;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const u32 column = chunk * 512 + part * 128;
        if (column >= k) break;
        u32 field = 0;
        if (row < rows) {
            uint2 raw = stream_8(x + (i64)row * x_row + column + lane * 4);
            float v[4];
            unpack(raw.x, v[0], v[1]), unpack(raw.y, v[2], v[3]);
            field = max(scale_field<false>(maximum<LANES>(largest4(v))), MIN_FIELD);
            put((u32 *)(out + (i64)row * k + column + lane * 4), encode4<2>(v, inverse_of(field)));
        }
        if constexpr (!PACKED) {
            if (lane % LANES == 0) scales[(i64)(column / GROUP + lane / LANES) * scale_stride + row] = field << 23;
        } else if constexpr (GROUP == 128) {
            word |= field << (part * 8);
        } else {                                             // 32: the four blocks of this part fill a word
            u32 joined = __reduce_or_sync(FULL, lane % LANES == 0 ? field << (lane / LANES * 8) : 0);
            if (lane == 0) scales[(i64)(column / 128) * scale_stride + row] = joined;
        }
    }
    if (PACKED && GROUP == 128 && lane == 0) scales[(i64)chunk * scale_stride + row] = word;
}

#ifdef ROWS_CONFIG
extern "C" __global__ void __launch_bounds__(WARPS * 32) quantize_rows(
    const u16 *x, u8 *out, u32 *scales, u32 rows, u32 k, u32 scale_stride, i64 x_row) {
    quantize_row<ROWS_CONFIG>(x, out, scales, rows, k, scale_stride, x_row);
}
#endif
