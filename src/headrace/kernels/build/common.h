/* Vectors of 16 floats, element types and shared arithmetic for the CPU kernels.
 *
 * What lives here: loads and stores that widen to float32, exp, tanh, reductions. What may not: operations on tensors.
 *
 * GCC/Clang vector extensions compile to whatever the machine has (AVX-512, two AVX2 halves, four NEON quarters);
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

typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef uint16_t h16u __attribute__((vector_size(32), aligned(2), may_alias));

enum { F32 = 0, BF16 = 1, F16 = 2 }; /* element types, as native.py numbers them */

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAVE_BF16_DOT 1
#else
#define HAVE_BF16_DOT 0
#endif

INLINE int64_t size_of(const int type) { return type == F32 ? 4 : 2; }

INLINE v16 splat(float x) { return (v16){} + x; }

INLINE v16 pick(i16 mask, v16 a, v16 b) { return (v16)((mask & (i16)a) | (~mask & (i16)b)); }

INLINE v16 vmax(v16 a, v16 b) { return pick(a > b, a, b); }

/* ---- bf16 ---- */

INLINE v16 widen_bf16(h16 x) { return (v16)(__builtin_convertvector(x, u16) << 16); }

INLINE h16 narrow_bf16(v16 x) { /* to nearest, ties to even; NaN stays NaN */
#if HAVE_BF16_DOT
    return (h16)_mm512_cvtneps_pbh((__m512)x);
#else
    u16 bits = (u16)x;
    u16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u16 nan = (u16)(x != x);
    return __builtin_convertvector((nan & ((bits >> 16) | 64)) | (~nan & rounded), h16);
#endif
}

/* ---- fp16 ---- */

INLINE v16 widen_f16(h16 x) {
#if defined(__AVX512F__)
    return (v16)_mm512_cvtph_ps((__m256i)x);
#else
    v16 out;
    for (int i = 0; i < 16; i++) {
        uint16_t bits = x[i];
        _Float16 half;
        memcpy(&half, &bits, 2);
        out[i] = (float)half;
    }
    return out;
#endif
}

INLINE h16 narrow_f16(v16 x) {
#if defined(__AVX512F__)
    return (h16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    h16 out;
    for (int i = 0; i < 16; i++) {
        _Float16 half = (_Float16)x[i];
        uint16_t bits;
        memcpy(&bits, &half, 2);
        out[i] = bits;
    }
    return out;
#endif
}

/* ---- 16 elements of any type, from element `at` of `base` ---- */

INLINE v16 load16(const void *base, int64_t at, const int type) {
    if (type == F32) return *(const v16u *)((const float *)base + at);
    h16 raw = *(const h16u *)((const uint16_t *)base + at);
    return type == BF16 ? widen_bf16(raw) : widen_f16(raw);
}

INLINE void store16(void *base, int64_t at, v16 x, const int type) {
    if (type == F32)
        *(v16u *)((float *)base + at) = x;
    else
        *(h16u *)((uint16_t *)base + at) = type == BF16 ? narrow_bf16(x) : narrow_f16(x);
}

/* The first n of 16 elements, zeros behind them: never touches memory beyond. */
INLINE v16 load_some(const void *base, int64_t at, int n, const int type) {
    char raw[64] = {0};
    memcpy(raw, (const char *)base + at * size_of(type), n * size_of(type));
    return load16(raw, 0, type);
}

INLINE void store_some(void *base, int64_t at, int n, v16 x, const int type) {
    char raw[64];
    store16(raw, 0, x, type);
    memcpy((char *)base + at * size_of(type), raw, n * size_of(type));
}

INLINE v16 load_upto(const void *base, int64_t at, int64_t left, const int type) {
    return left >= 16 ? load16(base, at, type) : load_some(base, at, (int)left, type);
}

INLINE void store_upto(void *base, int64_t at, int64_t left, v16 x, const int type) {
    if (left >= 16)
        store16(base, at, x, type);
    else
        store_some(base, at, (int)left, x, type);
}

/* ---- arithmetic ---- */

INLINE float sum16(v16 x) { /* always the same tree: lanes 8 apart, then 4, 2, 1 */
#if defined(__AVX512F__)
    const __m512 b = _mm512_add_ps((__m512)x, _mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4E));
    const __m512 c = _mm512_add_ps(b, _mm512_shuffle_f32x4(b, b, 0xB1));
    const __m512 d = _mm512_add_ps(c, _mm512_permute_ps(c, 0x4E));
    return _mm512_cvtss_f32(_mm512_add_ps(d, _mm512_permute_ps(d, 0xB1)));
#else
    float a[16];
    memcpy(a, &x, 64);
    UNROLL for (int step = 8; step; step >>= 1)
        for (int i = 0; i < step; i++) a[i] += a[i + step];
    return a[0];
#endif
}

INLINE float max16(v16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float a[16];
    memcpy(a, &x, 64);
    UNROLL for (int step = 8; step; step >>= 1)
        for (int i = 0; i < step; i++) a[i] = a[i] > a[i + step] ? a[i] : a[i + step];
    return a[0];
#endif
}

/* e^x to about 1e-7 relative; 0 below -87, capped above 88. x = n ln2 + r, |r| <= ln2 / 2, Taylor to r^7, times 2^n. */
INLINE v16 vexp(v16 x) {
    const v16 low = splat(-87.0f), high = splat(88.0f);
    i16 under = x < low;
    x = pick(under, low, x);
    x = pick(x > high, high, x);
    v16 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer */
    v16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v16 p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    v16 power = (v16)((__builtin_convertvector(n, i16) + 127) << 23);
    return pick(under, splat(0.0f), p * power);
}

/* tanh: the odd series near 0 (where 1 - 2 / (e^2x + 1) would cancel), the exponential form elsewhere. */
INLINE v16 vtanh(v16 x) {
    v16 s = x * x;
    v16 p = splat(-1382.0f / 155925);
    p = p * s + 62.0f / 2835;
    p = p * s + -17.0f / 315;
    p = p * s + 2.0f / 15;
    p = p * s + -1.0f / 3;
    v16 near = x + x * s * p;
    v16 far = 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f);
    return pick(s < 0.0625f, near, far);
}

#endif
