/* Keys and values in 8 and 4 bits (kv_codes.py): a vector of codes at a time to float32, a head of floats to codes and scales.
 *
 * What lives here: both directions, to the bit as the twin has them. What may not: attention, rotary embedding.
 */
#ifndef HEADRACE_KV_CODES_H
#define HEADRACE_KV_CODES_H

#include "common.h"

typedef uint8_t bvec __attribute__((vector_size(LANES))); /* a byte a lane */
typedef int8_t sbvec __attribute__((vector_size(LANES)));
typedef int16_t shvec __attribute__((vector_size(2 * LANES)));

enum { I8 = 3, E4M3 = 4, E5M2 = 5, U4 = 6 }; /* further element types of a cache, as native.py numbers them */

INLINE int is_coded(const int type) { return type >= I8; }
INLINE int64_t row_bytes(int64_t dim, const int type) { return type == U4 ? dim / 2 : is_coded(type) ? dim : dim * size_of(type); }
INLINE int64_t scale_bytes(const int type) { return type == I8 ? 2 : type == U4 ? 4 : 0; } /* of a token and head */

/* ---- to float32 ---- */

INLINE bvec split_halves(uint64_t x) { /* bytes, the low half of each first */
    bvec out;
#if defined(__AVX2__)
    const __m128i raw = _mm_cvtsi64_si128((int64_t)x), low = _mm_set1_epi8(15);
    const __m128i bytes = _mm_unpacklo_epi8(_mm_and_si128(raw, low), _mm_and_si128(_mm_srli_epi16(raw, 4), low));
    memcpy(&out, &bytes, sizeof out);
#else
    for (int i = 0; i < LANES; i++) out[i] = x >> (4 * i) & 15;
#endif
    return out;
}

/* Of one byte each. Every value is a bfloat16. */
INLINE vec widen_codes(bvec raw, const int type) {
    const hvec wide = __builtin_convertvector(raw, hvec); /* by way of 16 bits: compilers take 8 to 32 apart into single elements */
    if (type == I8) return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector((sbvec)raw, shvec), ivec), vec);
    if (type == U4) return __builtin_convertvector(__builtin_convertvector(wide, ivec), vec);
    const hvec high = wide << 8;
    if (type == E5M2) return widen_f16(high); /* the upper half of a float16 */
    const hvec nan = (hvec)((wide & 0x7F) == 0x7F) & 0x7C00;
    return widen_f16(((hvec)((shvec)high >> 1) & 0xBFFF) | nan) * 256.0f; /* an exponent of a bit less, biased by 8 less */
}

/* The codes of elements at .. at + LANES - 1 of a token's line, zeros from `left` on. */
INLINE vec load_codes(const char *line, int64_t at, int64_t left, const int type) {
    const int64_t count = left < LANES ? left : LANES;
    bvec raw = {0};
    if (type == U4) {
        uint64_t halves = 0;
        memcpy(&halves, line + at / 2, count / 2);
        return widen_codes(split_halves(halves), type);
    }
    memcpy(&raw, line + at, count);
    return widen_codes(raw, type);
}

INLINE float read_bf16(const char *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* ---- from float32 ---- */

INLINE float write_bf16(char *at, float x) { /* to nearest even; returns what was written. x is no NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t half = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    memcpy(at, &half, 2);
    return read_bf16(at);
}

INLINE vec round_even(vec x) { return (x + 12582912.0f) - 12582912.0f; } /* 1.5 * 2^23; |x| < 2^22 */

INLINE ivec narrow_float8(vec x, const int type) { /* to nearest even; what is too large saturates, NaN stays NaN */
    const int shift = type == E4M3 ? 20 : 21;
    const float most = type == E4M3 ? 448.0f : 57344.0f, least = type == E4M3 ? 0x1p-6f : 0x1p-14f, units = type == E4M3 ? 512.0f : 65536.0f;
    const uvec bits = (uvec)x, sign = bits >> 24 & 0x80;
    vec size = (vec)(bits & 0x7FFFFFFF);
    const ivec nan = x != x;
    size = pick(nan, splat(0.0f), size);
    size = pick(size > most, splat(most), size);
    const uvec wide = (uvec)size, rounded = (wide + ((1u << (shift - 1)) - 1) + (wide >> shift & 1)) >> shift;
    const ivec normal = (ivec)(rounded - (type == E4M3 ? 120 << 3 : 112 << 2));
    const ivec small = __builtin_convertvector(round_even(size * units), ivec), is_small = size < least;
    const ivec code = (is_small & small) | (~is_small & normal);
    return (nan & 0x7F) | (~nan & ((ivec)sign | code));
}

INLINE void store_codes(char *line, int64_t at, int64_t left, ivec code, const int type) {
    const int64_t count = left < LANES ? left : LANES;
    bvec raw = __builtin_convertvector((uvec)code, bvec);
    if (type == U4)
        for (int i = 0; i < count / 2; i++) line[at / 2 + i] = (char)(raw[2 * i] | raw[2 * i + 1] << 4);
    else
        memcpy(line + at, &raw, count);
}

typedef struct {
    float low, high;
    int odd; /* something is not finite */
} Extent;

INLINE Extent extent_of(const char *from, int64_t dim, const int type) {
    vec low = splat(INFINITY), high = splat(-INFINITY);
    ivec odd = {0};
    for (int64_t d = 0; d < dim; d += LANES) {
        const vec x = load_upto(from, d, dim - d, type);
        const ivec inside = lane_numbers() < (int)(dim - d);
        odd |= ((ivec)x & 0x7F800000) == 0x7F800000;
        low = pick(inside & (x < low), x, low);
        high = pick(inside & (x > high), x, high);
    }
    Extent found = {-vmost(-low), vmost(high), 0};
    for (int i = 0; i < LANES; i++) found.odd |= odd[i];
    return found;
}

/* One token's keys or values in one head, of element type `type`, as codes at `codes` and scales at `scales`. `shared`: of all tokens, in FP8. */
INLINE void encode_head(const char *from, int64_t dim, const int type, char *codes, char *scales, float shared, const int kind) {
    float scale = shared, low = 0.0f;
    int odd = 0;
    if (scale_bytes(kind)) {
        const Extent found = extent_of(from, dim, type);
        const float size = fabsf(found.high > -found.low ? found.high : -found.low); /* of zeros: not below */
        odd = found.odd;
        low = kind == U4 ? write_bf16(scales + 2, odd ? 0.0f : found.low) : 0.0f;
        const float span = found.high - low; /* below 0 where rounding lifts the lowest above all */
        scale = write_bf16(scales, odd ? 0.0f : kind == U4 ? (span > 0.0f ? span : 0.0f) / 15.0f : size / 127.0f);
        if (odd) memcpy(scales, (const uint16_t[]){0x7FC0}, 2);
    }
    for (int64_t d = 0; d < dim; d += LANES) {
        vec x = load_upto(from, d, dim - d, type);
        ivec code = {0};
        if (!scale_bytes(kind))
            code = narrow_float8(x / scale, kind);
        else if (!odd && scale > 0.0f) {
            const vec least = splat(kind == U4 ? 0.0f : -127.0f), most = splat(kind == U4 ? 15.0f : 127.0f);
            x = round_even((x - low) / scale);
            code = __builtin_convertvector(pick(x < least, least, pick(x > most, most, x)), ivec);
        }
        store_codes(codes, d, dim - d, code, kind);
    }
}

#endif
