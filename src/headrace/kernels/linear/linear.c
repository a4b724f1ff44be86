/* Matrix products for few rows over a weight left as it is, row after row: y[M, N] = x[M, K] . w[N, K]^T (+ bias).
 *
 * What lives here: the dense product. What may not: packed layouts, large-M blocking (the vendor's job).
 *
 * A decode step reads every weight once, so the aim is to stream w at memory speed and to have the arithmetic of a few dozen rows hidden
 * behind it. Rows of w are read one at a time, front to back, by the first four rows of x (one stream a thread: several would fall into
 * the same cache sets when K is a power of two); the other rows of x meet them in the cache, four by four.
 *
 * Each output has one accumulator, a vector, that runs over K in order, and one tree adds the lanes: its bits do not depend on M, N, the
 * tile it fell into or the number of threads. (A lone row may use four accumulators instead, where that promise is not asked for.)
 */
#include "common.h"
#include "product.h"

#define TILE 4 /* rows of x and rows of w in a tile: 16 accumulators */
#define PASS (MANY_REGISTERS ? TILE : 2) /* rows of w whose accumulators are in registers at once */

/* sums[i] = the sum of acc[i]'s lanes, each by one tree. */
INLINE void sum_lanes(float *sums, const vec *acc) {
#if LANES == 16
    __m512 a[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = (__m512)acc[i];
    /* Fold lanes 8 apart: pairs (i, i + 8) share a register, halves in halves. */
    __m512 b[8], c[4], d[2];
    UNROLL for (int i = 0; i < 8; i++)
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 8], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 8], 0xEE));
    /* Lanes 4 apart: quarters now stand for (i, i + 8) x halves; keep quarter order (i, i + 4, i + 8, i + 12). */
    UNROLL for (int i = 0; i < 4; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 4], 0xDD));
    /* Lanes 2 apart, then 1, inside each quarter. */
    UNROLL for (int i = 0; i < 2; i++)
        d[i] = _mm512_add_ps(_mm512_shuffle_ps(c[i], c[i + 2], 0x44), _mm512_shuffle_ps(c[i], c[i + 2], 0xEE));
    __m512 e = _mm512_add_ps(_mm512_shuffle_ps(d[0], d[1], 0x88), _mm512_shuffle_ps(d[0], d[1], 0xDD));
    /* Quarter q, lane l of e: which accumulator? c/b quarters: 0 -> i, 1 -> i + 8, 2 -> i + 4, 3 -> i + 12; lanes: 0 -> 0, 1 -> 2, 2 -> 1, 3 -> 3. */
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    _mm512_storeu_ps(sums, _mm512_permutexvar_ps(order, e));
#elif LANES == 8
    UNROLL for (int i = 0; i < 16; i += 8) {
        __m256 quarters[2];
        UNROLL for (int j = 0; j < 2; j++) {
            const __m256 *a = (const __m256 *)acc + i + 4 * j;
            quarters[j] = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
        }
        const __m256 low = _mm256_permute2f128_ps(quarters[0], quarters[1], 0x20), high = _mm256_permute2f128_ps(quarters[0], quarters[1], 0x31);
        _mm256_storeu_ps(sums + i, _mm256_add_ps(low, high));
    }
#else
    for (int i = 0; i < 16; i++) sums[i] = vsum(acc[i]);
#endif
}

/* ---- a step of the dot products: 32 elements where bf16 dot instructions are, else a vector ---- */

#define DOTTED(type) (HAVE_BF16_DOT && (type) == BF16)
#define STEP(type) (DOTTED(type) ? 32 : LANES)
#define X_TYPE(type) (DOTTED(type) ? (type) : F32)

INLINE vec load_step(const char *from, int64_t at, int64_t left, const int type) { /* `left` elements remain */
#if HAVE_BF16_DOT
    if (type == BF16) {
        const __mmask32 mask = left >= 32 ? 0xFFFFFFFFu : (1u << left) - 1;
        return (vec)_mm512_maskz_loadu_epi16(mask, from + at * 2);
    }
#endif
    return load_upto(from, at, left, type);
}

INLINE vec multiply_add(vec sum, vec a, vec b, const int type) {
#if HAVE_BF16_DOT
    if (type == BF16) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)type;
    return sum + a * b;
}

/* out[r * TILE] = partial sums of x row r . w, for `rows` (1 to 4) rows of x and one of w. */
INLINE void dot_stream(vec *out, const char *const *x, const char *w, int64_t k, const int rows, const int type) {
    const int step = STEP(type);
    vec sums[TILE];
    int64_t at = 0;
    UNROLL for (int r = 0; r < rows; r++) sums[r] = splat(0.0f);
    for (; at + step <= k; at += step) {
        const vec right = load_step(w, at, step, type);
        UNROLL for (int r = 0; r < rows; r++) sums[r] = multiply_add(sums[r], load_step(x[r], at, step, X_TYPE(type)), right, type);
    }
    if (at < k)
        UNROLL for (int r = 0; r < rows; r++)
            sums[r] = multiply_add(sums[r], load_step(x[r], at, k - at, X_TYPE(type)), load_step(w, at, k - at, type), type);
    UNROLL for (int r = 0; r < rows; r++) out[r * TILE] = sums[r];
}

/* The same for one row of x with four accumulators: no waiting for the one before. */
INLINE vec dot_alone(const char *x, const char *w, int64_t k, const int type) {
    const int step = STEP(type);
    vec sums[4];
    int64_t at = 0;
    UNROLL for (int i = 0; i < 4; i++) sums[i] = splat(0.0f);
    for (; at + 4 * step <= k; at += 4 * step)
        UNROLL for (int i = 0; i < 4; i++)
            sums[i] = multiply_add(sums[i], load_step(x, at + i * step, step, X_TYPE(type)), load_step(w, at + i * step, step, type), type);
    for (; at < k; at += step) sums[0] = multiply_add(sums[0], load_step(x, at, k - at, X_TYPE(type)), load_step(w, at, k - at, type), type);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

INLINE void tile_step(vec *sums, const char *const *x, const char *const *w, int64_t at, int64_t left, const int type) {
    vec from_x[TILE], from_w[PASS];
    UNROLL for (int r = 0; r < TILE; r++) from_x[r] = load_step(x[r], at, left, X_TYPE(type));
    UNROLL for (int c = 0; c < PASS; c++) from_w[c] = load_step(w[c], at, left, type);
    UNROLL for (int r = 0; r < TILE; r++)
        UNROLL for (int c = 0; c < PASS; c++) sums[r * PASS + c] = multiply_add(sums[r * PASS + c], from_x[r], from_w[c], type);
}

/* out[r * TILE + c] = partial sums of x row r . w row c; both are in the cache. Meanwhile the rows at next[0 .. ahead - 1] are fetched. */
INLINE void dot_tile(vec *out, const char *const *x, const char *const *w, int64_t k, const char *const *next, const int ahead, const int type) {
    const int step = STEP(type);
    UNROLL for (int first = 0; first < TILE; first += PASS) {
        vec sums[TILE * PASS];
        int64_t at = 0;
        UNROLL for (int i = 0; i < TILE * PASS; i++) sums[i] = splat(0.0f);
        for (; at + step <= k; at += step) {
            UNROLL for (int i = 0; first == 0 && i < ahead; i++) __builtin_prefetch(next[i] + at * size_of(type));
            tile_step(sums, x, w + first, at, step, type);
        }
        if (at < k) tile_step(sums, x, w + first, at, k - at, type);
        UNROLL for (int i = 0; i < TILE * PASS; i++) out[i / PASS * TILE + first + i % PASS] = sums[i];
    }
}

/* ---- tiles of y ---- */

/* Lane r * TILE + c of the reduced sums to y[m0 + r, n0 + c], with the bias. */
static __attribute__((noinline)) void store_tile(const Product *p, vec *acc, int64_t m0, int64_t n0, int rows, int cols) {
    float lanes[16];
    sum_lanes(lanes, acc);
    for (int r = 0; r < rows; r++) {
        vec line = splat(0.0f);
        memcpy(&line, lanes + r * TILE, cols * sizeof(float));
        if (p->bias) line += load_some(p->bias, n0, cols, p->type);
        store_some(p->y, (m0 + r) * p->y_row + n0, cols, line, p->type);
    }
}

/* Up to TILE columns and rows of y, each row of w read from front to back. */
INLINE void stream_rows(const Product *p, int64_t m0, int64_t n0, const int rows, int cols, const int type) {
    const char *x[TILE];
    vec acc[16];
    UNROLL for (int r = 0; r < rows; r++) x[r] = p->x + (m0 + r) * p->x_row * size_of(X_TYPE(type));
    UNROLL for (int i = 0; i < 16; i++) acc[i] = splat(0.0f);
    for (int c = 0; c < cols; c++) dot_stream(acc + c, x, p->w + (n0 + c) * p->w_row * size_of(type), p->k, rows, type);
    store_tile(p, acc, m0, n0, rows, cols);
}

INLINE void stream(const Product *p, int64_t m0, int64_t n0, int cols, const int type) {
    switch (p->m - m0) {
        case 0: break;
        case 1: stream_rows(p, m0, n0, 1, cols, type); break;
        case 2: stream_rows(p, m0, n0, 2, cols, type); break;
        case 3: stream_rows(p, m0, n0, 3, cols, type); break;
        default: stream_rows(p, m0, n0, 4, cols, type);
    }
}

/* TILE columns of y from n0 on, rows m0 .. m0 + 3. The first two passes fetch the next tile of w, two rows each. */
INLINE void tile(const Product *p, int64_t m0, int64_t n0, int pass, const int type) {
    const int64_t size = size_of(type);
    const char *x[TILE], *w[TILE], *next[2];
    vec acc[16];
    UNROLL for (int i = 0; i < TILE; i++) x[i] = p->x + (m0 + i) * p->x_row * size_of(X_TYPE(type));
    UNROLL for (int i = 0; i < TILE; i++) w[i] = p->w + (n0 + i) * p->w_row * size;
    UNROLL for (int i = 0; i < 2; i++) next[i] = p->w + (n0 + TILE + 2 * pass + i) * p->w_row * size;
    if (pass < 2)
        dot_tile(acc, x, w, p->k, next, 2, type);
    else
        dot_tile(acc, x, w, p->k, next, 0, type);
    store_tile(p, acc, m0, n0, TILE, TILE);
}

/* The last tile of rows ends at m and repeats some of the rows before it: the same bits, sooner than one by one. */
INLINE void columns(const Product *p, int64_t n0, int cols, const int type) {
    if (cols == TILE && p->m > TILE)
        for (int pass = 0; pass * TILE < p->m; pass++) tile(p, pass * TILE + TILE <= p->m ? pass * TILE : p->m - TILE, n0, pass, type);
    else
        for (int64_t m = 0; m < p->m; m += TILE) stream(p, m, n0, cols, type);
}

/* Sixteen columns of y's only row share one reduction and one store. */
INLINE void sixteen_columns(const Product *p, int64_t n0, const int type) {
    vec acc[16];
    for (int c = 0; c < 16; c++) acc[c] = dot_alone(p->x, p->w + (n0 + c) * p->w_row * size_of(type), p->k, type);
    float lanes[16];
    sum_lanes(lanes, acc);
    UNROLL for (int c = 0; c < 16; c += LANES) {
        vec out = *(vecu *)(lanes + c);
        if (p->bias) out += load_vec(p->bias, n0 + c, type);
        store_vec(p->y, n0 + c, out, type);
    }
}

INLINE void product_range(const Product *p, int64_t from, int64_t to, const int type) {
    int64_t n = from;
    if (p->m == 1 && !p->invariant)
        for (; n + 16 <= to; n += 16) sixteen_columns(p, n, type);
    for (; n < to; n += TILE) columns(p, n, to - n < TILE ? (int)(to - n) : TILE, type);
}

void headrace_product_columns(const Product *p, int64_t from, int64_t to) {
    if (p->type == F32)
        product_range(p, from, to, F32);
    else if (p->type == BF16)
        product_range(p, from, to, BF16);
    else
        product_range(p, from, to, F16);
}

int headrace_product_type(int type) { return X_TYPE(type); }

void headrace_product_row(int type, const char *x, char *to, int64_t k) {
    if (X_TYPE(type) == type)
        memcpy(to, x, k * size_of(type));
    else if (type == BF16)
        for (int64_t i = 0; i < k; i += LANES) store_upto(to, i, k - i, load_upto(x, i, k - i, BF16), F32);
    else
        for (int64_t i = 0; i < k; i += LANES) store_upto(to, i, k - i, load_upto(x, i, k - i, F16), F32);
}

/* 1: no memory. */
int headrace_linear(int type, int64_t m, int64_t n, int64_t k, const char *x, int64_t x_row, const char *w, int64_t w_row, const char *bias,
                    char *y, int64_t y_row, int invariant, int threads) {
    const int64_t chunks = (n + CHUNK_N - 1) / CHUNK_N, line = k * size_of(X_TYPE(type));
    char *wide = NULL;
    if (X_TYPE(type) != type) {
        if (!(wide = malloc(m * line + 1))) return 1;
        for (int64_t i = 0; i < m; i++) headrace_product_row(type, x + i * x_row * size_of(type), wide + i * line, k);
    }
    const Product p = {type, m, n, k, wide ? wide : x, w, bias, y, wide ? k : x_row, w_row, y_row, invariant};
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && chunks > 1 && m * n * k > 65536)
    for (int64_t i = 0; i < chunks; i++) headrace_product_columns(&p, i * CHUNK_N, (i + 1) * CHUNK_N < n ? (i + 1) * CHUNK_N : n);
    free(wide);
    return 0;
}

/* ---- weights that lie apart ---- */

typedef struct {
    int type;
    int64_t n, k, x_row, y_row;
    const char *x;
    const int32_t *ends, *columns;
    const float *values;
    char *y;
} Sparse;

/* LANES outputs of one row, whose inputs are in `wide`. */
INLINE void add_row(const Sparse *s, const float *wide, int64_t i, int64_t at) {
    const int64_t left = s->n - at;
    vec sums = splat(0.0f);
    for (int64_t j = 0; j < LANES && j < left; j++) {
        float sum = 0.0f;
        for (int32_t entry = s->ends[at + j]; entry < s->ends[at + j + 1]; entry++) sum = fmaf(s->values[entry], wide[s->columns[entry]], sum);
        sums[j] = sum;
    }
    store_upto(s->y, i * s->y_row + at, left, load_upto(s->y, i * s->y_row + at, left, s->type) + sums, s->type);
}

/* LANES outputs of as many rows, whose inputs lie side by side in `wide`: an entry meets all of them at once. */
INLINE void add_rows(const Sparse *s, const float *wide, int64_t i, int64_t rows, int64_t at) {
    const int64_t left = s->n - at;
    float turned[LANES][LANES] __attribute__((aligned(64))) = {{0}};
    for (int64_t j = 0; j < LANES && j < left; j++) {
        vec sum = splat(0.0f);
        for (int32_t entry = s->ends[at + j]; entry < s->ends[at + j + 1]; entry++) {
            const vec x = *(const vec *)(wide + LANES * (int64_t)s->columns[entry]);
            for (int lane = 0; lane < LANES; lane++) sum[lane] = fmaf(s->values[entry], x[lane], sum[lane]);
        }
        for (int lane = 0; lane < LANES; lane++) turned[lane][j] = sum[lane];
    }
    for (int64_t r = i; r < i + rows; r++)
        store_upto(s->y, r * s->y_row + at, left, load_upto(s->y, r * s->y_row + at, left, s->type) + *(vec *)turned[r - i], s->type);
}

INLINE void widen_rows(const Sparse *s, float *wide, int64_t i, int64_t rows, int side) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0; at < s->k; at += LANES) {
            const vec x = load_upto(s->x, (i + r) * s->x_row + at, s->k - at, s->type);
            for (int64_t j = 0; j < LANES && at + j < s->k; j++) wide[(at + j) * side + r] = x[j];
        }
}

/* y[M, N] += x[M, K] . S^T: entries of row n of S are those from ends[n] to ends[n + 1]. Each sum is in their order, in float32. 1: no memory. */
int headrace_add_sparse(int type, int64_t m, int64_t n, int64_t k, const char *x, int64_t x_row, const int32_t *ends, const int32_t *columns,
                        const float *values, char *y, int64_t y_row, int threads) {
    const Sparse s = {type, n, k, x_row, y_row, x, ends, columns, values, y};
    const int side = m < 4 ? 1 : LANES; /* rows at a time */
    float *wide = calloc(k * side + 64 / sizeof(float), sizeof(float)), *base = (float *)(((uintptr_t)wide + 63) / 64 * 64);
    if (!wide) return 1;
    for (int64_t i = 0; i < m; i += side) {
        const int64_t rows = m - i < side ? m - i : side;
        widen_rows(&s, base, i, rows, side);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && ends[n] * rows > 16384)
        for (int64_t at = 0; at < n; at += LANES) side == 1 ? add_row(&s, base, i, at) : add_rows(&s, base, i, rows, at);
    }
    free(wide);
    return 0;
}
