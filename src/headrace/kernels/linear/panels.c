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

#define MOST_ROWS 256 /* of x that share what was unpacked */

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

/* ---- inputs: [chunks of K, rows] of blocks, so that a chunk's rows lie one behind another ---- */

typedef struct {
    int8_t codes[BLOCK];
    float scale, sum, sums[2]; /* sums of codes: of all, of each half */
} Rounded;

typedef struct {
    float x[BLOCK];
} Plain;

typedef struct { /* of x */
    int type, by_row;              /* by_row: rounded by a scale of the row's own instead of a block's */
    int64_t rows, row, ins, there; /* row: stride; there: inputs, which fill up to ins, a multiple of BLOCK */
    const void *x;
} Inputs;

INLINE void load_block(const Inputs *in, int64_t row, int64_t k, v16 *halves) {
    for (int i = 0; i < 2; i++, k += 16) {
        const int64_t left = in->there - k;
        halves[i] = left > 0 ? load_upto(in->x, row * in->row + k, left, in->type) : splat(0.0f);
    }
}

INLINE v16 magnitude(v16 x) { return (v16)((i16)x & 0x7fffffff); }

/* The largest magnitude; NaN where one is no number. */
INLINE float largest(const v16 *x) { return max16(vmax(magnitude(x[0]), magnitude(x[1]))) + sum16((x[0] + x[1]) * 0.0f); }

INLINE v16 to_nearest(v16 x) { return (x + 0x1.8p23f) - 0x1.8p23f; } /* ties to even, of up to 2^22 */

INLINE void round_block(Rounded *out, const v16 *x, float scale) {
    const v16 most = splat(127.0f);
    for (int half = 0; half < 2; half++) {
        const v16 codes = scale > 0x1p-120f ? to_nearest(x[half] / scale) : splat(0.0f), low = pick(codes < -most, -most, codes);
        const v16 kept = pick(low > most, most, low);
        const s8x16 bytes = __builtin_convertvector(__builtin_convertvector(kept, i16), s8x16);
        memcpy(out->codes + 16 * half, &bytes, 16);
        out->sums[half] = sum16(kept);
    }
    out->sum = out->sums[0] + out->sums[1];
    out->scale = scale;
}

static float scale_of_row(const Inputs *in, int64_t r) {
    float most = 1e-10f;
    v16 x[2];
    for (int64_t k = 0; k < in->ins; k += BLOCK) {
        load_block(in, r, k, x);
        const float here = largest(x);
        most = here > most || here != here ? here : most;
    }
    return most / 127.0f;
}

INLINE int64_t block_at(const Inputs *in, int64_t r, int64_t k) { return (k / CHUNK * in->rows + r) * (CHUNK / BLOCK) + k % CHUNK / BLOCK; }

static void round_row(const Inputs *in, int64_t r, Rounded *out) {
    const float of_row = in->by_row ? scale_of_row(in, r) : 0.0f;
    v16 x[2];
    for (int64_t k = 0; k < in->ins; k += BLOCK) {
        load_block(in, r, k, x);
        round_block(out + block_at(in, r, k), x, in->by_row ? of_row : largest(x) / 127.0f);
    }
}

static void plain_row(const Inputs *in, int64_t r, Plain *out) {
    v16 x[2];
    for (int64_t k = 0; k < in->ins; k += BLOCK) {
        load_block(in, r, k, x);
        memcpy(out[block_at(in, r, k)].x, x, sizeof x);
    }
}

/* ---- whole numbers ---- */

#if VNNI == 512 || FROM_128 && !VNNI && VECTOR == 64
#define ROWS 8
#elif VECTOR == 32
#define ROWS 4
#else
#define ROWS 2
#endif

typedef struct { /* of a panel, unpacked; scales of each part, 16 or 32 inputs */
    vb codes[CHUNK / 4 * PARTS];
    vf scale[CHUNK / 16 * PARTS], least[CHUNK / 16 * PARTS];
} Chunk;

static void unpack_chunk(Chunk *out, const Panels *w, int64_t panel, int64_t k0, int64_t count, int part) {
    unpack_codes(out->codes, w, panel, k0, count);
    for (int64_t i = 0; i < count / part * PARTS; i += PARTS) {
        scales_at(w, panel, k0 + i / PARTS * part, out->scale + i, out->least + i);
        for (int p = 0; FROM_128 && w->kind == SIGNED && p < PARTS; p++) out->least[i + p] += out->scale[i + p] * 128.0f;
    }
    for (int64_t i = 0; FROM_128 && w->kind == SIGNED && i < count / 4 * PARTS; i++) out->codes[i] ^= 128;
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

/* sums[r * PARTS + p] = codes of x row r . codes of w, over `steps` steps from `from` on. */
INLINE void dots(vi *sums, const Rounded *const *x, int from, const vb *w, const int rows, const int steps, const int run) {
    (void)run;
    UNROLL for (int i = 0; i < rows * PARTS; i++) sums[i] = (vi){};
    UNROLL for (int s = 0; s < steps; s++)
        UNROLL for (int i = 0; i < rows * PARTS; i++)
            sums[i] = dot_step(sums[i], w[s * PARTS + i % PARTS], repeated(x[i / PARTS]->codes + 4 * (from + s)));
}

#else
INLINE __m256i pairs(vb codes, vi four) { return _mm256_maddubs_epi16((__m256i)codes, (__m256i)four); }

INLINE vi fours(__m256i pairs) { return (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

/* Products of `run` steps fit into 16 bits; 0: codes have a sign. */
INLINE void dots(vi *sums, const Rounded *const *x, int from, const vb *w, const int rows, const int steps, const int run) {
    UNROLL for (int i = 0; i < rows * PARTS; i++) sums[i] = (vi){};
    UNROLL for (int s = 0; s < steps; s += run ? run : 1) {
        __m256i part[ROWS * PARTS];
        UNROLL for (int i = 0; i < rows * PARTS; i++) {
            const vb codes = w[s * PARTS + i % PARTS];
            const vi four = repeated(x[i / PARTS]->codes + 4 * (from + s));
            part[i] = run ? pairs(codes, four)
                          : pairs((vb)_mm256_abs_epi8((__m256i)codes), (vi)_mm256_sign_epi8((__m256i)four, (__m256i)codes));
        }
        UNROLL for (int more = s + 1; more < s + run; more++)
            UNROLL for (int i = 0; i < rows * PARTS; i++)
                part[i] = _mm256_add_epi16(part[i], pairs(w[more * PARTS + i % PARTS], repeated(x[i / PARTS]->codes + 4 * (from + more))));
        UNROLL for (int i = 0; i < rows * PARTS; i++) sums[i] += fours(part[i]);
    }
}
#endif

/* y of `rows` rows of x goes on over a chunk of `blocks` blocks. */
INLINE void multiply(vf *y, const Rounded *x, const Chunk *w, int64_t blocks, const int rows, const int part, const int run, const int plain) {
    const Rounded *at[ROWS];
    const vb *codes = w->codes;
    const vf *scale = w->scale, *least = w->least;
    UNROLL for (int r = 0; r < rows; r++) at[r] = x + r * (CHUNK / BLOCK);
    for (int64_t b = 0; b < blocks; b++) {
        UNROLL for (int half = 0; half < BLOCK / part; half++, codes += part / 4 * PARTS, scale += PARTS, least += PARTS) {
            vi sums[ROWS * PARTS];
            dots(sums, at, half * part / 4, codes, rows, part / 4, run);
            UNROLL for (int i = 0; i < rows * PARTS; i++) {
                const Rounded *here = at[i / PARTS];
                vf found = __builtin_convertvector(sums[i], vf) * scale[i % PARTS];
                if (!plain) found -= least[i % PARTS] * (part == BLOCK ? here->sum : here->sums[half]);
                y[i] += found * here->scale;
            }
        }
        UNROLL for (int r = 0; r < rows; r++) at[r]++;
    }
}

#define TILE(rows) \
    case rows: multiply(y, x, w, blocks, rows, part, run, plain); break;

INLINE void multiply_rows(vf *y, const Rounded *x, const Chunk *w, int64_t rows, int64_t blocks, const int part, const int run, const int plain) {
    for (; rows >= ROWS; rows -= ROWS, y += ROWS * PARTS, x += ROWS * (CHUNK / BLOCK)) multiply(y, x, w, blocks, ROWS, part, run, plain);
    switch (rows) {
        TILE(1)
#if ROWS > 2
        TILE(2) TILE(3)
#endif
#if ROWS > 4
        TILE(4) TILE(5) TILE(6) TILE(7)
#endif
    }
}

#define MULTIPLY(name, part, run, plain) \
    static __attribute__((noinline)) void name(vf *y, const Rounded *x, const Chunk *w, int64_t rows, int64_t blocks) { \
        multiply_rows(y, x, w, rows, blocks, part, run, plain); \
    }
#if FROM_128
MULTIPLY(whole_any, 32, 8, 0) MULTIPLY(halves_any, 16, 4, 0)
#else
MULTIPLY(whole_8, 32, 8, 0) MULTIPLY(whole_4, 32, 4, 0) MULTIPLY(whole_2, 32, 2, 0) MULTIPLY(whole_signed, 32, 0, 0)
MULTIPLY(halves_4, 16, 4, 0) MULTIPLY(halves_2, 16, 2, 0) MULTIPLY(halves_signed, 16, 0, 0) MULTIPLY(whole_plain, 32, 0, 1)
#endif

typedef void (*Multiply)(vf *, const Rounded *, const Chunk *, int64_t, int64_t);

static Multiply multiply_for(const Panels *w, int part) {
#if FROM_128
    (void)w;
    return part == 16 ? halves_any : whole_any;
#else
    if (w->kind == SIGNED) return part == 16 ? halves_signed : w->least || w->zero != 0.0f ? whole_signed : whole_plain;
    const int run = w->most <= 16 ? 8 : w->most <= 32 ? 4 : 2; /* 2 . 127 . most . run < 2^15 */
    return part == 16 ? (run == 2 ? halves_2 : halves_4) : run == 8 ? whole_8 : run == 4 ? whole_4 : whole_2;
#endif
}

static void whole_panel(vf *y, const Panels *w, const Rounded *x, int64_t all, int64_t rows, int64_t panel) {
    const int part = w->group % BLOCK ? 16 : BLOCK;
    const Multiply go_on = multiply_for(w, part);
    Chunk chunk;
    for (int64_t k = 0; k < w->ins; k += CHUNK, x += all * (CHUNK / BLOCK)) {
        const int64_t count = w->ins - k < CHUNK ? w->ins - k : CHUNK;
        unpack_chunk(&chunk, w, panel, k, count, part);
        go_on(y, x, &chunk, rows, count / BLOCK);
    }
}

/* ---- float32 ---- */

#if VECTOR == 32
#define PLAIN_ROWS 6
#else
#define PLAIN_ROWS 4
#endif

INLINE void add_products(vf *y, const Plain *x, const vf *w, int64_t blocks, const int rows) {
    for (int64_t b = 0; b < blocks; b++, x++) {
        vf sums[PLAIN_ROWS * PARTS];
        UNROLL for (int i = 0; i < rows * PARTS; i++) sums[i] = (vf){};
        for (int k = 0; k < BLOCK; k++, w += PARTS)
            UNROLL for (int i = 0; i < rows * PARTS; i++) sums[i] += w[i % PARTS] * x[i / PARTS * (CHUNK / BLOCK)].x[k];
        UNROLL for (int i = 0; i < rows * PARTS; i++) y[i] += sums[i];
    }
}

#define PLAIN_TILE(rows) \
    case rows: add_products(y, x, w, blocks, rows); break;

static __attribute__((noinline)) void plain_rows(vf *y, const Plain *x, const vf *w, int64_t rows, int64_t blocks) {
    for (; rows >= PLAIN_ROWS; rows -= PLAIN_ROWS, y += PLAIN_ROWS * PARTS, x += PLAIN_ROWS * (CHUNK / BLOCK))
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
    for (int64_t k = 0; k < w->ins; k += CHUNK, x += all * (CHUNK / BLOCK)) {
        const int64_t count = w->ins - k < CHUNK ? w->ins - k : CHUNK;
        widen_chunk(wide, w, panel, k, count);
        plain_rows(y, x, wide, rows, count / BLOCK);
    }
}

/* ---- the product ---- */

typedef struct {
    const Panels *w;
    const char *bias; /* [outs], of the type of y, or NULL */
    char *y;
    int64_t y_row;
} Output;

static void store_panel(const Output *to, const vf *y, int64_t first, int64_t rows, int64_t panel, const int type) {
    const int64_t at = panel * COLUMNS, left = to->w->outs - at;
    const v16 bias = to->bias ? load_upto(to->bias, at, left, type) : splat(0.0f);
    for (int64_t r = 0; r < rows; r++) store_upto(to->y, (first + r) * to->y_row + at, left, ((const v16 *)y)[r] + bias, type);
}

static void one_panel(const Output *to, const Inputs *in, const void *x, int whole, int64_t panel) {
    vf y[MOST_ROWS * PARTS] __attribute__((aligned(64)));
    for (int64_t first = 0; first < in->rows; first += MOST_ROWS) {
        const int64_t rows = in->rows - first < MOST_ROWS ? in->rows - first : MOST_ROWS;
        memset(y, 0, rows * COLUMNS * sizeof(float));
        if (whole)
            whole_panel(y, to->w, (const Rounded *)x + first * (CHUNK / BLOCK), in->rows, rows, panel);
        else
            plain_panel(y, to->w, (const Plain *)x + first * (CHUNK / BLOCK), in->rows, rows, panel);
        store_panel(to, y, first, rows, panel, in->type);
    }
}

/* Weights that lie one below another, `count` of them, each with its part of y; all take the same inputs. 1: no memory. */
int headrace_panel_product(int64_t count, const Output *to, const Inputs *in, int whole, int threads) {
    const int64_t chunks = (in->ins + CHUNK - 1) / CHUNK;
    void *x = aligned_alloc(64, chunks * in->rows * (CHUNK / BLOCK) * (whole ? sizeof(Rounded) : sizeof(Plain)));
    int64_t panels = 0;
    if (!x) return 1;
    for (int64_t i = 0; i < count; i++) panels += num_panels(to[i].w);
    const int64_t share = panels / (threads * 16) + 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < in->rows; r++) whole ? round_row(in, r, x) : plain_row(in, r, x);
#pragma omp for schedule(dynamic, share)
        for (int64_t i = 0; i < panels; i++) {
            const Output *here = to;
            int64_t panel = i;
            while (panel >= num_panels(here->w)) panel -= num_panels(here++->w);
            one_panel(here, in, x, whole, panel);
        }
    }
    free(x);
    return 0;
}
