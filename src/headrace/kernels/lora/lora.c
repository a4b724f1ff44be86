/* What adapters add to a product, for a few rows each: y[i] += (x[i] . a[s]^T) . b[s], part by part, in place.
 *
 * What lives here: low-rank products of rows whose factors are those of their slot. What may not: many rows of one slot (the
 * vendor's products), which row has which slot.
 *
 * Sums are in float32 and each element of y is rounded once. Rows are independent: their bits do not depend on the batch.
 */
#include "common.h"

#define RANKS 4      /* rows of a that meet a piece of x at once */
#define VECTORS 4    /* of 16 outputs that are added up at once */
#define OUTPUTS 256  /* that a thread takes at a time */
#define WORTH_THREADS 65536 /* multiplications below which threads cost more than they bring */

typedef struct {
    int type;
    int64_t rows, ins, outs, parts, most; /* most: ranks that a slot has room for */
    const int64_t *order;                 /* [rows]: places in x and y */
    const int32_t *slots, *ranks;         /* [rows]; [slots, parts], ranks_row apart */
    const int64_t *ends;                  /* [parts]: where the outputs of each end */
    const char *x, *a, *b;                /* a [slots, parts, most, ins], b [slots, most, outs] */
    char *y;
    int64_t x_row, y_row, ranks_row; /* strides, elements */
    float *inner;         /* [rows, parts, most] */
} Deltas;

INLINE void dots(const char *x, const char *a, int64_t ins, int count, float *out, const int type) {
    v16 sums[RANKS] = {{0}};
    const int64_t row = ins * size_of(type);
    for (int64_t i = 0; i < ins; i += 16) {
        const v16 piece = load_upto(x, i, ins - i, type);
        if (count == RANKS) {
            UNROLL for (int r = 0; r < RANKS; r++) sums[r] += piece * load_upto(a + r * row, i, ins - i, type);
        } else {
            for (int r = 0; r < count; r++) sums[r] += piece * load_upto(a + r * row, i, ins - i, type);
        }
    }
    for (int r = 0; r < count; r++) out[r] = sum16(sums[r]);
}

INLINE void shrink(const Deltas *d, int64_t row, int64_t part, const int type) {
    const int64_t slot = d->slots[row], rank = d->ranks[slot * d->ranks_row + part], size = size_of(type);
    const char *x = d->x + d->order[row] * d->x_row * size, *a = d->a + (slot * d->parts + part) * d->most * d->ins * size;
    float *inner = d->inner + (row * d->parts + part) * d->most;
    for (int64_t r = 0; r < rank; r += RANKS)
        dots(x, a + r * d->ins * size, d->ins, rank - r < RANKS ? (int)(rank - r) : RANKS, inner + r, type);
}

INLINE void add_vectors(char *y, const char *b, int64_t outs, int64_t at, int64_t left, const float *inner, int64_t rank, const int vectors, const int type) {
    v16 sums[VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) sums[v] = load_upto(y, at + 16 * v, left - 16 * v, type);
    for (int64_t r = 0; r < rank; r++) {
        const v16 factor = splat(inner[r]);
        UNROLL for (int v = 0; v < vectors; v++) sums[v] += factor * load_upto(b + r * outs * size_of(type), at + 16 * v, left - 16 * v, type);
    }
    UNROLL for (int v = 0; v < vectors; v++) store_upto(y, at + 16 * v, left - 16 * v, sums[v], type);
}

/* Outputs from .. to - 1 of one row. */
INLINE void expand(const Deltas *d, int64_t row, int64_t from, int64_t to, const int type) {
    const int64_t slot = d->slots[row], size = size_of(type);
    char *y = d->y + d->order[row] * d->y_row * size;
    const char *b = d->b + slot * d->most * d->outs * size;
    int64_t begin = 0;
    for (int64_t part = 0; part < d->parts; begin = d->ends[part++]) {
        const int64_t end = d->ends[part] < to ? d->ends[part] : to;
        const float *inner = d->inner + (row * d->parts + part) * d->most;
        const int64_t rank = d->ranks[slot * d->ranks_row + part];
        int64_t at = rank == 0 ? end : begin > from ? begin : from;
        for (; at + 16 * VECTORS <= end; at += 16 * VECTORS) add_vectors(y, b, d->outs, at, end - at, inner, rank, VECTORS, type);
        for (; at < end; at += 16) add_vectors(y, b, d->outs, at, end - at, inner, rank, 1, type);
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

void headrace_add_deltas(int type, int64_t rows, int64_t ins, int64_t outs, int64_t parts, int64_t most, const int64_t *order, const int32_t *slots,
                         const int32_t *ranks, int64_t ranks_row, const int64_t *ends, const char *x, int64_t x_row, const char *a, const char *b, char *y,
                         int64_t y_row, float *inner, int threads) {
    const Deltas d = {type, rows, ins, outs, parts, most, order, slots, ranks, ends, x, a, b, y, x_row, y_row, ranks_row, inner};
    const int64_t blocks = (outs + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * most * (ins * parts + outs) > WORTH_THREADS)
    {
#pragma omp for
        for (int64_t i = 0; i < rows * parts; i++) BY_TYPE(shrink(&d, i / parts, i % parts, type))
#pragma omp for
        for (int64_t i = 0; i < rows * blocks; i++) {
            const int64_t from = i % blocks * OUTPUTS, to = from + OUTPUTS < outs ? from + OUTPUTS : outs;
            BY_TYPE(expand(&d, i / blocks, from, to, type))
        }
    }
}
