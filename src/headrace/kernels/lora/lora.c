/* What adapters add to a product: y[i] += (x[i] . a[s]^T) . b[s], part by part, in place.
 *
 * Each row of a and column of b lies where the table of the slots says, in chunks of a pool.
 *
 * What lives here: low-rank products of rows whose factors are those of their slot. What may not: which row has which slot.
 *
 * Rows of one slot are taken in blocks of up to ROWS, which share what is loaded of the factors. Sums are in float32 and
 * each element of y is rounded once. A row's sums have one order, whatever its block: bits do not depend on the batch.
 */
#include "common.h"

#define ROWS 4       /* of a block */
#define VECTORS (MANY_REGISTERS ? 4 : 2) /* of outputs that are added up at once */
#define OUTPUTS 256  /* that a thread takes at a time */
#define UNIT 64      /* elements that an address counts */
#define WORTH_THREADS 4194304 /* multiplications below which waking threads costs more than they bring: some 30 µs of one core */

typedef struct {
    int type;
    int64_t rows, ins, outs, parts, most; /* most: ranks that a slot has room for */
    int64_t a_chunks, b_chunks, chunk;    /* of a row of a, of a column of b; elements */
    const int64_t *order;                 /* [rows]: places in x and y */
    const int32_t *slots, *ranks;         /* [rows]; [slots, parts] */
    const int32_t *a, *b;                 /* addresses [slots, parts, most, chunks] */
    const int32_t *begins;                /* [blocks + 1]: rows of a block */
    const int64_t *ends;                  /* [parts]: where the outputs of each end */
    const char *x, *pool;
    char *y;
    int64_t x_row, y_row, table_row; /* strides, elements */
    float *inner;                    /* [rows, parts, most] */
} Deltas;

INLINE const char *at_address(const Deltas *d, int32_t address, int64_t size) { return d->pool + (int64_t)address * UNIT * size; }

/* ---- to the ranks ---- */

#if HAVE_BF16_DOT
INLINE __m512bh load32(const char *base, int64_t at, int64_t left) {
    const __mmask32 there = left >= 32 ? 0xffffffffu : (1u << left) - 1;
    return (__m512bh)_mm512_maskz_loadu_epi16(there, (const uint16_t *)base + at);
}
#endif

/* Of so many rows and ranks; both are constants. x: where each row begins; a: where each rank does. Adds to the sums. */
INLINE void dots(const char *const *x, const char *const *a, int64_t ins, vec *sums, const int rows, const int ranks, const int type) {
#if HAVE_BF16_DOT
    if (type == BF16) {
        for (int64_t at = 0; at < ins; at += 32) {
            __m512bh held[8];
            UNROLL for (int r = 0; r < ranks; r++) held[r] = load32(a[r], at, ins - at);
            UNROLL for (int row = 0; row < rows; row++) {
                const __m512bh piece = load32(x[row], at, ins - at);
                UNROLL for (int r = 0; r < ranks; r++)
                    sums[row * ranks + r] = (vec)_mm512_dpbf16_ps((__m512)sums[row * ranks + r], piece, held[r]);
            }
        }
        return;
    }
#endif
    for (int64_t at = 0; at < ins; at += LANES) {
        vec held[8];
        UNROLL for (int r = 0; r < ranks; r++) held[r] = load_upto(a[r], at, ins - at, type);
        UNROLL for (int row = 0; row < rows; row++) {
            const vec piece = load_upto(x[row], at, ins - at, type);
            UNROLL for (int r = 0; r < ranks; r++) sums[row * ranks + r] += piece * held[r];
        }
    }
}

INLINE void shrink_rows(const Deltas *d, int64_t first, int64_t part, const int rows, const int ranks, const int type) {
    const int64_t line = d->slots[first] * d->table_row, rank = d->ranks[line + part], size = size_of(type);
    const int32_t *addresses = d->a + line + part * d->most * d->a_chunks;
    const char *x[ROWS], *a[8];
    for (int64_t at = 0; at < rank; at += ranks) {
        vec sums[ROWS * 4];
        UNROLL for (int i = 0; i < rows * ranks; i++) sums[i] = (vec){0};
        for (int64_t c = 0; c < d->a_chunks; c++) {
            const int64_t from = c * d->chunk, count = d->ins - from < d->chunk ? d->ins - from : d->chunk;
            UNROLL for (int row = 0; row < rows; row++) x[row] = d->x + (d->order[first + row] * d->x_row + from) * size;
            for (int r = 0; r < ranks; r++) /* the last one again */
                a[r] = at_address(d, addresses[(at + r < rank ? at + r : rank - 1) * d->a_chunks + c], size);
            dots(x, a, count, sums, rows, ranks, type);
        }
        for (int row = 0; row < rows; row++)
            for (int r = 0; r < ranks && at + r < rank; r++)
                d->inner[((first + row) * d->parts + part) * d->most + at + r] = vsum(sums[row * ranks + r]);
    }
}

INLINE void shrink(const Deltas *d, int64_t block, int64_t part, const int type) {
    const int64_t first = d->begins[block];
    switch (d->begins[block + 1] - first) {
        case 1: shrink_rows(d, first, part, 1, 8, type); break;
        case 2: shrink_rows(d, first, part, 2, 8, type); break;
        case 3: shrink_rows(d, first, part, 3, 4, type); break;
        default: shrink_rows(d, first, part, 4, 4, type);
    }
}

/* ---- and up again ---- */

/* vectors: of LANES outputs, all of them there; 0: one, of which `left` are. */
INLINE vec load_of(const char *base, int64_t at, int64_t left, const int vectors, const int type) {
    return vectors ? load_vec(base, at, type) : load_upto(base, at, left, type);
}

/* b: where each rank's output 0 would lie; of this chunk it is so. */
INLINE void add_vectors(char *const *y, const char *const *b, const float *const *inner, int64_t rank, int64_t at, int64_t left,
                        const int rows, const int all, const int type) {
    const int vectors = all ? all : 1;
    vec sums[ROWS * VECTORS];
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int v = 0; v < vectors; v++) sums[row * vectors + v] = load_of(y[row], at + LANES * v, left, all, type);
    for (int64_t r = 0; r < rank; r++) {
        vec held[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) held[v] = load_of(b[r], at + LANES * v, left, all, type);
        UNROLL for (int row = 0; row < rows; row++) {
            const vec factor = splat(inner[row][r]);
            UNROLL for (int v = 0; v < vectors; v++) sums[row * vectors + v] += factor * held[v];
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int v = 0; v < vectors; v++) {
            const vec sum = sums[row * vectors + v];
            if (all)
                store_vec(y[row], at + LANES * v, sum, type);
            else
                store_upto(y[row], at, left, sum, type);
        }
}

#if HAVE_BF16_DOT
/* PAIRED outputs, two ranks at a time: rows of b are interleaved, so that a dot product takes both.
 *
 *     unpacked low, high    outputs 0 .. 3, 8 .. 11, ..    4 .. 7, 12 .. 15, ..    put back in order at the end */
#define PAIRED 64

INLINE void add_pairs(char *const *y, const char *const *b, const int32_t (*pairs)[128], int64_t rank, int64_t at, const int rows) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), second = _mm512_or_epi32(first, _mm512_set1_epi32(8));
    __m512 sums[ROWS][4];
    UNROLL for (int row = 0; row < rows; row++) UNROLL for (int v = 0; v < 4; v++) sums[row][v] = _mm512_setzero_ps();
    for (int64_t r = 0; r < rank; r += 2) {
        const uint16_t *const even = (const uint16_t *)b[r] + at, *const odd = (const uint16_t *)b[r + 1 < rank ? r + 1 : r] + at;
        __m512i held[4];
        UNROLL for (int half = 0; half < 2; half++) {
            const __m512i one = _mm512_loadu_si512(even + 32 * half);
            const __m512i other = r + 1 < rank ? _mm512_loadu_si512(odd + 32 * half) : _mm512_setzero_si512();
            __builtin_prefetch(even + 32 * half + PAIRED); /* each rank is a stream of its own, too many for the processor */
            __builtin_prefetch(odd + 32 * half + PAIRED);
            held[2 * half] = _mm512_unpacklo_epi16(one, other);
            held[2 * half + 1] = _mm512_unpackhi_epi16(one, other);
        }
        UNROLL for (int row = 0; row < rows; row++) {
            const __m512bh factors = (__m512bh)_mm512_set1_epi32(pairs[row][r / 2]);
            UNROLL for (int v = 0; v < 4; v++) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], (__m512bh)held[v], factors);
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int half = 0; half < 2; half++) {
            const __m512 low = sums[row][2 * half], high = sums[row][2 * half + 1];
            const int64_t to = at + 32 * half;
            store_vec(y[row], to, load_vec(y[row], to, BF16) + (vec)_mm512_permutex2var_ps(low, first, high), BF16);
            store_vec(y[row], to + 16, load_vec(y[row], to + 16, BF16) + (vec)_mm512_permutex2var_ps(low, second, high), BF16);
        }
}

/* Ranks in pairs, rounded. */
INLINE void pair_up(const float *inner, int64_t rank, int32_t *pairs) {
    for (int64_t at = 0; at < rank; at += 16) store_vec(pairs, at, load_upto(inner, at, rank - at, F32), BF16);
}
#endif

/* Of one part and chunk, whose outputs are begin .. end - 1: those of them that are in from .. to - 1. */
INLINE void expand_chunk(const Deltas *d, int64_t first, int64_t part, int64_t c, int64_t begin, int64_t end, int64_t from, int64_t to, char *const *y,
                         const int rows, const int type) {
    const int64_t line = d->slots[first] * d->table_row, rank = d->ranks[line + part], size = size_of(type);
    int64_t at = begin > from ? begin : from;
    if (end > to) end = to;
    if (rank == 0 || at >= end) return;
    const int32_t *addresses = d->b + line + part * d->most * d->b_chunks + c;
    const float *inner[ROWS];
    const char *b[256];
    UNROLL for (int row = 0; row < rows; row++) inner[row] = d->inner + ((first + row) * d->parts + part) * d->most;
    for (int64_t r = 0; r < rank; r++) b[r] = at_address(d, addresses[r * d->b_chunks], size) - begin * size;
#if HAVE_BF16_DOT
    if (type == BF16 && at + PAIRED <= end) {
        int32_t pairs[ROWS][128]; /* of 256 ranks */
        UNROLL for (int row = 0; row < rows; row++) pair_up(inner[row], rank, pairs[row]);
        for (; at + PAIRED <= end; at += PAIRED) add_pairs(y, b, (const int32_t(*)[128])pairs, rank, at, rows);
    }
#endif
    for (; at + LANES * VECTORS <= end; at += LANES * VECTORS) add_vectors(y, b, inner, rank, at, end - at, rows, VECTORS, type);
    for (; at < end; at += LANES) add_vectors(y, b, inner, rank, at, end - at, rows, 0, type);
}

/* Outputs from .. to - 1. */
INLINE void expand_rows(const Deltas *d, int64_t first, int64_t from, int64_t to, const int rows, const int type) {
    char *y[ROWS];
    UNROLL for (int row = 0; row < rows; row++) y[row] = d->y + d->order[first + row] * d->y_row * size_of(type);
    int64_t begin = 0;
    for (int64_t part = 0; part < d->parts; begin = d->ends[part++])
        for (int64_t c = 0, at = begin; at < d->ends[part]; c++, at += d->chunk) {
            const int64_t end = at + d->chunk < d->ends[part] ? at + d->chunk : d->ends[part];
            expand_chunk(d, first, part, c, at, end, from, to, y, rows, type);
        }
}

INLINE void expand(const Deltas *d, int64_t block, int64_t from, int64_t to, const int type) {
    const int64_t first = d->begins[block];
    switch (d->begins[block + 1] - first) {
        case 1: expand_rows(d, first, from, to, 1, type); break;
        case 2: expand_rows(d, first, from, to, 2, type); break;
        case 3: expand_rows(d, first, from, to, 3, type); break;
        default: expand_rows(d, first, from, to, 4, type);
    }
}

#define BY_TYPE(call)               \
    if (d.type == F32) {            \
        const int type = F32;       \
        call;                       \
    } else if (d.type == BF16) {    \
        const int type = BF16;      \
        call;                       \
    } else {                        \
        const int type = F16;       \
        call;                       \
    }

INLINE void whole(const Deltas *d, int64_t block, const int type) {
    for (int64_t part = 0; part < d->parts; part++) shrink(d, block, part, type);
    expand(d, block, 0, d->outs, type);
}

void headrace_add_deltas(int type, int64_t rows, int64_t blocks, int64_t ins, int64_t outs, int64_t parts, int64_t most, int64_t a_chunks,
                         int64_t b_chunks, int64_t chunk, const int64_t *order, const int32_t *slots, const int32_t *begins, const int32_t *ranks,
                         const int32_t *a, int64_t table_row, const int32_t *b, const int64_t *ends, const char *x, int64_t x_row,
                         const char *pool, char *y, int64_t y_row, float *inner, int threads) {
    const Deltas d = {type, rows, ins, outs, parts, most, a_chunks, b_chunks, chunk, order, slots, ranks, a, b, begins, ends, x, pool, y, x_row,
                      y_row, table_row, inner};
    const int64_t pieces = (outs + OUTPUTS - 1) / OUTPUTS;
    if (threads == 1 || rows * most * (ins * parts + outs) < WORTH_THREADS) {
        for (int64_t block = 0; block < blocks; block++) BY_TYPE(whole(&d, block, type))
    } else if (blocks >= 4 * threads) { /* nobody waits in the middle */
#pragma omp parallel for num_threads(threads)
        for (int64_t block = 0; block < blocks; block++) BY_TYPE(whole(&d, block, type))
    } else {
#pragma omp parallel num_threads(threads)
        {
#pragma omp for
            for (int64_t i = 0; i < blocks * parts; i++) BY_TYPE(shrink(&d, i / parts, i % parts, type))
#pragma omp for
            for (int64_t i = 0; i < blocks * pieces; i++) {
                const int64_t from = i % pieces * OUTPUTS, to = from + OUTPUTS < outs ? from + OUTPUTS : outs;
                BY_TYPE(expand(&d, i / pieces, from, to, type))
            }
        }
    }
}
