/* Paged attention: packed queries over blocks of keys and values, decode and prefill alike, without copying the cache.
 *
 * What lives here: causal grouped-query attention with windows and soft caps. What may not: writing the cache (elementwise.c).
 *
 * A work item is (sequence, KV head, a few queries): the query heads of one KV head are rows of one small matrix, so a key is read once for
 * all of them. Keys are taken in CHUNKs at absolute multiples of CHUNK; in a chunk, scores are a product with the transposed keys (keys
 * side by side in vectors), then softmax goes online (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) and the values follow.
 * Within a SPLIT (absolute multiples again) the running maximum starts afresh and splits are merged in order, whoever computed them
 * (flash decoding). Keys and values in fewer bits (kv_codes.h) are multiplied as codes; a key's scale multiplies its score, and a value's the
 * weight it gets, so nothing is rounded on the way. A tree's queries share all chunks before its root; from there on each has its own keys, in
 * the lanes that they would have if its ancestors stood in a row. So a row's bits depend on neither the batch, nor the chunking of a prompt, nor the number of threads.
 */
#include "attention.h"
#include "common.h"
#include "kv_codes.h"

#define CHUNK 64      /* keys a softmax step */
#define SPLIT 1024    /* keys after which the sums start afresh */
#define MAX_ROWS 64   /* query rows a work item */
#define MAX_DIM 512
#define COLUMNS (MANY_REGISTERS ? 4 : 2) /* vectors whose sums, of four rows, are in registers at once */

/* Where a chunk's keys and values lie, and their scales; NULL for those that are never touched. */
typedef struct {
    const char *keys[CHUNK], *values[CHUNK], *key_scales[CHUNK], *value_scales[CHUNK];
} Lines;

/* What one thread works in. Rows are (query, head) pairs; `dim` is that of whole vectors. */
typedef struct {
    float queries[MAX_ROWS * MAX_DIM];                                    /* [row][dim], as bf16 pairs where those are multiplied directly */
    float keys[CHUNK * MAX_DIM] __attribute__((aligned(64)));             /* [dim or pair of dims][key] */
    float values[CHUNK * MAX_DIM] __attribute__((aligned(64)));           /* [key][dim] */
    float scores[MAX_ROWS * CHUNK] __attribute__((aligned(64)));          /* [row][key] */
    float sums[MAX_ROWS * MAX_DIM] __attribute__((aligned(64)));          /* [row][dim], of this split */
    float merged[MAX_ROWS * MAX_DIM] __attribute__((aligned(64)));        /* [row][dim], of the splits before */
    Lines now, next; /* of this chunk and of the one behind it */
    float key_scale[CHUNK] __attribute__((aligned(64))), key_low[CHUNK] __attribute__((aligned(64)));     /* of coded keys: scale, value of code 0 */
    float value_scale[CHUNK] __attribute__((aligned(64))), value_low[CHUNK] __attribute__((aligned(64))); /* and values */
    float query_sum[MAX_ROWS], lows[MAX_ROWS]; /* sum of a row's query; what the lows of values add to each of its sums */
    float top[MAX_ROWS], total[MAX_ROWS], merged_top[MAX_ROWS], merged_total[MAX_ROWS];
} Workspace;

static _Thread_local Workspace scratch; /* mapped at first touch, no larger than the widest head needs */

/* One work item: rows r = query * group + head of the queries first .. first + num_queries - 1 of a sequence. */
typedef struct {
    const int32_t *table;
    int64_t kv_head, token, position; /* packed index and position of the item's first query; of a tree's, the root's position */
    int64_t high; /* keys before this one are seen by some query */
    const int64_t *ancestors; /* of a tree's queries; else NULL */
    int64_t num_queries, group;
    int rows;
} Item;

INLINE int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

static int64_t position_of(const Item *it, int64_t query) {
    return it->ancestors ? it->position + __builtin_popcountll(it->ancestors[query]) - 1 : it->position + query;
}

/* ---- loading ---- */

/* Of the chunk at `chunk`; only keys low .. high - 1 are ever touched. `behind`: where those from a tree's root on lie, as bits; 0: in a row. */
static void find_lines(Lines *found, const Attention *a, const Item *it, int64_t chunk, int64_t low, int64_t high, uint64_t behind) {
    const int coded = is_coded(a->cache_type);
    const int64_t size = coded ? 1 : size_of(a->cache_type), line = row_bytes(a->dim, a->cache_type), scales = scale_bytes(a->cache_type);
    const int64_t k_line = coded ? line : a->k_token * size, v_line = coded ? line : a->v_token * size;
    int64_t index = chunk / a->block_size, offset = chunk % a->block_size;
    for (int64_t key = it->position; behind && key < chunk; key++) behind &= behind - 1; /* seen in chunks before */
    for (int j = 0; j < CHUNK; j++, offset++) {
        found->keys[j] = found->values[j] = found->key_scales[j] = found->value_scales[j] = NULL;
        if (offset == a->block_size) offset = 0, index++;
        if (behind && chunk + j >= it->position) {
            const int64_t place = it->position + __builtin_ctzll(behind);
            index = place / a->block_size, offset = place % a->block_size, behind &= behind - 1;
        }
        if (chunk + j < low || chunk + j >= high) continue;
        const char *keys = a->k_cache + (it->table[index] * a->k_block + it->kv_head * a->k_head) * size;
        const char *values = a->v_cache + (it->table[index] * a->v_block + it->kv_head * a->v_head) * size;
        found->keys[j] = keys + offset * k_line, found->values[j] = values + offset * v_line;
        found->key_scales[j] = keys + a->block_size * line + offset * scales, found->value_scales[j] = values + a->block_size * line + offset * scales;
    }
}

/* Of one chunk's keys or values; 0 for absent ones. A vector of them that lie in a row is read at once. */
INLINE void load_scales(const Attention *a, const Item *it, const char *const *found, const char *const *next, const float *shared, float *scale, float *low) {
    const int64_t own = scale_bytes(a->cache_type);
    const float all = shared ? shared[it->kv_head] : 1.0f;
    for (int first = 0; first < CHUNK; first += LANES) {
        if (own && next[first]) __builtin_prefetch(next[first]);
        if (own && found[first] && found[first + LANES - 1] == found[first] + (LANES - 1) * own) {
            uvec lanes;
            if (own == 4)
                memcpy(&lanes, found[first], sizeof lanes);
            else {
                hvec halves;
                memcpy(&halves, found[first], sizeof halves);
                lanes = __builtin_convertvector(halves, uvec);
            }
            *(vec *)(scale + first) = (vec)(lanes << 16);
            *(vec *)(low + first) = own == 4 ? (vec)(lanes & 0xFFFF0000u) : splat(0.0f);
            continue;
        }
        for (int j = first; j < first + LANES; j++) {
            scale[j] = !found[j] ? 0.0f : own ? read_bf16(found[j]) : all;
            low[j] = found[j] && own == 4 ? read_bf16(found[j] + 2) : 0.0f;
        }
    }
}

/* A square of 32-bit lanes, transposed. */
#if LANES == 16
INLINE void transpose(__m512i *r) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 16; i += 8)
        UNROLL for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xDD);
        }
    UNROLL for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xDD);
    }
}
#elif LANES == 8
INLINE void transpose(__m256i *r) {
    __m256i t[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int j = 0; j < 4; j++) {
        t[j] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x20);
        t[j + 4] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x31);
    }
    UNROLL for (int j = 0; j < 8; j++) r[j] = t[j];
}
#endif

/* LANES lines of `width` 32-bit lanes (NULL: zeros) into to[lane][CHUNK], the first columns. */
INLINE void transpose_lines(const float *const *lines, int64_t width, float *to) {
    int64_t d = 0;
#if LANES == 16
    for (; d + 16 <= width; d += 16) {
        __m512i r[16];
        UNROLL for (int j = 0; j < 16; j++) r[j] = lines[j] ? _mm512_loadu_si512(lines[j] + d) : _mm512_setzero_si512();
        transpose(r);
        UNROLL for (int j = 0; j < 16; j++) _mm512_store_si512(to + (d + j) * CHUNK, r[j]);
    }
#elif LANES == 8
    for (; d + 8 <= width; d += 8) {
        __m256i r[8];
        UNROLL for (int j = 0; j < 8; j++) r[j] = lines[j] ? _mm256_loadu_si256((const __m256i *)(lines[j] + d)) : _mm256_setzero_si256();
        transpose(r);
        UNROLL for (int j = 0; j < 8; j++) _mm256_store_si256((__m256i *)(to + (d + j) * CHUNK), r[j]);
    }
#endif
    for (; d < width; d++)
        for (int j = 0; j < LANES; j++) {
            float lane = 0.0f;
            if (lines[j]) memcpy(&lane, lines[j] + d, 4);
            to[d * CHUNK + j] = lane;
        }
}

/* Asks for a line of the next chunk while this one is worked on: blocks lie anywhere, so the machine cannot guess them. */
INLINE void fetch_line(const char *line, int64_t dim, const int type) {
    if (line)
        for (int64_t at = 0; at < row_bytes(dim, type); at += 64) __builtin_prefetch(line + at);
}

INLINE vec load_held(const char *line, int64_t at, int64_t left, const int type) {
    return is_coded(type) ? load_codes(line, at, left, type) : load_upto(line, at, left, type);
}

INLINE void put_key(float *to, int64_t at, vec x, const int pairs) {
    if (pairs)
        *(hvecu *)((uint16_t *)to + at) = narrow_bf16(x);
    else
        *(vecu *)(to + at) = x;
}

/* The chunk's keys into w->keys, side by side; absent ones are zeros. */
INLINE void load_keys(const Attention *a, Workspace *w, const int type, const int pairs) {
    const char *const *found = w->now.keys, *const *next = w->next.keys;
    float wide[LANES][MAX_DIM];
    for (int group = 0; group < CHUNK; group += LANES) {
        const float *lines[LANES];
        for (int j = 0; j < LANES; j++) {
            lines[j] = (const float *)found[group + j];
            fetch_line(next[group + j], a->dim, type);
            if (type == F32 || (pairs && !is_coded(type)) || !lines[j]) continue;
            int64_t d = 0;
            for (; d + LANES <= a->dim; d += LANES) put_key(wide[j], d, load_held(found[group + j], d, LANES, type), pairs);
            for (; d < a->dim; d += LANES) put_key(wide[j], d, load_held(found[group + j], d, a->dim - d, type), pairs);
            lines[j] = wide[j];
        }
        transpose_lines(lines, pairs ? a->dim / 2 : a->dim, w->keys + group);
    }
}

/* The chunk's values into w->values, as float32; absent ones are zeros (their weight is 0, and 0 times what lies there may be NaN). */
INLINE void load_values(const Attention *a, Workspace *w, int64_t dim, const int type) {
    const char *const *found = w->now.values, *const *next = w->next.values;
    for (int64_t j = 0; j < CHUNK; j++) {
        float *to = w->values + j * dim;
        int64_t d = 0;
        fetch_line(next[j], a->dim, type);
        if (found[j]) {
            for (; d + LANES <= a->dim; d += LANES) *(vec *)(to + d) = load_held(found[j], d, LANES, type);
            for (; d < dim; d += LANES) *(vec *)(to + d) = load_held(found[j], d, a->dim - d, type);
        }
        for (; d < dim; d += LANES) *(vec *)(to + d) = splat(0.0f);
    }
}

INLINE void load_queries(const Attention *a, const Item *it, Workspace *w, int64_t dim, const int pairs) {
    const int64_t size = size_of(a->type);
    for (int r = 0; r < it->rows; r++) {
        const int64_t token = it->token + r / it->group, head = it->kv_head * it->group + r % it->group;
        const char *q = a->q + (token * a->q_row + head * a->q_head) * size;
        if (pairs)
            memcpy(w->queries + r * dim, q, a->dim * size);
        else
            for (int64_t d = 0; d < a->dim; d += LANES) *(vecu *)(w->queries + r * dim + d) = load_upto(q, d, a->dim - d, a->type);
        vec sum = splat(0.0f);
        if (a->cache_type == U4)
            for (int64_t d = 0; d < a->dim; d += LANES) sum += load_upto(q, d, a->dim - d, a->type);
        w->query_sum[r] = vsum(sum);
    }
}

/* ---- arithmetic ---- */

INLINE vec multiply_add(vec sum, float q, vec k, const int pairs) {
#if HAVE_BF16_DOT
    if (pairs) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)splat(q), (__m512bh)k);
#endif
    (void)pairs;
    return sum + q * k;
}

/* scores[row][key] = q . k for `rows` rows and COLUMNS vectors of the transposed keys. */
INLINE void score_columns(const float *queries, const float *keys, float *scores, int64_t dim, int64_t width, const int rows, const int pairs) {
    vec sums[4][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) sums[r][c] = splat(0.0f);
    for (int64_t d = 0; d < width; d++) {
        vec k[COLUMNS];
        UNROLL for (int c = 0; c < COLUMNS; c++) k[c] = *(const vec *)(keys + d * CHUNK + c * LANES);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < COLUMNS; c++) sums[r][c] = multiply_add(sums[r][c], queries[r * dim + d], k[c], pairs);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) *(vec *)(scores + r * CHUNK + c * LANES) = sums[r][c];
}

INLINE void score_rows(const float *queries, const float *keys, float *scores, int64_t dim, int64_t width, const int rows, const int pairs) {
    for (int key = 0; key < CHUNK; key += COLUMNS * LANES) score_columns(queries, keys + key, scores + key, dim, width, rows, pairs);
}

/* sums[row][d] += weights[row][key] * values[key][d], for `cols` vectors of d. */
INLINE void weigh_rows(const float *weights, const float *values, float *sums, int64_t dim, const int rows, const int cols) {
    vec acc[4][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < cols; c++) acc[r][c] = *(const vec *)(sums + r * dim + c * LANES);
    for (int j = 0; j < CHUNK; j++) {
        vec v[COLUMNS];
        UNROLL for (int c = 0; c < cols; c++) v[c] = *(const vec *)(values + j * dim + c * LANES);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < cols; c++) acc[r][c] += weights[r * CHUNK + j] * v[c];
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < cols; c++) *(vec *)(sums + r * dim + c * LANES) = acc[r][c];
}

INLINE void weigh(const float *weights, const float *values, float *sums, int64_t dim, const int rows) {
    int64_t d = 0;
    for (; d + COLUMNS * LANES <= dim; d += COLUMNS * LANES) weigh_rows(weights, values + d, sums + d, dim, rows, COLUMNS);
    for (; d < dim; d += LANES) weigh_rows(weights, values + d, sums + d, dim, rows, 1);
}

static __attribute__((noinline)) void score(const float *queries, const float *keys, float *scores, int64_t dim, int64_t width, int rows, int pairs) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) {
        if (pairs)
            score_rows(queries + r * dim, keys, scores + r * CHUNK, dim, width, 4, 1);
        else
            score_rows(queries + r * dim, keys, scores + r * CHUNK, dim, width, 4, 0);
    }
    for (; r < rows; r++) {
        if (pairs)
            score_rows(queries + r * dim, keys, scores + r * CHUNK, dim, width, 1, 1);
        else
            score_rows(queries + r * dim, keys, scores + r * CHUNK, dim, width, 1, 0);
    }
}

/* Scales, caps and masks a row's scores, turns them into weights and moves the row's maximum and sums along. */
static __attribute__((noinline)) void soften_row(const Attention *a, Workspace *w, int r, int64_t position, int64_t chunk, int64_t dim) {
    float *scores = w->scores + r * CHUNK;
    const int64_t last = position - chunk, first = a->window > 0 ? last - a->window + 1 : 0; /* keys of this chunk that the row sees */
    const int upto = last > CHUNK ? CHUNK : (int)last, from = first > CHUNK ? CHUNK : first < 0 ? 0 : (int)first;
    const int coded = is_coded(a->cache_type);
    vec s[CHUNK / LANES], best = splat(-INFINITY), sum = splat(0.0f), low = splat(0.0f);
    UNROLL for (int c = 0; c < CHUNK / LANES; c++) {
        s[c] = *(vec *)(scores + c * LANES);
        if (coded) s[c] = s[c] * *(vec *)(w->key_scale + c * LANES) + *(vec *)(w->key_low + c * LANES) * w->query_sum[r];
        s[c] *= a->scale;
        if (a->soft_cap > 0) s[c] = vtanh(s[c] / a->soft_cap) * a->soft_cap;
        const ivec key = lane_numbers() + c * LANES;
        s[c] = pick((key <= upto) & (key >= from), s[c], splat(-INFINITY));
        best = vmax(s[c], best);
    }
    const float before = w->top[r], highest = vmost(best), top = highest > before ? highest : before;
    if (top == -INFINITY) { /* nothing seen so far */
        memset(scores, 0, CHUNK * sizeof(float));
        return;
    }
    UNROLL for (int c = 0; c < CHUNK / LANES; c++) {
        s[c] = vexp(s[c] - top);
        *(vec *)(scores + c * LANES) = coded ? s[c] * *(vec *)(w->value_scale + c * LANES) : s[c];
        if (coded) low += s[c] * *(vec *)(w->value_low + c * LANES);
        sum += s[c];
    }
    const float shrink = before == -INFINITY ? 0.0f : expf(before - top);
    w->lows[r] = w->lows[r] * shrink + vsum(low);
    w->total[r] = w->total[r] * shrink + vsum(sum);
    w->top[r] = top;
    if (shrink != 1.0f)
        for (int64_t d = 0; d < dim; d += LANES) *(vec *)(w->sums + r * dim + d) *= shrink;
}

INLINE void load_typed(const Attention *a, Workspace *w, int64_t dim, const int type, int pairs) {
    if (pairs && type != F32 && type != F16)
        load_keys(a, w, type, 1);
    else
        load_keys(a, w, type, 0);
    load_values(a, w, dim, type);
}

static __attribute__((noinline)) void load_chunk(const Attention *a, const Item *it, Workspace *w, int pairs) {
    const int64_t dim = padded(a->dim);
    if (is_coded(a->cache_type)) {
        load_scales(a, it, w->now.key_scales, w->next.key_scales, a->k_scales, w->key_scale, w->key_low);
        load_scales(a, it, w->now.value_scales, w->next.value_scales, a->v_scales, w->value_scale, w->value_low);
    }
    switch (a->cache_type) {
        case F32: load_typed(a, w, dim, F32, pairs); break;
        case F16: load_typed(a, w, dim, F16, pairs); break;
        case BF16: load_typed(a, w, dim, BF16, pairs); break;
        case I8: load_typed(a, w, dim, I8, pairs); break;
        case E4M3: load_typed(a, w, dim, E4M3, pairs); break;
        case E5M2: load_typed(a, w, dim, E5M2, pairs); break;
        default: load_typed(a, w, dim, U4, pairs);
    }
}

/* The chunk that is found, by rows first .. end - 1. */
static void attend_rows(const Attention *a, const Item *it, Workspace *w, int64_t chunk, int pairs, int first, int end) {
    const int64_t dim = padded(a->dim);
    load_chunk(a, it, w, pairs);
    score(w->queries + first * dim, w->keys, w->scores + first * CHUNK, dim, pairs ? a->dim / 2 : a->dim, end - first, pairs);
    int r = first;
    for (; r < end; r++) soften_row(a, w, r, position_of(it, r / it->group), chunk, dim);
    for (r = first; r + 4 <= end; r += 4) weigh(w->scores + r * CHUNK, w->values, w->sums + r * dim, dim, 4);
    for (; r < end; r++) weigh(w->scores + r * CHUNK, w->values, w->sums + r * dim, dim, 1);
}

/* A chunk at or behind a tree's root: each query sees other keys. */
static void attend_branches(const Attention *a, const Item *it, Workspace *w, int64_t chunk, int pairs, int64_t low) {
    for (int64_t query = 0; query < it->num_queries; query++) {
        const int64_t position = position_of(it, query);
        if (position < chunk) continue;
        find_lines(&w->now, a, it, chunk, low, position + 1, (uint64_t)it->ancestors[query]);
        attend_rows(a, it, w, chunk, pairs, (int)(query * it->group), (int)((query + 1) * it->group));
    }
}

/* ---- splits ---- */

static void clear_sums(Workspace *w, int rows, int64_t dim) {
    memset(w->sums, 0, rows * dim * sizeof(float));
    for (int r = 0; r < rows; r++) w->top[r] = -INFINITY, w->total[r] = w->lows[r] = 0.0f;
}

/* into += from: both are sums relative to their own maximum. */
static void merge_row(float *into, float *into_top, float *into_total, const float *from, float from_top, float from_total, int64_t dim) {
    if (from_top == -INFINITY) return;
    const float top = from_top > *into_top ? from_top : *into_top;
    const float keep = *into_top == -INFINITY ? 0.0f : expf(*into_top - top), add = expf(from_top - top);
    for (int64_t d = 0; d < dim; d++) into[d] = into[d] * keep + from[d] * add;
    *into_total = *into_total * keep + from_total * add;
    *into_top = top;
}

static int can_pair(const Attention *a) {
    return HAVE_BF16_DOT && a->type == BF16 && (a->cache_type == BF16 || is_coded(a->cache_type)) && a->dim % 2 == 0;
}

/* Keys of one split into w->sums, w->top, w->total; low .. high - 1 is what the item's queries may see at all. */
static void attend_split(const Attention *a, const Item *it, Workspace *w, int64_t split, int64_t low, int64_t high) {
    const int64_t dim = padded(a->dim), end = split + SPLIT < high ? split + SPLIT : high;
    int64_t chunk = split > low ? split : low / CHUNK * CHUNK;
    clear_sums(w, it->rows, dim);
    find_lines(&w->now, a, it, chunk, low, high, 0);
    for (; chunk < end; chunk += CHUNK) {
        find_lines(&w->next, a, it, chunk + CHUNK, low, high, 0);
        if (it->ancestors && chunk + CHUNK > it->position)
            attend_branches(a, it, w, chunk, can_pair(a), low);
        else
            attend_rows(a, it, w, chunk, can_pair(a), 0, it->rows);
        w->now = w->next;
    }
    if (a->cache_type == U4)
        for (int r = 0; r < it->rows; r++)
            for (int64_t d = 0; d < dim; d += LANES) *(vec *)(w->sums + r * dim + d) += w->lows[r];
}

INLINE int64_t first_key(const Attention *a, int64_t position) {
    const int64_t first = a->window > 0 ? position - a->window + 1 : 0;
    return first > 0 ? first : 0;
}

static void store_rows(const Attention *a, const Item *it, const float *sums, const float *top, const float *total) {
    const int64_t dim = padded(a->dim), size = size_of(a->type);
    for (int r = 0; r < it->rows; r++) {
        const int64_t token = it->token + r / it->group, head = it->kv_head * it->group + r % it->group;
        char *out = a->out + (token * a->q_heads + head) * a->dim * size;
        const float norm = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
        if (a->lse) a->lse[token * a->q_heads + head] = total[r] > 0.0f ? top[r] + logf(total[r]) : -INFINITY;
        for (int64_t d = 0; d < a->dim; d += LANES) store_upto(out, d, a->dim - d, *(const vecu *)(sums + r * dim + d) * norm, a->type);
    }
}

static void attend_item(const Attention *a, const Item *it, Workspace *w) {
    const int64_t dim = padded(a->dim);
    const int64_t low = first_key(a, it->position), high = it->high; /* keys anyone in the item sees */
    load_queries(a, it, w, dim, can_pair(a));
    memset(w->merged, 0, it->rows * dim * sizeof(float));
    for (int r = 0; r < it->rows; r++) w->merged_top[r] = -INFINITY, w->merged_total[r] = 0.0f;
    for (int64_t split = low / SPLIT * SPLIT; split < high; split += SPLIT) {
        attend_split(a, it, w, split, low, high);
        for (int r = 0; r < it->rows; r++)
            merge_row(w->merged + r * dim, w->merged_top + r, w->merged_total + r, w->sums + r * dim, w->top[r], w->total[r], dim);
    }
    store_rows(a, it, w->merged, w->merged_top, w->merged_total);
}

/* ---- work ---- */

/* Work item `index` of (sequence, tile, KV head); false where a sequence has fewer tiles than the longest. */
static int make_item(const Attention *a, int64_t index, int64_t tiles, int64_t queries, Item *it) {
    const int64_t sequence = index / (tiles * a->kv_heads), tile = index / a->kv_heads % tiles;
    const int64_t begin = a->query_start[sequence], length = a->query_start[sequence + 1] - begin, first = tile * queries;
    if (first >= length) return 0;
    it->table = a->table + sequence * a->table_row;
    it->kv_head = index % a->kv_heads;
    it->token = begin + first;
    it->position = a->context_len[sequence] - length + first;
    it->num_queries = length - first < queries ? length - first : queries;
    it->group = a->q_heads / a->kv_heads;
    it->rows = (int)(it->num_queries * it->group);
    it->ancestors = a->ancestors && a->ancestors[it->token] ? a->ancestors + it->token : NULL;
    if (it->ancestors) it->position = a->tree_first[sequence];
    it->high = it->position + it->num_queries;
    for (int64_t query = 0; it->ancestors && query < it->num_queries; query++) {
        const int64_t end = position_of(it, query) + 1;
        it->high = query && it->high > end ? it->high : end;
    }
    return 1;
}

static int64_t queries_an_item(const Attention *a) {
    const int64_t fit = MAX_ROWS / (a->q_heads / a->kv_heads);
    return fit < a->max_query_len ? fit : a->max_query_len;
}

/* Few items and long contexts (one long sequence, few KV heads): the splits of an item are spread over the threads, then merged in order. */
static int attend_by_splits(const Attention *a, int64_t items, int64_t tiles, int64_t queries, int threads) {
    const int64_t dim = padded(a->dim), splits = (a->max_context_len + SPLIT - 1) / SPLIT;
    const int64_t row_size = dim + 2, item_size = queries * (a->q_heads / a->kv_heads) * row_size;
    float *partial = malloc(items * splits * item_size * sizeof(float));
    if (partial == NULL) return 1;
#pragma omp parallel num_threads(threads)
    {
        Workspace *w = &scratch;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < items * splits; i++) {
            Item it;
            if (!make_item(a, i / splits, tiles, queries, &it)) continue;
            const int64_t low = first_key(a, it.position), high = it.high, split = i % splits * SPLIT;
            float *to = partial + i * item_size;
            load_queries(a, &it, w, dim, can_pair(a));
            clear_sums(w, it.rows, dim);
            if (split + SPLIT > low && split < high) attend_split(a, &it, w, split, low, high);
            for (int r = 0; r < it.rows; r++, to += row_size) {
                to[0] = w->top[r], to[1] = w->total[r];
                memcpy(to + 2, w->sums + r * dim, dim * sizeof(float));
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < items; i++) {
            Item it;
            if (!make_item(a, i, tiles, queries, &it)) continue;
            clear_sums(w, it.rows, dim);
            for (int64_t s = 0; s < splits; s++) {
                const float *from = partial + (i * splits + s) * item_size;
                for (int r = 0; r < it.rows; r++, from += row_size)
                    merge_row(w->sums + r * dim, w->top + r, w->total + r, from + 2, from[0], from[1], dim);
            }
            store_rows(a, &it, w->sums, w->top, w->total);
        }
    }
    free(partial);
    return 0;
}

static void attend_by_items(const Attention *a, int64_t items, int64_t tiles, int64_t queries, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && items > 1)
    {
        Workspace *w = &scratch;
#pragma omp for schedule(dynamic)
        for (int64_t i = items - 1; i >= 0; i--) { /* late tiles see more keys: the long ones first */
            Item it;
            if (make_item(a, i, tiles, queries, &it)) attend_item(a, &it, w);
        }
    }
}

/* Tokens behind the last query and queries that see nothing get zeros. Returns 1 if memory ran out. */
int headrace_attention(const Attention *a, int threads) {
    const int64_t covered = a->query_start[a->sequences], line = a->q_heads * a->dim * size_of(a->type);
    if (covered < a->tokens) memset(a->out + covered * line, 0, (a->tokens - covered) * line);
    for (int64_t i = covered * a->q_heads; a->lse && i < a->tokens * a->q_heads; i++) a->lse[i] = -INFINITY;
    if (a->max_query_len < 1 || a->sequences < 1) return 0;
    const int64_t queries = queries_an_item(a), tiles = (a->max_query_len + queries - 1) / queries, items = a->sequences * tiles * a->kv_heads;
    if (items < 2 * threads && a->max_context_len > SPLIT && threads > 1) return attend_by_splits(a, items, tiles, queries, threads);
    attend_by_items(a, items, tiles, queries, threads);
    return 0;
}
