// The tensor-core model on CUDA cores, for bulk proof; bit-equal to the CPU twin (oproj/engines/software/lanes.py).
//
// A block computes TILE x TILE outputs, a thread 4 x 4. Per instruction step of 32 products: decode both operands
// into shared memory, find the largest exponent of every output, then add the products, each truncated toward zero
// to FRAC bits of that exponent, and the accumulator, and truncate the sum to OUT bits.

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;

constexpr int TILE = 64;
constexpr int STEP = 32;
constexpr int PER = 4;                 // outputs of a thread along each axis
constexpr int THREADS = (TILE / PER) * (TILE / PER);
constexpr int ZERO_CODE = -60;         // exponent of a zero code
constexpr int NO_PRODUCT = -40;        // below it, every product is zero

__device__ __forceinline__ double power_of_two(int exponent) {
    return __longlong_as_double((i64)(exponent + 1023) << 52);
}

__device__ __forceinline__ float decode(u32 code) {
    u32 magnitude = code & 0x7F;
    float value = magnitude >= 8 ? __uint_as_float((magnitude << 20) + (120u << 23)) : (float)magnitude * 0x1p-9f;
    return code & 0x80 ? -value : value;
}

__device__ __forceinline__ int exponent_of(u32 code) {
    return (code & 0x7F) == 0 ? ZERO_CODE : max((int)(code >> 3) & 15, 1) - 7;
}

template <int FRAC, int OUT, int ZERO>
__device__ __forceinline__ float finish(float acc, int low, int high, int top) {
    if (isinf(acc)) return acc;
    double aligned = trunc((double)acc * power_of_two(FRAC - top));
    double value = ((double)low + (double)high + aligned) * power_of_two(top - FRAC);
    if (fabs(value) < 0x1p-126) {      // FP32 subnormals; an underflow of either sign is +0
        double units = trunc(value * power_of_two(126 + OUT));
        return (float)(units * power_of_two(-126 - OUT) + 0.0);
    }
    i64 bits = __double_as_longlong(value) >> (52 - OUT) << (52 - OUT);
    return (float)__longlong_as_double(bits);
}

template <int FRAC, int OUT, int ZERO, bool PROMOTE>
__global__ void __launch_bounds__(THREADS) twin(
    const u8 *a_codes, const u8 *b_codes,   // [G, T, K] and [G, N, K]
    const void *sa, const void *sb,         // [G, T, K/gran] and [G, N, K/gran]: FP32, or int32 exponents
    float *out,                             // [G, T, N]
    i64 tokens, i64 columns, i64 depth, i64 gran, i64 promote) {
    __shared__ __align__(16) float va[STEP][TILE], vb[STEP][TILE];
    __shared__ __align__(16) short ea[STEP][TILE], eb[STEP][TILE];
    const int tx = threadIdx.x % (TILE / PER), ty = threadIdx.x / (TILE / PER);
    const i64 group = blockIdx.z, t0 = (i64)blockIdx.y * TILE, n0 = (i64)blockIdx.x * TILE;
    const u8 *a = a_codes + group * tokens * depth, *b = b_codes + group * columns * depth;
    const i64 blocks = depth / gran;
    const i64 sa_base = group * tokens * blocks, sb_base = group * columns * blocks;
    float acc[PER][PER] = {}, total[PER][PER] = {};

    for (i64 k0 = 0; k0 < depth; k0 += STEP) {
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * STEP / 4; i += THREADS) {   // four codes of one row a thread
            int row = i / (STEP / 4), k = i % (STEP / 4) * 4;
            u32 ca = t0 + row < tokens ? *(const u32 *)(a + (t0 + row) * depth + k0 + k) : 0;
            u32 cb = n0 + row < columns ? *(const u32 *)(b + (n0 + row) * depth + k0 + k) : 0;
#pragma unroll
            for (int j = 0; j < 4; ++j, ca >>= 8, cb >>= 8) {
                va[k + j][row] = decode(ca & 255), ea[k + j][row] = exponent_of(ca & 255);
                vb[k + j][row] = decode(cb & 255), eb[k + j][row] = exponent_of(cb & 255);
            }
        }
        __syncthreads();

        u32 top2[PER][PER / 2];        // two columns a word, s16x2
#pragma unroll
        for (int i = 0; i < PER; ++i)
#pragma unroll
            for (int j = 0; j < PER / 2; ++j) top2[i][j] = 0x80008000u;
#pragma unroll 8
        for (int k = 0; k < STEP; ++k) {
            short4 x = *(short4 *)&ea[k][ty * PER];
            uint2 y = *(uint2 *)&eb[k][tx * PER];
            u32 pair[PER] = {(u32)(unsigned short)x.x * 0x10001u, (u32)(unsigned short)x.y * 0x10001u,
                             (u32)(unsigned short)x.z * 0x10001u, (u32)(unsigned short)x.w * 0x10001u};
#pragma unroll
            for (int i = 0; i < PER; ++i) {
                top2[i][0] = __viaddmax_s16x2(pair[i], y.x, top2[i][0]);
                top2[i][1] = __viaddmax_s16x2(pair[i], y.y, top2[i][1]);
            }
        }

        const i64 column = k0 / gran;
        float shift[PER][PER];
        int top[PER][PER];
#pragma unroll
        for (int i = 0; i < PER; ++i)
#pragma unroll
            for (int j = 0; j < PER; ++j) {
                int scale = 0;
                if (!PROMOTE) {
                    i64 t = min(t0 + ty * PER + i, tokens - 1), n = min(n0 + tx * PER + j, columns - 1);
                    scale = ((const int *)sa)[sa_base + t * blocks + column]
                          + ((const int *)sb)[sb_base + n * blocks + column];
                }
                int product = (short)(top2[i][j / 2] >> (j % 2 * 16));
                int field = (__float_as_int(acc[i][j]) >> 23) & 255;
                int own = acc[i][j] == 0.0f ? ZERO : max(field, 1) - 127;
                top[i][j] = max(max(product > NO_PRODUCT ? product + scale : ZERO, own), ZERO);
                int relative = min(max(top[i][j] - scale, -40), 100);
                shift[i][j] = __int_as_float((127 + FRAC - relative) << 23);
            }

        int sum[2][PER][PER] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll 8
            for (int k = 0; k < STEP / 2; ++k) {
                float4 x4 = *(float4 *)&va[half * STEP / 2 + k][ty * PER];
                float4 y4 = *(float4 *)&vb[half * STEP / 2 + k][tx * PER];
                float x[PER] = {x4.x, x4.y, x4.z, x4.w}, y[PER] = {y4.x, y4.y, y4.z, y4.w};
#pragma unroll
                for (int i = 0; i < PER; ++i)
#pragma unroll
                    for (int j = 0; j < PER; ++j) sum[half][i][j] += __float2int_rz(x[i] * y[j] * shift[i][j]);
            }
#pragma unroll
        for (int i = 0; i < PER; ++i)
#pragma unroll
            for (int j = 0; j < PER; ++j)
                acc[i][j] = finish<FRAC, OUT, ZERO>(acc[i][j], sum[0][i][j], sum[1][i][j], top[i][j]);

        if (PROMOTE && (k0 + STEP) % promote == 0) {
#pragma unroll
            for (int i = 0; i < PER; ++i)
#pragma unroll
                for (int j = 0; j < PER; ++j) {
                    i64 t = min(t0 + ty * PER + i, tokens - 1), n = min(n0 + tx * PER + j, columns - 1);
                    float scale = __fmul_rn(((const float *)sa)[sa_base + t * blocks + column],
                                            ((const float *)sb)[sb_base + n * blocks + column]);
                    total[i][j] = __fmaf_rn(scale, acc[i][j], total[i][j]);
                    acc[i][j] = 0.0f;
                }
        }
    }
#pragma unroll
    for (int i = 0; i < PER; ++i)
#pragma unroll
        for (int j = 0; j < PER; ++j) {
            i64 t = t0 + ty * PER + i, n = n0 + tx * PER + j;
            if (t < tokens && n < columns)
                out[(group * tokens + t) * columns + n] = PROMOTE ? total[i][j] : acc[i][j];
        }
}
