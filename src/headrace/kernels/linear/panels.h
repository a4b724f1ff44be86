/* Weights in few bits, laid out for products on a CPU: panels of 16 outputs, whose codes lie as they are multiplied.
 *
 * What lives here: the layout, and the way out of it. What may not: products (panels.c), how formats store codes (quant/).
 *
 *   panel     16 outputs; of each 32 inputs its codes, 64 bytes for each bit of a code
 *   step      64 bytes: 4 inputs of each output, those of an output side by side
 *   planes    of 32 inputs (8 steps): the low four bits of codes, two steps in 64 bytes; then two bits, four steps in 64; then one bit, eight
 *             steps in 64; each where the width calls for it. Codes of 8 bits are bytes, a step in 64.
 *   scales    of each group of inputs 16, one an output
 *
 * weight = (code - zero) . scale - least, all as numbers; a table may say what a code is.
 */
#ifndef HEADRACE_PANELS_H
#define HEADRACE_PANELS_H

#include "common.h"

#define COLUMNS 16 /* outputs of a panel */
#define BLOCK 32   /* inputs whose codes lie together */
#define STEPS 8    /* of a block */
#define CHUNK 256  /* inputs unpacked at once */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define VECTOR 64 /* without VNNI, AVX2's way with bytes is the better one */
#elif defined(__AVX2__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define PARTS (64 / VECTOR) /* of what 16 outputs take: vectors that the processor has stay in registers */
#define SHARE (COLUMNS / PARTS) /* outputs of a vector */

typedef float vf __attribute__((vector_size(VECTOR)));
typedef vf vfu __attribute__((aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VECTOR)));
typedef uint8_t vb __attribute__((vector_size(VECTOR)));
typedef vb vbu __attribute__((aligned(1), may_alias));
typedef uint16_t vh __attribute__((vector_size(VECTOR)));
typedef uint8_t few __attribute__((vector_size(SHARE))); /* a byte a lane */
typedef few fewu __attribute__((aligned(1), may_alias));
typedef int8_t s8x16 __attribute__((vector_size(16)));

enum { UNSIGNED = 0, SIGNED = 1, FLOATS = 2 };           /* what codes are: numbers from 0 on, signed bytes, or floats */
enum { U8 = 3, S8 = 4, E4M3 = 5, E8M0 = 6, NESTED = 7 }; /* types of scales beside F32, BF16, F16 */

typedef struct { /* field for field as panels.py has it */
    int32_t bits, kind, most; /* most: the largest of codes that are numbers */
    int32_t scale_type, least_type, by_scale; /* by_scale: least is in units of scale */
    int64_t outs, ins, group;                 /* ins: a multiple of BLOCK; group: inputs of a scale, a multiple of 16 */
    int64_t shared;                           /* outputs of a scale, a multiple of 16: scale is float32 [outs / shared, groups]; or 0 */
    float zero, factor;                       /* factor: of all scales */
    const uint8_t *codes, *table;             /* table: 16 bytes, what codes of 4 bits stand for, or NULL */
    const float *values;                      /* FLOATS: of 16 codes; NULL: they are E4M3 */
    const void *scale, *least;                /* [panels, groups, 16]; least may be NULL */
    const uint16_t *scale_over, *least_over;  /* float16 [panels, ins / 256, 16] that multiply those, or NULL */
    const float *nested, *large; /* NESTED scales: offset + nested[code] . large[i / 256], codes numbered row by row */
    float offset;
} Panels;

INLINE int64_t num_panels(const Panels *w) { return (w->outs + COLUMNS - 1) / COLUMNS; }

INLINE vf splat_vf(float x) { return (vf){} + x; }

INLINE vb shifted(vb x, int by) { return (vb)((vh)x >> by); } /* bits that come from a neighbour are masked by who asks */

INLINE vb raised(vb x, int by) { return (vb)((vh)x << by); }

INLINE vf as_e4m3(vi code) { return (vf)((code & 0x7f) << 20 | (code & 0x80) << 24) * 0x1p120f; } /* subnormal ones, too */

/* ---- codes ---- */

/* Vectors i of a plane stand PARTS apart; those of a step `stride`. */
INLINE void unpack_block(vb *out, const int stride, const vbu *at, const int bits) {
    UNROLL for (int p = 0; p < PARTS; p++) {
        const vbu *plane = at + p;
        vb *to = out + p;
        if (bits == 8)
            UNROLL for (int s = 0; s < STEPS; s++) to[s * stride] = plane[s * PARTS];
        if (bits < 8 && bits & 4) {
            UNROLL for (int s = 0; s < STEPS; s++) to[s * stride] = shifted(plane[s / 2 * PARTS], s % 2 * 4) & 15;
            plane += 4 * PARTS;
        }
        if (bits & 2) {
            UNROLL for (int s = 0; s < STEPS; s++) {
                const vb pair = shifted(plane[s / 4 * PARTS], s % 4 * 2) & 3;
                to[s * stride] = bits & 4 ? to[s * stride] | raised(pair, 4) : pair;
            }
            plane += 2 * PARTS;
        }
        if (bits & 1)
            UNROLL for (int s = 0; s < STEPS; s++) {
                const vb bit = raised(shifted(*plane, s) & 1, bits - 1);
                to[s * stride] = bits > 1 ? to[s * stride] | bit : bit;
            }
    }
}

INLINE vb looked_up(const uint8_t *table, vb codes) {
#if VECTOR == 64
    return (vb)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)codes);
#elif VECTOR == 32
    return (vb)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), (__m256i)codes);
#else
    for (int i = 0; i < VECTOR; i++) codes[i] = table[codes[i]];
    return codes;
#endif
}

INLINE void unpack_blocks(vb *out, const int stride, const uint8_t *from, int64_t blocks, const int bits) {
    for (int64_t i = 0; i < blocks; i++) unpack_block(out + i * STEPS * stride, stride, (const vbu *)(from + i * bits * 64), bits);
}

INLINE const uint8_t *codes_at(const Panels *w, int64_t panel, int64_t k) { return w->codes + (panel * w->ins + k) / BLOCK * w->bits * 64; }

/* Codes of `count` inputs of a panel from k0 on (multiples of BLOCK): 64 bytes a step, PARTS vectors, which stand `stride` apart. */
INLINE void unpack_codes(vb *out, const int stride, const Panels *w, int64_t panel, int64_t k0, int64_t count) {
    const uint8_t *from = codes_at(w, panel, k0);
    const int64_t blocks = count / BLOCK;
    switch (w->bits) {
        case 1: unpack_blocks(out, stride, from, blocks, 1); break;
        case 2: unpack_blocks(out, stride, from, blocks, 2); break;
        case 3: unpack_blocks(out, stride, from, blocks, 3); break;
        case 4: unpack_blocks(out, stride, from, blocks, 4); break;
        case 5: unpack_blocks(out, stride, from, blocks, 5); break;
        case 6: unpack_blocks(out, stride, from, blocks, 6); break;
        case 7: unpack_blocks(out, stride, from, blocks, 7); break;
        default: unpack_blocks(out, stride, from, blocks, 8);
    }
    for (int64_t i = 0; w->table && i < blocks * STEPS; i++)
        UNROLL for (int p = 0; p < PARTS; p++) out[i * stride + p] = looked_up(w->table, out[i * stride + p]);
}

/* ---- scales ---- */

INLINE vf load_halves(const uint16_t *from, const int type) {
#if VECTOR == 64
    return (vf)load_vec(from, 0, type);
#elif VECTOR == 32
    if (type == F16) return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    float out[SHARE];
    for (int i = 0; i < SHARE; i++) out[i] = type == F16 ? widen_f16((hvec){from[i]})[0] : widen_bf16((hvec){from[i]})[0];
    return *(vfu *)out;
#endif
}

INLINE vi load_bytes(const uint8_t *from) {
#if VECTOR == 64
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif VECTOR == 32
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    return __builtin_convertvector(*(const fewu *)from, vi);
#endif
}

INLINE vf load_scales(const void *base, int64_t at, int type) {
    if (type == F32) return *(const vfu *)((const float *)base + at);
    if (type <= F16) return type == BF16 ? load_halves((const uint16_t *)base + at, BF16) : load_halves((const uint16_t *)base + at, F16);
    const vi raw = load_bytes((const uint8_t *)base + at);
    if (type == E4M3) return as_e4m3(raw);
    if (type == E8M0) return (vf)(raw << 23 | ((raw == 0) & 0x00400000)); /* 2^(code - 127) */
    return __builtin_convertvector(type == S8 ? raw << 24 >> 24 : raw, vf);
}

INLINE float shared_scale(const Panels *w, int64_t panel, int64_t group) {
    return ((const float *)w->scale)[panel * COLUMNS / w->shared * (w->ins / w->group) + group] * w->factor;
}

INLINE vf nested_scales(const Panels *w, int64_t panel, int64_t group, int part) {
    const int64_t groups = w->ins / w->group;
    float out[SHARE];
    for (int i = 0; i < SHARE; i++) {
        const int64_t column = part * SHARE + i, row = panel * COLUMNS + column, at = row < w->outs ? (row * groups + group) / 256 : 0;
        out[i] = w->nested[((const uint8_t *)w->scale)[(panel * groups + group) * COLUMNS + column]] * w->large[at] + w->offset;
    }
    return *(vfu *)out;
}

/* `count` groups from group `at` on, 16 scales each, into vectors that stand `stride` apart. */
INLINE void load_groups(vf *out, int64_t stride, const void *base, int64_t at, int64_t count, const int type) {
    for (int64_t i = 0; i < count; i++)
        UNROLL for (int p = 0; p < PARTS; p++) out[i * stride + p] = load_scales(base, (at + i) * COLUMNS + p * SHARE, type);
}

static void groups_from(vf *out, int64_t stride, const void *base, int64_t at, int64_t count, int type) {
    switch (type) {
        case F32: load_groups(out, stride, base, at, count, F32); break;
        case BF16: load_groups(out, stride, base, at, count, BF16); break;
        case F16: load_groups(out, stride, base, at, count, F16); break;
        case S8: load_groups(out, stride, base, at, count, S8); break;
        case E4M3: load_groups(out, stride, base, at, count, E4M3); break;
        case E8M0: load_groups(out, stride, base, at, count, E8M0); break;
        default: load_groups(out, stride, base, at, count, U8);
    }
}

INLINE void times(vf *out, int64_t stride, int64_t count, const vf *by) {
    for (int64_t i = 0; i < count; i++)
        UNROLL for (int p = 0; p < PARTS; p++) out[i * stride + p] *= by[p];
}

INLINE void copied(vf *out, int64_t stride, int64_t count) {
    for (int64_t i = 1; i < count; i++)
        UNROLL for (int p = 0; p < PARTS; p++) out[i * stride + p] = out[p];
}

/* Scales of parts of `part` inputs, `count` inputs from k on within a chunk, and what is subtracted behind them beside zero (where there is
 * `least`): of each part PARTS vectors, which stand `stride` apart. */
static void scales_at(const Panels *w, int64_t panel, int64_t k, int64_t count, int part, vf *scale, vf *least, int64_t stride) {
    const int shift = part == BLOCK ? 5 : 4; /* no division where each part has scales of its own: single rows have no time for it */
    const int64_t parts = count >> shift, each = w->group == part ? 1 : w->group >> shift; /* each: parts of a group */
    const int64_t first = panel * (each == 1 ? w->ins >> shift : w->ins / w->group), over = (panel * (w->ins / CHUNK) + k / CHUNK) * COLUMNS;
    int64_t group = k >> shift, left = parts, n = 0;
    vf factor[PARTS], more[PARTS];
    UNROLL for (int p = 0; p < PARTS; p++) {
        factor[p] = splat_vf(w->factor) * (w->scale_over ? load_halves(w->scale_over + over + p * SHARE, F16) : splat_vf(1.0f));
        more[p] = w->least_over ? load_halves(w->least_over + over + p * SHARE, F16) : splat_vf(1.0f);
    }
    if (each > 1) left = each - group % each, group /= each;
    for (int64_t i = 0; i < parts; i += n, group++, left = each) { /* n parts, of one group or of a group each */
        n = left < parts - i ? left : parts - i;
        vf *s = scale + i * stride, *l = least + i * stride;
        const int64_t found = each == 1 ? n : 1;
        if (w->shared || w->scale_type == NESTED)
            for (int64_t g = 0; g < found; g++)
                for (int p = 0; p < PARTS; p++)
                    s[g * stride + p] = w->shared ? splat_vf(shared_scale(w, panel, group + g)) : nested_scales(w, panel, group + g, p) * factor[p];
        else
            groups_from(s, stride, w->scale, first + group, found, w->scale_type), times(s, stride, found, factor);
        if (w->least) {
            groups_from(l, stride, w->least, first + group, found, w->least_type);
            if (w->least_over) times(l, stride, found, more);
            for (int64_t g = 0; w->by_scale && g < found; g++) times(l + g * stride, stride, 1, s + g * stride);
        }
        if (each > 1) copied(s, stride, n);
        if (each > 1 && w->least) copied(l, stride, n);
    }
}

/* ---- numbers ---- */

INLINE vf from_values(const float *values, vi codes) {
#if VECTOR == 64
    return (vf)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(values));
#elif VECTOR == 32
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values + 8), (__m256i)codes);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
    vf out;
    for (int i = 0; i < SHARE; i++) out[i] = values[codes[i]];
    return out;
#endif
}

/* Input i of a step, of as many outputs as a vector has. */
INLINE vf number_of(const Panels *w, vb step, const int i, const int kind) {
    if (kind == SIGNED) return __builtin_convertvector((vi)step << (24 - 8 * i) >> 24, vf);
    const vi code = (vi)step >> (8 * i) & 255;
    if (kind == UNSIGNED) return __builtin_convertvector(code, vf);
    return w->values ? from_values(w->values, code) : as_e4m3(code);
}

INLINE void widen_steps(vf *out, const Panels *w, const vb *codes, int64_t panel, int64_t k0, int64_t count, const int kind) {
    const int part = w->group % BLOCK ? 16 : BLOCK;
    vf scales[CHUNK / 16 * PARTS], leasts[CHUNK / 16 * PARTS];
    scales_at(w, panel, k0, count, part, scales, leasts, PARTS);
    for (int64_t k = 0; k < count; k += part) {
        const vf *scale = scales + k / part * PARTS;
        vf least[PARTS];
        UNROLL for (int p = 0; p < PARTS; p++) least[p] = scale[p] * w->zero + (w->least ? leasts[k / part * PARTS + p] : splat_vf(0.0f));
        for (int64_t i = k; i < k + part; i += 4)
            UNROLL for (int j = 0; j < 4 * PARTS; j++)
                out[i * PARTS + j] = number_of(w, codes[i / 4 * PARTS + j % PARTS], j / PARTS, kind) * scale[j % PARTS] - least[j % PARTS];
    }
}

/* Weights of `count` inputs (at most CHUNK) of a panel from k0 on: 16 an input. */
static void widen_chunk(vf *out, const Panels *w, int64_t panel, int64_t k0, int64_t count) {
    vb codes[CHUNK / 4 * PARTS];
    unpack_codes(codes, PARTS, w, panel, k0, count);
    switch (w->kind) {
        case UNSIGNED: widen_steps(out, w, codes, panel, k0, count, UNSIGNED); break;
        case SIGNED: widen_steps(out, w, codes, panel, k0, count, SIGNED); break;
        default: widen_steps(out, w, codes, panel, k0, count, FLOATS);
    }
}

#endif
