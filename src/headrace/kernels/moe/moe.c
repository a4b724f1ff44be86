/* The sparse feed-forward for few tokens an expert: routing, the chosen experts' products, the weighted sum.
 *
 * What lives here: that one operation. What may not: the product itself (linear.c), dense feed-forwards.
 *
 * A pair is (token, one of its experts). Pairs are sorted by expert, so each chosen expert's weights are read once, and others not at all.
 * A token's sum runs over its experts in order of preference: its bits do not depend on the other tokens.
 */
#include "common.h"
#include "product.h"

typedef struct {
    int type, activation;
    int64_t tokens, hidden, inner, experts, top_k;
    const char *x, *router, *gate_up, *down; /* [tokens, hidden], [tokens, experts], [held, 2 inner, hidden], [held, hidden, inner] */
    char *out;                               /* [tokens, hidden] */
    int64_t x_row, router_row;               /* strides, elements; the others are contiguous */
    int renormalize, invariant;
    const int32_t *places; /* [turns, experts]: of a token t, where in the weights each expert of its turn, t mod turns, lies; -1: on another rank; NULL: in order */
    int64_t turns, held;   /* held: experts in the weights */
} Sparse;

typedef struct {
    int64_t *expert, *place, *start, *active; /* of pair token * top_k + j: its expert and its place when sorted; first place of each expert */
    int64_t num_active;
    float *weight, *scores;         /* of each pair; scratch for one token's probabilities */
    char *rows, *wide, *gated, *answers; /* sorted pairs x hidden, x 2 inner, x inner, x hidden; rows and gated as products take them */
} Routing;

INLINE float element(const char *base, int64_t at, int type) {
    vec one = load_some(base, at, 1, type);
    return one[0];
}

/* The top_k experts of a token, most probable first (the lower index of equals), with softmax weights over all experts. */
static void choose_experts(const Sparse *a, Routing *r, int64_t token) {
    const char *logits = a->router + token * a->router_row * size_of(a->type);
    float top = -INFINITY, total = 0.0f, kept = 0.0f;
    for (int64_t e = 0; e < a->experts; e++) {
        r->scores[e] = element(logits, e, a->type);
        top = r->scores[e] > top ? r->scores[e] : top;
    }
    for (int64_t e = 0; e < a->experts; e++) total += r->scores[e] = expf(r->scores[e] - top);
    for (int64_t j = token * a->top_k; j < (token + 1) * a->top_k; j++) {
        int64_t best = -1;
        for (int64_t e = 0; e < a->experts; e++)
            if (r->scores[e] >= 0.0f && (best < 0 || r->scores[e] > r->scores[best])) best = e;
        if (best < 0) best = j - token * a->top_k; /* not a number anywhere: any experts, the sum will show it */
        r->expert[j] = best;
        r->weight[j] = r->scores[best] / total;
        kept += r->weight[j];
        r->scores[best] = -1.0f;
    }
    for (int64_t j = token * a->top_k; j < (token + 1) * a->top_k; j++) {
        if (a->renormalize) r->weight[j] /= kept;
        if (a->places) r->expert[j] = a->places[token % a->turns * a->experts + r->expert[j]];
    }
}

/* Sorts the pairs by expert and gathers their tokens' rows; those of other ranks' experts have no place. */
static void sort_pairs(const Sparse *a, Routing *r) {
    const int64_t pairs = a->tokens * a->top_k, line = a->hidden * size_of(headrace_product_type(a->type));
    memset(r->start, 0, (a->held + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < pairs; i++)
        if (r->expert[i] >= 0) r->start[r->expert[i] + 1]++;
    r->num_active = 0;
    for (int64_t e = 0; e < a->held; e++) {
        if (r->start[e + 1]) r->active[r->num_active++] = e;
        r->start[e + 1] += r->start[e];
    }
    for (int64_t i = 0; i < pairs; i++) r->place[i] = r->expert[i] >= 0 ? r->start[r->expert[i]]++ : -1;
    for (int64_t e = a->held; e > 0; e--) r->start[e] = r->start[e - 1];
    r->start[0] = 0;
    for (int64_t i = 0; i < pairs; i++)
        if (r->place[i] >= 0) headrace_product_row(a->type, a->x + i / a->top_k * a->x_row * size_of(a->type), r->rows + r->place[i] * line, a->hidden);
}

/* One chunk of columns of y = x . w[expert]^T over an expert's pairs. */
static void expert_columns(const Sparse *a, const Routing *r, int64_t expert, int64_t chunk, const char *x, const char *w, char *y, int64_t n, int64_t k) {
    const int64_t size = size_of(a->type), first = r->start[expert], to = (chunk + 1) * CHUNK_N;
    const Product p = {a->type,        r->start[expert + 1] - first, n, k, x + first * k * size_of(headrace_product_type(a->type)), w + expert * n * k * size, NULL,
                       y + first * n * size, k, k, n, a->invariant};
    headrace_product_columns(&p, chunk * CHUNK_N, to < n ? to : n);
}

static void weighted_sum(const Sparse *a, const Routing *r, int64_t token) {
    const int64_t size = size_of(a->type);
    for (int64_t i = 0; i < a->hidden; i += LANES) {
        vec sum = splat(0.0f);
        for (int64_t j = token * a->top_k; j < (token + 1) * a->top_k; j++)
            if (r->place[j] >= 0) sum += r->weight[j] * load_upto(r->answers + r->place[j] * a->hidden * size, i, a->hidden - i, a->type);
        store_upto(a->out + token * a->hidden * size, i, a->hidden - i, sum, a->type);
    }
}

/* In place of the gate, then as the next product takes it. */
static void gate_pair(const Sparse *a, const Routing *r, int64_t i) {
    char *wide = r->wide + i * 2 * a->inner * size_of(a->type);
    headrace_gate_row(a->type, wide, wide, a->inner, a->activation);
    headrace_product_row(a->type, wide, r->gated + i * a->inner * size_of(headrace_product_type(a->type)), a->inner);
}

static void compute(const Sparse *a, const Routing *r, int threads) {
    const int64_t pairs = r->start[a->held];
    const int64_t wide_chunks = (2 * a->inner + CHUNK_N - 1) / CHUNK_N, down_chunks = (a->hidden + CHUNK_N - 1) / CHUNK_N;
#pragma omp parallel num_threads(threads) if (threads > 1 && pairs * a->inner * a->hidden > 65536)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < r->num_active * wide_chunks; i++)
            expert_columns(a, r, r->active[i / wide_chunks], i % wide_chunks, r->rows, a->gate_up, r->wide, 2 * a->inner, a->hidden);
#pragma omp for
        for (int64_t i = 0; i < pairs; i++) gate_pair(a, r, i);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < r->num_active * down_chunks; i++)
            expert_columns(a, r, r->active[i / down_chunks], i % down_chunks, r->gated, a->down, r->answers, a->hidden, a->inner);
#pragma omp for
        for (int64_t t = 0; t < a->tokens; t++) weighted_sum(a, r, t);
    }
}

static char *carve(char **memory, int64_t bytes) {
    char *start = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return start;
}

/* Returns 1 if memory ran out. */
int headrace_moe(const Sparse *a, int threads) {
    const int64_t pairs = a->tokens * a->top_k, size = size_of(a->type), x_size = size_of(headrace_product_type((int)a->type));
    const int64_t row = (a->hidden + 2 * a->inner) * size + (a->hidden + a->inner) * x_size;
    char *memory = malloc(pairs * (row + 20) + a->experts * 20 + 16 * 64), *rest = memory;
    if (!memory) return 1;
    Routing r;
    r.expert = (int64_t *)carve(&rest, pairs * 8);
    r.place = (int64_t *)carve(&rest, pairs * 8);
    r.start = (int64_t *)carve(&rest, (a->experts + 1) * 8);
    r.active = (int64_t *)carve(&rest, a->experts * 8);
    r.weight = (float *)carve(&rest, pairs * 4);
    r.scores = (float *)carve(&rest, a->experts * 4);
    r.rows = carve(&rest, pairs * a->hidden * x_size);
    r.wide = carve(&rest, pairs * 2 * a->inner * size);
    r.gated = carve(&rest, pairs * a->inner * x_size);
    r.answers = carve(&rest, pairs * a->hidden * size);
    for (int64_t t = 0; t < a->tokens; t++) choose_experts(a, &r, t);
    sort_pairs(a, &r);
    compute(a, &r, threads);
    free(memory);
    return 0;
}
