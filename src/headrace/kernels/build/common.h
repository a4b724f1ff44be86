/* Vectors of floats, element types and shared arithmetic for the CPU kernels.
 *
 * What lives here: loads and stores that widen to float32, exp, tanh, reductions. What may not: operations on tensors.
 *
 * A vector is as wide as the machine's registers: GCC keeps wider ones in memory. GCC/Clang vector extensions do the arithmetic;
 * intrinsics stand only where the compiler cannot see the instruction (bf16 dot products, conversions, shuffles).
 */
#ifndef HEADRACE_COMMON_H
#define HEADRACE_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__AVX512F__)
#define LANES 16 /* floats of a vector */
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define MANY_REGISTERS 1 /* 32, not 16 */
#else
#define MANY_REGISTERS 0
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vecu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef uint16_t hvecu __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

enum { F32 = 0, BF16 = 1, F16 = 2 }; /* element types, as native.py numbers them */

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAVE_BF16_DOT 1
#else
#define HAVE_BF16_DOT 0
#endif

INLINE int64_t size_of(const int type) { return type == F32 ? 4 : 2; }

INLINE vec splat(float x) { return (vec){} + x; }

INLINE ivec lane_numbers(void) {
    ivec out;
    UNROLL for (int i = 0; i < LANES; i++) out[i] = i;
    return out;
}

INLINE vec pick(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

INLINE vec vmax(vec a, vec b) { return pick(a > b, a, b); }

/* ---- bf16 ---- */

INLINE vec widen_bf16(hvec x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

INLINE hvec narrow_bf16(vec x) { /* to nearest, ties to even; NaN stays NaN */
#if HAVE_BF16_DOT
    return (hvec)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec nan = (uvec)(x != x);
    return __builtin_convertvector((nan & ((bits >> 16) | 64)) | (~nan & rounded), hvec);
#endif
}

/* ---- fp16 ---- */

INLINE vec widen_f16(hvec x) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps((__m256i)x);
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)x);
#else
    vec out;
    for (int i = 0; i < LANES; i++) {
        uint16_t bits = x[i];
        _Float16 half;
        memcpy(&half, &bits, 2);
        out[i] = (float)half;
    }
    return out;
#endif
}

INLINE hvec narrow_f16(vec x) {
#if LANES == 16
    return (hvec)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif LANES == 8 && defined(__F16C__)
    return (hvec)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    hvec out;
    for (int i = 0; i < LANES; i++) {
        _Float16 half = (_Float16)x[i];
        uint16_t bits;
        memcpy(&bits, &half, 2);
        out[i] = bits;
    }
    return out;
#endif
}

/* ---- LANES elements of any type, from element `at` of `base` ---- */

INLINE vec load_vec(const void *base, int64_t at, const int type) {
    if (type == F32) return *(const vecu *)((const float *)base + at);
    hvec raw = *(const hvecu *)((const uint16_t *)base + at);
    return type == BF16 ? widen_bf16(raw) : widen_f16(raw);
}

INLINE void store_vec(void *base, int64_t at, vec x, const int type) {
    if (type == F32)
        *(vecu *)((float *)base + at) = x;
    else
        *(hvecu *)((uint16_t *)base + at) = type == BF16 ? narrow_bf16(x) : narrow_f16(x);
}

/* The first n of LANES elements, zeros behind them: never touches memory beyond. */
INLINE vec load_some(const void *base, int64_t at, int n, const int type) {
    char raw[4 * LANES] = {0};
    memcpy(raw, (const char *)base + at * size_of(type), n * size_of(type));
    return load_vec(raw, 0, type);
}

INLINE void store_some(void *base, int64_t at, int n, vec x, const int type) {
    char raw[4 * LANES];
    store_vec(raw, 0, x, type);
    memcpy((char *)base + at * size_of(type), raw, n * size_of(type));
}

INLINE vec load_upto(const void *base, int64_t at, int64_t left, const int type) {
    return left >= LANES ? load_vec(base, at, type) : load_some(base, at, (int)left, type);
}

INLINE void store_upto(void *base, int64_t at, int64_t left, vec x, const int type) {
    if (left >= LANES)
        store_vec(base, at, x, type);
    else
        store_some(base, at, (int)left, x, type);
}

/* ---- arithmetic ---- */

INLINE float vsum(vec x) { /* always the same tree: lanes half the vector apart, then half of that, down to neighbours */
#if LANES == 16
    const __m512 b = _mm512_add_ps((__m512)x, _mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4E));
    const __m512 c = _mm512_add_ps(b, _mm512_shuffle_f32x4(b, b, 0xB1));
    const __m512 d = _mm512_add_ps(c, _mm512_permute_ps(c, 0x4E));
    return _mm512_cvtss_f32(_mm512_add_ps(d, _mm512_permute_ps(d, 0xB1)));
#elif LANES == 8
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    const __m128 c = _mm_add_ps(b, _mm_permute_ps(b, 0x4E));
    return _mm_cvtss_f32(_mm_add_ps(c, _mm_permute_ps(c, 0xB1)));
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

INLINE float vmost(vec x) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)x);
#elif LANES == 8
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    const __m128 c = _mm_max_ps(b, _mm_permute_ps(b, 0x4E));
    return _mm_cvtss_f32(_mm_max_ps(c, _mm_permute_ps(c, 0xB1)));
#else
    const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
#endif
}

/* e^x to about 1e-7 relative; 0 below -87, capped above 88. x = n ln2 + r, |r| <= ln2 / 2, Taylor to r^7, times 2^n. */
INLINE vec vexp(vec x) {
    const vec low = splat(-87.0f), high = splat(88.0f);
    ivec under = x < low;
    x = pick(under, low, x);
    x = pick(x > high, high, x);
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer */
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vec power = (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
    return pick(under, splat(0.0f), p * power);
}

/* tanh: the odd series near 0 (where 1 - 2 / (e^2x + 1) would cancel), the exponential form elsewhere. */
INLINE vec vtanh(vec x) {
    vec s = x * x;
    vec p = splat(-1382.0f / 155925);
    p = p * s + 62.0f / 2835;
    p = p * s + -17.0f / 315;
    p = p * s + 2.0f / 15;
    p = p * s + -1.0f / 3;
    vec near = x + x * s * p;
    vec far = 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f);
    return pick(s < 0.0625f, near, far);
}

#endif
