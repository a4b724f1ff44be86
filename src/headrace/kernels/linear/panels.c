/* Products over weights in few bits: y[M, N] = x[M, K] . w[N, K]^T (+ bias), the weights in panels (panels.h).
 *
 * What lives here: the way into panels, products in whole numbers and in float32, single rows. What may not: many rows in bfloat16 (the
 * vendor's), what formats mean.
 *
 * A chunk of a panel is unpacked into the first cache and meets every row of x there.
 *   whole numbers  Inputs are rounded to 8 bits, by blocks of 32 (or as the format says). Codes multiply them exactly; scales follow, block by
 *                  block, in float32. By VNNI where there is some; AVX2 adds products of bytes up in 16 bits as long as those hold them.
 *   float32        Nothing is rounded: codes become the numbers that they mean.
 * Each output adds up its blocks in one order, whatever M, the number of threads and its place.
 */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-ter") /* which moves all products before all sums: more values than there are registers */
#endif
#include "panels.h"

#define MOST_ROWS 256 /* of x that share what was unpacked, and stay in the second cache meanwhile */
#define AHEAD 8192     /* bytes by which codes are asked for before they are read, where each is read once */

/* How bytes are multiplied; HEADRACE_PLAIN_DOTS: as C says it (for tests of what stands around the instructions of other processors). */
#if VECTOR == 64 && !defined(HEADRACE_PLAIN_DOTS)
#define VNNI 512
#elif defined(__AVXVNNI__) && !defined(HEADRACE_PLAIN_DOTS)
#define VNNI 256
#else
#define VNNI 0
#endif
#if VNNI || !defined(__AVX2__) || defined(HEADRACE_PLAIN_DOTS)
#define FROM_128 1 /* signed bytes are multiplied as what they are above -128 */
#else
#define FROM_128 0 /* by AVX2: as they are */
#endif

/* ---- into panels ---- */

INLINE uint8_t field(const uint8_t *codes, int64_t row_bytes, int64_t rows, int byte, int step, int shift, int mask) {
    const int64_t row = byte / 4;
    return row < rows ? codes[row * row_bytes + step * 4 + byte % 4] >> shift & mask : 0;
}

/* One byte of a plane holds `width` bits of codes of 8 / width steps. */
INLINE void lay_plane(uint8_t *out, const uint8_t *codes, int64_t row_bytes, int64_t rows, int width, int shift) {
    const int each = 8 / width;
    for (int i = 0; i < STEPS / each; i++)
        for (int byte = 0; byte < 64; byte++) {
            uint8_t found = 0;
            for (int j = 0; j < each; j++) found |= field(codes, row_bytes, rows, byte, i * each + j, shift, (1 << width) - 1) << (width * j);
            out[i * 64 + byte] = found;
        }
}

/* codes [outs, ins], a byte each (ins: a multiple of BLOCK), into out [panels, ins / BLOCK, bits, 64]. */
void headrace_lay_panels(int bits, int64_t outs, int64_t ins, const uint8_t *codes, uint8_t *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < (outs + COLUMNS - 1) / COLUMNS; panel++)
        for (int64_t k = 0; k < ins; k += BLOCK) {
            const uint8_t *from = codes + panel * COLUMNS * ins + k;
            const int64_t rows = outs - panel * COLUMNS;
            uint8_t *to = out + (panel * ins + k) / BLOCK * bits * 64;
            if (bits == 8) {
                lay_plane(to, from, ins, rows, 8, 0);
                continue;
            }
            if (bits & 4) lay_plane(to, from, ins, rows, 4, 0), to += 4 * 64;
            if (bits & 2) lay_plane(to, from, ins, rows, 2, bits & 4), to += 2 * 64;
            if (bits & 1) lay_plane(to, from, ins, rows, 1, bits - 1);
        }
}

/* Bits of the vectors that VNNI multiplies here; 0: there is none. */
int headrace_panel_vnni(void) { return VNNI; }

/* Rows of w by their numbers, float32 [count, row] (row: inputs that are there). */
void headrace_panel_rows(const Panels *w, int64_t count, const int64_t *ids, int64_t row, float *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t first = 0; first < count; first += COLUMNS) {
        vf wide[CHUNK * PARTS];
        const int64_t end = first + COLUMNS < count ? first + COLUMNS : count;
        for (int64_t k = 0; k < w->ins; k += CHUNK)
            for (int64_t i = first, panel = -1; i < end; i++) {
                if (ids[i] / COLUMNS != panel) panel = ids[i] / COLUMNS, widen_chunk(wide, w, panel, k, w->ins - k < CHUNK ? w->ins - k : CHUNK);
                for (int64_t j = 0; j < CHUNK && k + j < row; j++) out[i * row + k + j] = ((const float *)wide)[j * COLUMNS + ids[i] % COLUMNS];
            }
    }
}

/* ---- inputs: [chunks of K, rows], so that a chunk's rows lie one behind another ---- */

#define VECTORS (BLOCK / LANES) /* of a block of inputs */

typedef int8_t sfew __attribute__((vector_size(LANES)));

typedef struct { /* CHUNK inputs of a row, rounded */
    int8_t codes[CHUNK];
    float scale[CHUNK / BLOCK];
    int32_t sums[CHUNK / BLOCK], halves[CHUNK / 16]; /* of codes */
} Rounded;

typedef struct {
    float x[CHUNK];
} Plain;

typedef struct { /* of x */
    int type, by_row, rotation;    /* by_row: rounded by a scale of the row's own instead of a block's; rotation: inputs, 0 to 32 */
    int64_t rows, row, ins, there; /* row: stride; there: inputs, which fill up to ins, a multiple of BLOCK */
    const void *x;
} Inputs;

/* By Hadamard matrices of `size` inputs, as quant/rotated.py has it, and rounded to `type`. */
static void rotate_block(vec *inputs, int size, int type) {
    float x[BLOCK];
    const float factor = (float)(1.0 / sqrt((double)size));
    memcpy(x, inputs, sizeof x);
    for (int half = 1; half < size; half *= 2)
        for (int i = 0; i < BLOCK; i += 2 * half)
            for (int j = i; j < i + half; j++) {
                const float low = x[j], high = x[j + half];
                x[j] = low + high, x[j + half] = low - high;
            }
    for (int i = 0; i < BLOCK; i++) x[i] *= factor;
    for (int i = 0; i < VECTORS; i++) store_vec(inputs + i, 0, *(vecu *)(x + LANES * i), type), inputs[i] = load_vec(inputs + i, 0, type);
}

INLINE void load_block(const Inputs *in, int64_t row, int64_t k, vec *inputs) {
    for (int i = 0; i < VECTORS; i++) {
        const int64_t left = in->there - k - LANES * i;
        inputs[i] = left > 0 ? load_upto(in->x, row * in->row + k + LANES * i, left, in->type) : splat(0.0f);
    }
    if (in->rotation) rotate_block(inputs, in->rotation, in->type);
}

INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* The largest magnitude; NaN where one is no number. */
INLINE float largest(const vec *x) {
    vec most = magnitude(x[0]), sum = x[0];
    UNROLL for (int i = 1; i < VECTORS; i++) most = vmax(most, magnitude(x[i])), sum += x[i];
    return vmost(most) + vsum(sum * 0.0f);
}

INLINE vec to_nearest(vec x) { return (x + 0x1.8p23f) - 0x1.8p23f; } /* ties to even, of up to 2^22 */

INLINE sfew as_bytes(vec x) { /* whole numbers */
#if LANES == 16
    return (sfew)_mm512_cvtepi32_epi8(_mm512_cvttps_epi32((__m512)x));
#else
    return __builtin_convertvector(__builtin_convertvector(x, ivec), sfew);
#endif
}

INLINE int32_t sum_of_bytes(s8x16 x) {
#if defined(__AVX2__)
    const __m128i sums = _mm_sad_epu8((__m128i)(x ^ -128), _mm_setzero_si128()); /* of each half, above -128 */
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
#else
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += x[i];
    return sum;
#endif
}

INLINE void round_block(Rounded *out, int block, const vec *x, float scale) {
    const vec most = splat(127.0f);
    s8x16 halves[2];
    for (int i = 0; i < VECTORS; i++) {
        const vec codes = scale > 0x1p-120f ? to_nearest(x[i] / scale) : splat(0.0f), low = pick(codes < -most, -most, codes);
        const sfew bytes = as_bytes(pick(low > most, most, low));
        memcpy((int8_t *)halves + LANES * i, &bytes, LANES);
    }
    memcpy(out->codes + block * BLOCK, halves, BLOCK);
    for (int i = 0; i < 2; i++) out->halves[block * 2 + i] = sum_of_bytes(halves[i]);
    out->sums[block] = out->halves[block * 2] + out->halves[block * 2 + 1];
    out->scale[block] = scale;
}

static float scale_of_row(const Inputs *in, int64_t r) {
    float most = 1e-10f;
    vec x[VECTORS];
    for (int64_t k = 0; k < in->ins; k += BLOCK) {
        load_block(in, r, k, x);
        const float here = largest(x);
        most = here > most || here != here ? here : most;
    }
    return most / 127.0f;
}

INLINE int64_t chunk_at(const Inputs *in, int64_t r, int64_t k) { return k / CHUNK * in->rows + r; }

static void round_row(const Inputs *in, int64_t r, Rounded *out) {
    const float of_row = in->by_row ? scale_of_row(in, r) : 0.0f;
    vec x[VECTORS];
    for (int64_t k = 0; k < in->ins; k += BLOCK) {
        load_block(in, r, k, x);
        round_block(out + chunk_at(in, r, k), k % CHUNK / BLOCK, x, in->by_row ? of_row : largest(x) / 127.0f);
    }
}

static void plain_row(const Inputs *in, int64_t r, Plain *out) {
    vec x[VECTORS];
    for (int64_t k = 0; k < in->ins; k += BLOCK) {
        load_block(in, r, k, x);
        memcpy(out[chunk_at(in, r, k)].x + k % CHUNK, x, sizeof x);
    }
}

/* ---- whole numbers ---- */

#if VECTOR == 64
#define ROWS 6 /* with those of y, 24 sums stay in registers */
#define TOGETHER 2 /* panels that share what is loaded of x */
#elif VECTOR == 32
#define ROWS 4
#define TOGETHER 1
#else
#define ROWS 2
#define TOGETHER 1
#endif
#define WIDE (PARTS * TOGETHER) /* vectors of a step */
#define ONE_ROW_APART (VNNI || VECTOR == 64)

typedef struct { /* of TOGETHER panels, unpacked; scales of each part, 16 or 32 inputs */
    vb codes[CHUNK / 4 * WIDE];
    vf scale[CHUNK / 16 * WIDE], least[CHUNK / 16 * WIDE];
} Chunk;

/* Codes are whole numbers above this one, which the sums of inputs' codes take off. */
INLINE int32_t middle_of(const Panels *w) { return (int32_t)w->zero + (FROM_128 && w->kind == SIGNED ? 128 : 0); }

/* The `p`th panel behind `panel`; the last one stands in for what is not there. */
INLINE int64_t beside(const Panels *w, int64_t panel, int p) { return panel + p < num_panels(w) ? panel + p : panel; }

/* Asks for the codes that are unpacked next, while these are multiplied. */
INLINE void ask_ahead(const Panels *w, int64_t panel, int64_t k) {
    for (int p = 0; p < TOGETHER; p++) {
        const char *next = (const char *)(k + CHUNK < w->ins ? codes_at(w, beside(w, panel, p), k + CHUNK) : codes_at(w, beside(w, panel + TOGETHER, p), 0));
        for (int64_t line = 0; line < CHUNK / BLOCK * w->bits; line++) __builtin_prefetch(next + line * 64);
    }
}

static void unpack_chunk(Chunk *out, const Panels *w, int64_t panel, int64_t k0, int64_t count, int part) {
    for (int p = 0; p < TOGETHER; p++) {
        const int64_t here = beside(w, panel, p);
        unpack_codes(out->codes + p * PARTS, WIDE, w, here, k0, count);
        scales_at(w, here, k0, count, part, out->scale + p * PARTS, out->least + p * PARTS, WIDE);
    }
    for (int64_t i = 0; FROM_128 && w->kind == SIGNED && i < count / 4 * WIDE; i++) out->codes[i] ^= 128;
}

INLINE vi repeated(const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    return (vi){} + word;
}

#if FROM_128
INLINE vi dot_step(vi sum, vb w, vi four) {
#if VNNI == 512
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)four);
#elif VNNI
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)four);
#else
    UNROLL for (int i = 0; i < 4; i++) sum += ((vi)w >> (8 * i) & 255) * (four << (24 - 8 * i) >> 24);
    return sum;
#endif
}

/* sums[r * wide + p] += codes of x row r . codes of w, over `steps` steps. */
INLINE void dots(vi *sums, const int8_t *const *x, const vb *w, const int rows, const int wide, const int steps, const int run) {
    (void)run;
    UNROLL for (int s = 0; s < steps; s++)
        UNROLL for (int r = 0; r < rows; r++) {
            const vi four = repeated(x[r] + 4 * s);
            UNROLL for (int p = 0; p < wide; p++) sums[r * wide + p] = dot_step(sums[r * wide + p], w[s * wide + p], four);
        }
}

#else
INLINE __m256i pairs(vb codes, vi four) { return _mm256_maddubs_epi16((__m256i)codes, (__m256i)four); }

INLINE vi fours(__m256i pairs) { return (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

/* Products of `run` steps fit into 16 bits; 0: codes have a sign. */
INLINE void dots(vi *sums, const int8_t *const *x, const vb *w, const int rows, const int wide, const int steps, const int run) {
    UNROLL for (int s = 0; s < steps; s += run ? run : 1) {
        __m256i part[ROWS * WIDE];
        UNROLL for (int i = 0; i < rows * wide; i++) {
            const vb codes = w[s * wide + i % wide];
            const vi four = repeated(x[i / wide] + 4 * s);
            part[i] = run ? pairs(codes, four)
                          : pairs((vb)_mm256_abs_epi8((__m256i)codes), (vi)_mm256_sign_epi8((__m256i)four, (__m256i)codes));
        }
        UNROLL for (int more = s + 1; more < s + run; more++)
            UNROLL for (int i = 0; i < rows * wide; i++)
                part[i] = _mm256_add_epi16(part[i], pairs(w[more * wide + i % wide], repeated(x[i / wide] + 4 * more)));
        UNROLL for (int i = 0; i < rows * wide; i++) sums[i] += fours(part[i]);
    }
}
#endif

typedef struct { /* what each part of a chunk of a row begins with, and what is subtracted behind it for each `least` */
    int32_t start[CHUNK / 16];
    float sum[CHUNK / 16];
} Sums;

INLINE void sum_parts(Sums *out, const Rounded *x, int32_t middle, const int part) {
    const int32_t *sums = part == BLOCK ? x->sums : x->halves;
    UNROLL for (int i = 0; i < CHUNK / part; i++) {
        out->start[i] = -middle * sums[i];
        out->sum[i] = (float)sums[i] * x->scale[i * part / BLOCK];
    }
}

/* y of `rows` rows of x goes on over part `i` of a chunk. */
INLINE void add_part(
    vf *y, const Rounded *x, const Sums *sums, int64_t i, const vb *codes, const vf *scale, const vf *least, const int rows, const int wide, const int part,
    const int run) {
    vi found[ROWS * WIDE];
    const int8_t *at[ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        at[r] = x[r].codes + i * part;
        UNROLL for (int p = 0; p < wide; p++) found[r * wide + p] = FROM_128 ? (vi){} + sums[r].start[i] : (vi){};
    }
    dots(found, at, codes, rows, wide, part / 4, run);
    UNROLL for (int r = 0; r < rows; r++) {
        const float by = x[r].scale[i * part / BLOCK];
        UNROLL for (int p = 0; p < wide; p++) {
            if (!FROM_128) found[r * wide + p] += sums[r].start[i]; /* AVX2 has no register for it before */
            y[r * wide + p] += __builtin_convertvector(found[r * wide + p], vf) * scale[p] * by;
        }
        UNROLL for (int p = 0; least && p < wide; p++) y[r * wide + p] -= least[p] * sums[r].sum[i];
    }
}

/* y of `rows` rows of x goes on over a chunk of `parts` parts. */
INLINE void multiply(
    vf *y, const Rounded *x, const Chunk *w, int64_t parts, int32_t middle, const int least, const int rows, const int part, const int run) {
    Sums sums[ROWS];
    vf all[ROWS * WIDE];
    UNROLL for (int r = 0; r < rows; r++) sum_parts(sums + r, x + r, middle, part);
    UNROLL for (int i = 0; i < rows * WIDE; i++) all[i] = y[i];
    for (int64_t i = 0; i < parts; i++)
        add_part(all, x, sums, i, w->codes + i * (part / 4 * WIDE), w->scale + i * WIDE, least ? w->least + i * WIDE : NULL, rows, WIDE, part, run);
    UNROLL for (int i = 0; i < rows * WIDE; i++) y[i] = all[i];
}

INLINE void multiply_rows(vf *y, const Rounded *x, const Chunk *w, int64_t rows, int64_t parts, int32_t middle, int least, const int part, const int run) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) multiply(y + r * WIDE, x + r, w, parts, middle, least, ROWS, part, run);
#if ROWS > 4
    for (; r + 4 <= rows; r += 4) multiply(y + r * WIDE, x + r, w, parts, middle, least, 4, part, run);
#endif
#if ROWS > 2
    for (; r + 2 <= rows; r += 2) multiply(y + r * WIDE, x + r, w, parts, middle, least, 2, part, run);
#endif
    for (; r < rows; r++) multiply(y + r * WIDE, x + r, w, parts, middle, least, 1, part, run);
}

#define MULTIPLY(name, part, run) \
    static __attribute__((noinline)) void name(vf *y, const Rounded *x, const Chunk *w, int64_t rows, int64_t parts, int32_t middle, int least) { \
        least ? multiply_rows(y, x, w, rows, parts, middle, 1, part, run) : multiply_rows(y, x, w, rows, parts, middle, 0, part, run); \
    }
#if FROM_128
MULTIPLY(whole_any, 32, 8) MULTIPLY(halves_any, 16, 4)
#else
MULTIPLY(whole_8, 32, 8) MULTIPLY(whole_4, 32, 4) MULTIPLY(whole_2, 32, 2) MULTIPLY(whole_signed, 32, 0)
MULTIPLY(halves_4, 16, 4) MULTIPLY(halves_2, 16, 2) MULTIPLY(halves_signed, 16, 0)
#endif

typedef void (*Multiply)(vf *, const Rounded *, const Chunk *, int64_t, int64_t, int32_t, int);

static Multiply multiply_for(const Panels *w, int part) {
#if FROM_128
    (void)w;
    return part == 16 ? halves_any : whole_any;
#else
    if (w->kind == SIGNED) return part == 16 ? halves_signed : whole_signed;
    const int run = w->most <= 16 ? 8 : w->most <= 32 ? 4 : 2; /* 2 . 127 . most . run < 2^15 */
    return part == 16 ? (run == 2 ? halves_2 : halves_4) : run == 8 ? whole_8 : run == 4 ? whole_4 : whole_2;
#endif
}

static void whole_panels(vf *y, const Panels *w, const Rounded *x, int64_t all, int64_t rows, int64_t panel) {
    const int part = w->group % BLOCK ? 16 : BLOCK;
    const Multiply go_on = multiply_for(w, part);
    Chunk chunk;
    for (int64_t k = 0; k < w->ins; k += CHUNK, x += all) {
        const int64_t count = w->ins - k < CHUNK ? w->ins - k : CHUNK;
        unpack_chunk(&chunk, w, panel, k, count, part);
        ask_ahead(w, panel, k);
        go_on(y, x, &chunk, rows, count / part, middle_of(w), w->least != NULL);
    }
}

#if ONE_ROW_APART
/* One row: nothing that was unpacked serves twice, so it stays in registers. */
INLINE void one_row_of(vf *y, const Panels *w, const Rounded *x, int64_t all, int64_t panel, const int bits, const int part) {
    const vbu *from = (const vbu *)codes_at(w, panel, 0);
    const int32_t middle = middle_of(w);
    vf scale[CHUNK / 16 * PARTS], least[CHUNK / 16 * PARTS];
    for (int64_t k = 0; k < w->ins; k += CHUNK, x += all) {
        const int64_t count = w->ins - k < CHUNK ? w->ins - k : CHUNK;
        Sums sums;
        sum_parts(&sums, x, middle, part);
        scales_at(w, panel, k, count, part, scale, least, PARTS);
        for (int64_t i = 0; i < count / BLOCK; i++, from += bits * PARTS) {
            vb codes[STEPS * PARTS];
            for (int line = 0; line < bits; line++) __builtin_prefetch((const char *)from + AHEAD + 64 * line);
            unpack_block(codes, PARTS, from, bits);
            UNROLL for (int s = 0; s < STEPS * PARTS; s++) {
                if (bits == 4 && w->table) codes[s] = looked_up(w->table, codes[s]);
                if ((bits == 4 || bits == 8) && w->kind == SIGNED) codes[s] ^= 128;
            }
            UNROLL for (int half = 0; half < BLOCK / part; half++) {
                const int64_t at = i * (BLOCK / part) + half;
                const vf *lower = w->least ? least + at * PARTS : NULL;
                add_part(y, x, &sums, at, codes + half * (part / 4) * PARTS, scale + at * PARTS, lower, 1, PARTS, part, 0);
            }
        }
    }
}

#define ONE_ROW(bits) \
    case bits: part == 16 ? one_row_of(y, w, x, all, panel, bits, 16) : one_row_of(y, w, x, all, panel, bits, BLOCK); break;

static void one_row(vf *y, const Panels *w, const Rounded *x, int64_t all, int64_t panel) {
    const int part = w->group % BLOCK ? 16 : BLOCK;
    switch (w->bits) { ONE_ROW(1) ONE_ROW(2) ONE_ROW(3) ONE_ROW(4) ONE_ROW(5) ONE_ROW(6) ONE_ROW(7) ONE_ROW(8) }
}
#endif

/* ---- float32 ---- */

#if VECTOR == 32
#define PLAIN_ROWS 6
#else
#define PLAIN_ROWS 4
#endif

/* Rows of y stand WIDE apart. */
INLINE void add_products(vf *y, const Plain *x, const vf *w, int64_t blocks, const int rows) {
    for (int64_t b = 0; b < blocks; b++) {
        vf sums[PLAIN_ROWS * PARTS];
        UNROLL for (int i = 0; i < rows * PARTS; i++) sums[i] = (vf){};
        for (int k = 0; k < BLOCK; k++, w += PARTS)
            UNROLL for (int i = 0; i < rows * PARTS; i++) sums[i] += w[i % PARTS] * x[i / PARTS].x[b * BLOCK + k];
        UNROLL for (int i = 0; i < rows * PARTS; i++) y[i / PARTS * WIDE + i % PARTS] += sums[i];
    }
}

#define PLAIN_TILE(rows) \
    case rows: add_products(y, x, w, blocks, rows); break;

static __attribute__((noinline)) void plain_rows(vf *y, const Plain *x, const vf *w, int64_t rows, int64_t blocks) {
    for (; rows >= PLAIN_ROWS; rows -= PLAIN_ROWS, y += PLAIN_ROWS * WIDE, x += PLAIN_ROWS)
        add_products(y, x, w, blocks, PLAIN_ROWS);
    switch (rows) {
        PLAIN_TILE(1) PLAIN_TILE(2) PLAIN_TILE(3)
#if PLAIN_ROWS > 4
        PLAIN_TILE(4) PLAIN_TILE(5)
#endif
    }
}

static void plain_panel(vf *y, const Panels *w, const Plain *x, int64_t all, int64_t rows, int64_t panel) {
    vf wide[CHUNK * PARTS];
    for (int64_t k = 0; k < w->ins; k += CHUNK, x += all) {
        const int64_t count = w->ins - k < CHUNK ? w->ins - k : CHUNK;
        widen_chunk(wide, w, panel, k, count);
        plain_rows(y, x, wide, rows, count / BLOCK);
    }
}

/* ---- the product ---- */

typedef struct {
    const Panels *w;
    const char *bias; /* [outs], of the type of y, or NULL */
    int64_t first;    /* column of y */
} Output;

static int64_t num_groups(const Panels *w) { return (num_panels(w) + TOGETHER - 1) / TOGETHER; }

/* y [rows, panels, 16] */
static void store_panels(const Output *to, const Inputs *in, char *out, int64_t stride, const vf *y, int panels, int64_t first, int64_t rows, int64_t panel) {
    for (int64_t r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            const int64_t at = (panel + p) * COLUMNS, left = to->w->outs - at;
            const float *sums = (const float *)(y + (r * TOGETHER + p) * PARTS);
            for (int64_t i = 0; i < COLUMNS && i < left; i += LANES) {
                const vec bias = to->bias ? load_upto(to->bias, at + i, left - i, in->type) : splat(0.0f);
                store_upto(out, (first + r) * stride + to->first + at + i, left - i, *(const vecu *)(sums + i) + bias, in->type);
            }
        }
}

/* Rows of x from `first` on, MOST_ROWS at most, and the panels from `panel` on that are multiplied together. */
static void some_panels(const Output *to, const Inputs *in, const void *x, char *out, int64_t stride, int whole, int64_t first, int64_t panel) {
    vf y[MOST_ROWS * WIDE] __attribute__((aligned(64)));
    const int64_t rows = in->rows - first < MOST_ROWS ? in->rows - first : MOST_ROWS, left = num_panels(to->w) - panel;
    const int panels = left < TOGETHER ? (int)left : TOGETHER;
    memset(y, 0, rows * WIDE * sizeof(vf));
    if (whole && (!ONE_ROW_APART || rows > 1)) whole_panels(y, to->w, (const Rounded *)x + first, in->rows, rows, panel);
    for (int p = 0; p < panels; p++) {
        if (!whole) plain_panel(y + p * PARTS, to->w, (const Plain *)x + first, in->rows, rows, panel + p);
#if ONE_ROW_APART
        if (whole && rows == 1) one_row(y + p * PARTS, to->w, (const Rounded *)x + first, in->rows, panel + p);
#endif
    }
    store_panels(to, in, out, stride, y, panels, first, rows, panel);
}

/* Weights that lie one below another, `count` of them, each with its columns of y (rows `stride` apart); all take the same inputs. 1: no memory. */
int headrace_panel_product(int64_t count, const Output *to, const Inputs *in, void *y, int64_t stride, int whole, int threads) {
    const int64_t chunks = (in->ins + CHUNK - 1) / CHUNK;
    void *x = aligned_alloc(64, chunks * in->rows * (whole ? sizeof(Rounded) : sizeof(Plain)));
    int64_t groups = 0;
    if (!x) return 1;
    for (int64_t i = 0; i < count; i++) groups += num_groups(to[i].w);
    const int64_t tasks = groups * ((in->rows + MOST_ROWS - 1) / MOST_ROWS), share = groups / (threads * 16) + 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < in->rows; r++) whole ? round_row(in, r, x) : plain_row(in, r, x);
#pragma omp for schedule(dynamic, share)
        for (int64_t i = 0; i < tasks; i++) {
            const Output *here = to;
            int64_t group = i % groups;
            while (group >= num_groups(here->w)) group -= num_groups(here++->w);
            some_panels(here, in, x, y, stride, whole, i / groups * MOST_ROWS, group * TOGETHER);
        }
    }
    free(x);
    return 0;
}
