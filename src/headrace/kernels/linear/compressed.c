/* Products with weights of 12 bits that are bfloat16 without loss: y[M, N] = x[M, K] . w[N, K]^T (+ bias).
 *
 * What lives here: that form of a weight, the way into it and out of it, products that read it. What may not: plain weights (linear.c).
 *
 * Eight of a bfloat16's bits are its exponent, of which weights use few: nearly all of those near each other are of fifteen. So a panel of 16
 * rows of w keeps the largest of these, and each weight 4 bits that say how far its own is below, 15 that it is 0 (a zero, a denormal); sign
 * and fraction stay. 64 weights, 4 elements of each row, are a group of 96 bytes: sign and fraction of each (the sign lowest), then the 4 bits
 * of the first 32 in the lower halves of 32 bytes and of the others in the upper ones. A group with any other exponent is wide: it has
 * the lower halves of exponents in place of distances, and the upper halves elsewhere, laid out alike. (DFloat11, Zhang et al. 2025, spends 11
 * bits by a Huffman code, which cannot be read from the middle.)
 *
 * A group becomes two vectors in which each lane has two elements of one row of w, so a sum a row of x runs over K in order and is never
 * folded: the bits of a row do not depend on how many there are, nor on threads. Weights stream once, front to back; up to 16 rows of x
 * meet them in registers, more in the cache, where PIECE elements of K are unpacked for all of them.
 */
#include "common.h"
#include "product.h"

#define COLUMNS 16 /* rows of w in a panel */
#define DEPTH 4    /* elements of K in a group */
#define GROUP (COLUMNS * DEPTH)
#define GROUP_BYTES 96
#define WIDE_BYTES 32
#define MOST 16    /* rows of x at a time: as many sums as registers hold */
#define PIECE 256  /* elements of K unpacked for more rows than that */
#define BLOCK 256  /* rows of x that share what was unpacked */
#define TOGETHER 2 /* panels that share a reading of x then */

typedef struct {
    const uint8_t *panels;     /* [panels, K / DEPTH, GROUP_BYTES] */
    const uint8_t *bases;      /* [panels]: the largest of each one's fifteen exponents */
    const int32_t *first_wide; /* [panels + 1]: where a panel's wide groups begin in the next two */
    const int32_t *wide_at;    /* which group of its panel each one is, ascending */
    const uint8_t *wide;       /* [wide groups, WIDE_BYTES] */
} Compressed;

/* ---- into it ---- */

INLINE int exponent(uint16_t bits) { return bits >> 7 & 255; }

/* A group as two vectors hold it: of each row of w elements 0 and 1, then of each 2 and 3. Rows beyond the last are zeros. */
static void gather(uint16_t *group, const uint16_t *w, int64_t w_row, int64_t rows) {
    for (int64_t c = 0; c < COLUMNS; c++)
        for (int i = 0; i < DEPTH; i++) group[i / 2 * 32 + c * 2 + i % 2] = c < rows ? w[c * w_row + i] : 0;
}

INLINE int is_wide(const uint16_t *group, int base) {
    int far = 0;
    for (int i = 0; i < GROUP; i++) far |= (exponent(group[i]) != 0) & ((unsigned)(base - exponent(group[i])) > 14);
    return far;
}

/* The exponent from which on down to 14 below most of a panel's are. */
static int best_base(const uint16_t *w, int64_t w_row, int64_t rows, int64_t k) {
    int64_t counts[256] = {0}, here = 0, most = -1;
    int base = 0;
    for (int64_t c = 0; c < rows; c++)
        for (int64_t i = 0; i < k; i++) counts[exponent(w[c * w_row + i])]++;
    for (int e = 1; e < 256; e++) {
        here += counts[e] - (e > 15 ? counts[e - 15] : 0);
        if (here > most) most = here, base = e;
    }
    return base;
}

INLINE void pack_halves(uint8_t *out, const uint8_t *values) {
    for (int i = 0; i < GROUP / 2; i++) out[i] = (uint8_t)(values[i] | values[i + GROUP / 2] << 4);
}

INLINE void pack_group(uint8_t *out, const uint16_t *group, int base, int wide) {
    uint8_t codes[GROUP];
    for (int i = 0; i < GROUP; i++) {
        const int e = exponent(group[i]);
        out[i] = (uint8_t)((group[i] & 127) << 1 | group[i] >> 15);
        codes[i] = (uint8_t)(wide ? e & 15 : e ? base - e : 15);
    }
    pack_halves(out + GROUP, codes);
}

/* Panels and bases of w [n, k], and which groups are wide: wide_groups [panels, k / DEPTH], 0 or 1. */
void headrace_compress(int64_t n, int64_t k, const uint16_t *w, int64_t w_row, uint8_t *panels, uint8_t *bases, uint8_t *wide_groups, int threads) {
    const int64_t groups = k / DEPTH, count = (n + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < count; panel++) {
        const int64_t rows = n - panel * COLUMNS < COLUMNS ? n - panel * COLUMNS : COLUMNS;
        const uint16_t *from = w + panel * COLUMNS * w_row;
        const int base = best_base(from, w_row, rows, k);
        uint16_t group[GROUP];
        bases[panel] = (uint8_t)base;
        for (int64_t g = 0; g < groups; g++) {
            gather(group, from + g * DEPTH, w_row, rows);
            wide_groups[panel * groups + g] = (uint8_t)is_wide(group, base);
            pack_group(panels + (panel * groups + g) * GROUP_BYTES, group, base, wide_groups[panel * groups + g]);
        }
    }
}

/* The upper halves of the exponents of `count` wide groups, numbered through all panels: wide [count, WIDE_BYTES]. */
void headrace_compress_wide(int64_t count, int64_t n, int64_t k, const uint16_t *w, int64_t w_row, const int64_t *groups, uint8_t *wide) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t panel = groups[i] / (k / DEPTH), at = groups[i] % (k / DEPTH) * DEPTH, rows = n - panel * COLUMNS;
        uint16_t group[GROUP];
        uint8_t upper[GROUP];
        gather(group, w + panel * COLUMNS * w_row + at, w_row, rows < COLUMNS ? rows : COLUMNS);
        for (int j = 0; j < GROUP; j++) upper[j] = (uint8_t)(exponent(group[j]) >> 4);
        pack_halves(wide + i * WIDE_BYTES, upper);
    }
}

/* ---- out of it, and products ---- */

#if HAVE_BF16_DOT

/* A panel on the way: where its groups are, what its 4 bits mean, which group is the next wide one. */
typedef struct {
    const uint8_t *at, *wide;
    const int32_t *wide_at, *wide_end;
    __m512i exponents; /* in place, by the 4 bits; twice, so that the bit above them does not matter */
} Reader;

INLINE Reader read_panel(const Compressed *w, int64_t panel, int64_t k) {
    const __m512i below = _mm512_and_si512(_mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10,
                                                            9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                           _mm512_set1_epi16(15));
    const __m512i exponents = _mm512_sub_epi16(_mm512_set1_epi16(w->bases[panel]), below);
    const int32_t first = w->first_wide[panel];
    return (Reader){w->panels + panel * (k / DEPTH) * GROUP_BYTES, w->wide + (int64_t)first * WIDE_BYTES, w->wide_at + first,
                    w->wide_at + w->first_wide[panel + 1], _mm512_maskz_slli_epi16(0x7FFF7FFF, exponents, 7)};
}

INLINE __m512i widen(const uint8_t *from) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from)); }

INLINE __m512i join(__m512i signs_and_fractions, __m512i exponents) {
#if defined(__AVX512VBMI2__)
    return _mm512_or_si512(_mm512_shrdi_epi16(signs_and_fractions, signs_and_fractions, 1), exponents);
#else
    return _mm512_or_si512(_mm512_or_si512(_mm512_srli_epi16(signs_and_fractions, 1), _mm512_slli_epi16(signs_and_fractions, 15)), exponents);
#endif
}

/* Both vectors of group g. */
INLINE void next_group(Reader *reader, int32_t g, __m512i *first, __m512i *second) {
    const uint8_t *at = reader->at;
    const __m512i codes = widen(at + GROUP), low = _mm512_set1_epi16(15);
    __m512i here = _mm512_permutexvar_epi16(codes, reader->exponents);
    __m512i there = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), reader->exponents);
    if (__builtin_expect(reader->wide_at < reader->wide_end && *reader->wide_at == g, 0)) {
        const __m512i upper = widen(reader->wide);
        here = _mm512_or_si512(_mm512_slli_epi16(_mm512_and_si512(upper, low), 11), _mm512_slli_epi16(_mm512_and_si512(codes, low), 7));
        there = _mm512_or_si512(_mm512_slli_epi16(_mm512_srli_epi16(upper, 4), 11), _mm512_slli_epi16(_mm512_srli_epi16(codes, 4), 7));
        reader->wide += WIDE_BYTES, reader->wide_at++;
    }
    *first = join(widen(at), here);
    *second = join(widen(at + GROUP / 2), there);
    reader->at = at + GROUP_BYTES;
}

INLINE vec step(vec sum, const int32_t *x, __m512i w) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*x), (__m512bh)w);
}

INLINE void store_columns(const Product *p, int64_t row, int64_t n0, vec out) {
    const int cols = p->n - n0 < COLUMNS ? (int)(p->n - n0) : COLUMNS;
    if (p->bias) out += load_some(p->bias, n0, cols, BF16);
    store_some(p->y, row * p->y_row + n0, cols, out, BF16);
}

/* A panel for `rows` rows of x, of which p->m are there. */
INLINE void panel_once(const Product *p, const Compressed *w, const int32_t *x, int64_t panel, const int rows) {
    Reader reader = read_panel(w, panel, p->k);
    vec sums[MOST];
    UNROLL for (int r = 0; r < rows; r++) sums[r] = splat(0.0f);
    for (int32_t g = 0; g < p->k / DEPTH; g++, x += 2 * rows) {
        __m512i first, second;
        next_group(&reader, g, &first, &second);
        UNROLL for (int r = 0; r < rows; r++) sums[r] = step(sums[r], x + r, first);
        UNROLL for (int r = 0; r < rows; r++) sums[r] = step(sums[r], x + rows + r, second);
    }
    UNROLL for (int r = 0; r < rows; r++)
        if (r < p->m) store_columns(p, r, panel * COLUMNS, sums[r]);
}

#define ONCE(rows) \
    static __attribute__((noinline)) void once##rows(const Product *p, const Compressed *w, const int32_t *x, int64_t panel) { \
        panel_once(p, w, x, panel, rows); \
    }
ONCE(1) ONCE(2) ONCE(4) ONCE(8) ONCE(12) ONCE(16)

INLINE void unpack(uint16_t *out, Reader *reader, int64_t k0, int64_t count) {
    for (int64_t i = 0; i < count / DEPTH; i++) {
        __m512i first, second;
        next_group(reader, (int32_t)(k0 / DEPTH + i), &first, &second);
        _mm512_store_si512(out + i * GROUP, first);
        _mm512_store_si512(out + i * GROUP + GROUP / 2, second);
    }
}

/* MOST rows of x go on over what was unpacked of a panel. */
static __attribute__((noinline)) void go_on(vec *kept, const int32_t *x, const uint16_t *w, int64_t pairs) {
    vec sums[MOST];
    UNROLL for (int r = 0; r < MOST; r++) sums[r] = kept[r];
    for (int64_t i = 0; i < pairs; i++, x += MOST, w += 2 * COLUMNS) {
        const __m512i here = _mm512_load_si512(w);
        UNROLL for (int r = 0; r < MOST; r++) sums[r] = step(sums[r], x + r, here);
    }
    UNROLL for (int r = 0; r < MOST; r++) kept[r] = sums[r];
}

/* Up to TOGETHER panels for rows m0 .. m0 + rows - 1 of x (multiples of MOST), piece by piece of K: what is unpacked serves all these rows. */
static void panels_in_pieces(const Product *p, const Compressed *w, const int32_t *x, int64_t panel, int64_t panels, int64_t m0, int64_t rows) {
    Reader readers[TOGETHER] = {0};
    vec sums[TOGETHER][BLOCK];
    uint16_t unpacked[TOGETHER][COLUMNS * PIECE] __attribute__((aligned(64)));
    for (int64_t i = 0; i < panels; i++) {
        readers[i] = read_panel(w, panel + i, p->k);
        memset(sums[i], 0, rows * sizeof **sums);
    }
    for (int64_t k0 = 0; k0 < p->k; k0 += PIECE) {
        const int64_t here = p->k - k0 < PIECE ? p->k - k0 : PIECE;
        for (int64_t i = 0; i < panels; i++) unpack(unpacked[i], &readers[i], k0, here);
        for (int64_t m = 0; m < rows; m += MOST)
            for (int64_t i = 0; i < panels; i++) go_on(sums[i] + m, x + (m0 + m) * (p->k / 2) + k0 / 2 * MOST, unpacked[i], here / 2);
    }
    for (int64_t i = 0; i < panels; i++)
        for (int64_t r = 0; r < rows && m0 + r < p->m; r++) store_columns(p, m0 + r, (panel + i) * COLUMNS, sums[i][r]);
}

static void one_panel(const Product *p, const Compressed *w, const int32_t *x, int64_t width, int64_t panel) {
    switch (width) {
        case 1: once1(p, w, x, panel); break;
        case 2: once2(p, w, x, panel); break;
        case 4: once4(p, w, x, panel); break;
        case 8: once8(p, w, x, panel); break;
        case 12: once12(p, w, x, panel); break;
        default: once16(p, w, x, panel);
    }
}

static void some_panels(const Product *p, const Compressed *w, const int32_t *x, int64_t width, int64_t panel, int64_t panels) {
    if (width > MOST)
        for (int64_t m = 0; m < width; m += BLOCK) panels_in_pieces(p, w, x, panel, panels, m, width - m < BLOCK ? width - m : BLOCK);
    else
        for (int64_t i = panel; i < panel + panels; i++) one_panel(p, w, x, width, i);
}

#endif

/* bfloat16 rows from .. to - 1 of w (from: a multiple of COLUMNS), as they were: out [to - from, k]. */
void headrace_decompress(const Compressed *w, int64_t k, int64_t from, int64_t to, uint16_t *out, int threads) {
#if HAVE_BF16_DOT
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = from; row < to; row += COLUMNS) {
        Reader reader = read_panel(w, row / COLUMNS, k);
        const int64_t rows = to - row < COLUMNS ? to - row : COLUMNS;
        uint16_t group[GROUP] __attribute__((aligned(64)));
        for (int64_t at = 0; at < k; at += DEPTH) {
            unpack(group, &reader, at, DEPTH);
            for (int64_t c = 0; c < rows; c++) {
                memcpy(out + (row - from + c) * k + at, group + 2 * c, 4);
                memcpy(out + (row - from + c) * k + at + 2, group + GROUP / 2 + 2 * c, 4);
            }
        }
    }
#else
    (void)w, (void)k, (void)from, (void)to, (void)out, (void)threads;
#endif
}

/* Whether there are products over this form for this processor. */
int headrace_has_compressed(void) { return HAVE_BF16_DOT; }

/* x: pairs of elements, [k / 2, width] for a width of 1, 2, 4, 8, 12 or 16, [width / 16, k / 2, 16] for a multiple of it; m rows are there. */
void headrace_compressed_linear(const Compressed *w, int64_t m, int64_t n, int64_t k, const int32_t *x, int64_t width, const char *bias, char *y,
                                int64_t y_row, int threads) {
#if HAVE_BF16_DOT
    const Product p = {BF16, m, n, k, NULL, NULL, bias, y, 0, 0, y_row, 1};
    const int64_t panels = (n + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && panels > TOGETHER && m * n * k > 65536)
    for (int64_t i = 0; i < panels; i += TOGETHER) some_panels(&p, w, x, width, i, panels - i < TOGETHER ? panels - i : TOGETHER);
#else
    (void)w, (void)m, (void)n, (void)k, (void)x, (void)width, (void)bias, (void)y, (void)y_row, (void)threads;
#endif
}
