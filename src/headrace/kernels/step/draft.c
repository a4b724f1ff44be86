/* Draft tokens of a small decoder: all layers of all passes in one call, so that no pass waits for its launches.
 *
 * What lives here: the order of a decoder's operations, and of the passes of a run of drafts. What may not: the operations (linear.c,
 * attention.c, elementwise.c, sampling.c), which are those that layers and the sampler call one by one; filters and penalties.
 *
 *     pass 0      the tokens of each row whose keys are missing, the last known one among them
 *     pass d      the token that pass d - 1 drew, of the rows that draft more than d
 *
 * Each pass writes the tokens it draws into the rows, where the next one finds them: the largest logit's, or with a temperature the one
 * that the row's own noise picks from all of them. A pass that somebody else has laid out, such as one over the tokens of trees, is
 * computed as far as its hidden states.
 */
#include "attention.h"
#include "common.h"
#include "product.h"
#include "rotary.h"

#define SMALL (1 << 19) /* elements of a weight */

enum { QKV, OUTPUT, UP, DOWN, FIRST_NORM, SECOND_NORM, PARTS };

int headrace_linear(int type, int64_t m, int64_t n, int64_t k, const char *x, int64_t x_row, const char *w, int64_t w_row, const char *bias,
                     char *y, int64_t y_row, int invariant, int threads);

int headrace_gumbel_argmax(int64_t rows, int64_t vocab, const float *scores, int64_t row_stride, const float *thresholds, const int64_t *seeds,
                           const int64_t *positions, int64_t *tokens, int threads);

/* A decoder of norm, attention, norm and gated feed-forward with SiLU. */
typedef struct {
    int64_t type, layers, hidden, q_heads, kv_heads, dim, inner, vocab, max_positions;
    const char *const *weights; /* [layers][PARTS] */
    const char *embedding, *norm, *head;
    const float *cos_sin;
    double eps, scale;
} Model;

/* Rows, and the draft's cache [blocks, layers, 2, kv_heads, block_size, dim], contiguous. */
typedef struct {
    int64_t rows, block_size, num_blocks, id_row, table_row; /* strides, elements */
    int32_t *token_ids;                                       /* of all rows; drafts are written behind each row's length */
    const int32_t *tables;                                    /* of all rows */
    const int32_t *row, *start, *length, *most;               /* [rows]: tokens start .. length - 1 are computed, then most drawn */
    const int32_t *prompt;                                    /* [rows]: tokens before the answer, whose places the noise counts */
    const float *temperature;                                 /* [rows]; 0: the largest logit */
    const int64_t *seed;                                      /* [rows] */
    char *cache;
    int64_t threads;
} Drafting;

/* One pass: sequences of one or more tokens, and what is computed of them. */
typedef struct {
    int64_t tokens, sequences, longest, max_query;
    int64_t *positions, *slots;
    int32_t *ids, *query_start, *context, *table;
    const int32_t *tree_first; /* as attention.h has them */
    const int64_t *ancestors;
    char *sum, *other, *normed, *wide, *attended, *gated;
} Pass;

/* Of a step, as ForwardInputs has them. */
typedef struct {
    int64_t tokens, sequences, longest, max_query;
    const int64_t *ids, *positions, *slots;
    const int32_t *query_start, *context, *table, *tree_first;
    const int64_t *ancestors;
    char *hidden; /* [tokens, hidden], written: behind the last norm */
} Given;

static char *carve(char **at, int64_t bytes) {
    char *found = *at;
    *at += (bytes + 63) / 64 * 64;
    return found;
}

/* Points `p` into one allocation, which holds `tokens` in `rows` sequences. NULL: there is no memory. */
static char *make_pass(Pass *p, const Model *m, int64_t tokens, int64_t rows, int64_t width) {
    const int64_t size = size_of((int)m->type), line = (m->q_heads + 2 * m->kv_heads) * m->dim;
    const int64_t wide = line > 2 * m->inner ? line : 2 * m->inner, attended = m->q_heads * m->dim;
    const int64_t per_token = 2 * 8 + 4 + size * (3 * m->hidden + wide + attended + m->inner);
    char *memory = NULL, *at;
    if (posix_memalign((void **)&memory, 64, tokens * per_token + rows * (8 + 4 * width) + 4 + 64 * 12)) return NULL;
    at = memory;
    p->positions = (int64_t *)carve(&at, tokens * 8), p->slots = (int64_t *)carve(&at, tokens * 8);
    p->ids = (int32_t *)carve(&at, tokens * 4), p->query_start = (int32_t *)carve(&at, (rows + 1) * 4);
    p->context = (int32_t *)carve(&at, rows * 4), p->table = (int32_t *)carve(&at, rows * width * 4);
    p->sum = carve(&at, tokens * m->hidden * size), p->other = carve(&at, tokens * m->hidden * size);
    p->normed = carve(&at, tokens * m->hidden * size), p->wide = carve(&at, tokens * wide * size);
    p->attended = carve(&at, tokens * attended * size), p->gated = carve(&at, tokens * m->inner * size);
    return memory;
}

/* Threads take longer to begin than a small product takes. */
static int product(const Model *m, int64_t rows, int64_t outs, int64_t ins, const char *x, const char *w, char *y, int64_t threads) {
    return headrace_linear((int)m->type, rows, outs, ins, x, ins, w, ins, NULL, y, outs, 0, outs * ins < SMALL ? 1 : (int)threads);
}

/* y = norm(x + sum), and sum takes x in. */
static void norm_onto(const Model *m, int64_t rows, const char *x, char *sum, const char *weight, char *y) {
    headrace_rms_norm((int)m->type, (int)m->type, rows, m->hidden, x, m->hidden, sum, m->hidden, weight, (float)m->eps, y, sum, 1);
}

static int attend(const Model *m, const Drafting *d, Pass *p, int64_t layer) {
    const int64_t size = size_of((int)m->type), head = d->block_size * m->dim, half = m->kv_heads * head, block = m->layers * 2 * half;
    const int64_t line = (m->q_heads + 2 * m->kv_heads) * m->dim;
    char *keys = d->cache + layer * 2 * half * size, *values = keys + half * size;
    char *q = p->wide, *k = q + m->q_heads * m->dim * size, *v = k + m->kv_heads * m->dim * size;
    const int type = (int)m->type;
    const Rotary write = {type, type, p->tokens, m->q_heads, m->kv_heads, m->dim, m->dim, m->max_positions, d->block_size, d->num_blocks,
                          q, k, v, line, m->dim, line, m->dim, line, m->dim, p->positions, p->slots, m->cos_sin,
                          keys, values, block, head, m->dim, block, head, m->dim, NULL, NULL};
    const Attention attention = {type, type, p->sequences, m->q_heads, m->kv_heads, m->dim, d->block_size, p->tokens, q, p->attended, line, m->dim,
                                 keys, values, block, head, m->dim, block, head, m->dim, p->table, p->query_start, p->context, d->table_row,
                                 p->max_query, p->longest, 0, NULL, NULL, p->tree_first, p->ancestors, (float)m->scale, 0.0f, NULL};
    return headrace_rotary_write(&write, 1) || headrace_attention(&attention, 1);
}

/* All layers; p->normed holds the last norm of every token afterwards. */
static int forward(const Model *m, const Drafting *d, Pass *p) {
    const int64_t size = size_of((int)m->type), line = m->hidden * size, attended = m->q_heads * m->dim;
    for (int64_t t = 0; t < p->tokens; t++) memcpy(p->sum + t * line, m->embedding + p->ids[t] * line, line);
    for (int64_t layer = 0; layer < m->layers; layer++) {
        const char *const *w = m->weights + layer * PARTS;
        if (layer)
            norm_onto(m, p->tokens, p->other, p->sum, w[FIRST_NORM], p->normed);
        else
            headrace_rms_norm((int)m->type, (int)m->type, p->tokens, m->hidden, p->sum, m->hidden, NULL, 0, w[FIRST_NORM], (float)m->eps, p->normed, NULL, 1);
        if (product(m, p->tokens, attended + 2 * m->kv_heads * m->dim, m->hidden, p->normed, w[QKV], p->wide, d->threads)) return 1;
        if (attend(m, d, p, layer)) return 1;
        if (product(m, p->tokens, m->hidden, attended, p->attended, w[OUTPUT], p->other, d->threads)) return 1;
        norm_onto(m, p->tokens, p->other, p->sum, w[SECOND_NORM], p->normed);
        if (product(m, p->tokens, 2 * m->inner, m->hidden, p->normed, w[UP], p->wide, d->threads)) return 1;
        headrace_gated_activation((int)m->type, p->tokens, m->inner, p->wide, 2 * m->inner, 0, p->gated, 1);
        if (product(m, p->tokens, m->hidden, m->inner, p->gated, w[DOWN], p->other, d->threads)) return 1;
    }
    norm_onto(m, p->tokens, p->other, p->sum, m->norm, p->normed);
    return 0;
}

/* Tokens first .. first + count - 1 of a row become the pass's next sequence. */
static void add_sequence(const Drafting *d, Pass *p, int64_t i, int64_t first, int64_t count) {
    const int32_t *ids = d->token_ids + d->row[i] * d->id_row, *table = d->tables + d->row[i] * d->table_row;
    for (int64_t t = 0; t < count; t++) {
        const int64_t position = first + t, at = p->tokens + t;
        p->ids[at] = ids[position], p->positions[at] = position;
        p->slots[at] = (int64_t)table[position / d->block_size] * d->block_size + position % d->block_size;
    }
    memcpy(p->table + p->sequences * d->table_row, table, d->table_row * sizeof(int32_t));
    p->context[p->sequences] = (int32_t)(first + count);
    p->tokens += count, p->sequences++;
    p->query_start[p->sequences] = (int32_t)p->tokens;
    p->longest = first + count > p->longest ? first + count : p->longest, p->max_query = count > p->max_query ? count : p->max_query;
}

INLINE float peak_of(const char *logits, int64_t vocab, const int type) {
    vec top = splat(-INFINITY);
    float best = -INFINITY;
    int64_t at = 0;
    for (; at + LANES <= vocab; at += LANES) top = vmax(load_vec(logits, at, type), top);
    for (int i = 0; i < LANES; i++) best = top[i] > best ? top[i] : best;
    for (int64_t i = at; i < vocab; i++) {
        const float value = load_upto(logits, i, 1, type)[0];
        best = value > best ? value : best;
    }
    return best;
}

/* The first token that has the largest logit. */
INLINE int32_t largest(const char *logits, int64_t vocab, const int type) {
    const float best = peak_of(logits, vocab, type);
    for (int64_t i = 0; i < vocab; i += LANES) {
        const vec part = load_upto(logits, i, vocab - i, type);
        for (int j = 0; j < LANES && i + j < vocab; j++)
            if (part[j] == best) return (int32_t)(i + j);
    }
    return 0;
}

/* Where row i's noise, at this place of its answer, makes a logit the largest. */
INLINE int32_t noisy(const Model *m, const Drafting *d, int64_t i, int64_t depth, const char *logits, float *scores, const int type) {
    const float peak = peak_of(logits, m->vocab, type), kept = -INFINITY;
    const int64_t place = d->length[i] + depth - d->prompt[i];
    int64_t token = 0;
    for (int64_t t = 0; t < m->vocab; t += LANES) store_upto(scores, t, m->vocab - t, (load_upto(logits, t, m->vocab - t, type) - peak) / d->temperature[i], F32);
    if (headrace_gumbel_argmax(1, m->vocab, scores, m->vocab, &kept, d->seed + i, &place, &token, 1)) return 0;
    return (int32_t)token;
}

static int32_t drawn(const Model *m, const Drafting *d, int64_t i, int64_t depth, const char *logits, float *scores) {
    if (d->temperature[i] > 0.0f) {
        if (m->type == F32) return noisy(m, d, i, depth, logits, scores, F32);
        return m->type == BF16 ? noisy(m, d, i, depth, logits, scores, BF16) : noisy(m, d, i, depth, logits, scores, F16);
    }
    if (m->type == F32) return largest(logits, m->vocab, F32);
    return m->type == BF16 ? largest(logits, m->vocab, BF16) : largest(logits, m->vocab, F16);
}

/* Draws behind the last token of each sequence. `which`: the rows they are of. */
static int draw(const Model *m, const Drafting *d, Pass *p, const int64_t *which, int64_t depth, char *last, char *logits, float *scores) {
    const int64_t size = size_of((int)m->type), line = m->hidden * size;
    for (int64_t s = 0; s < p->sequences; s++) memcpy(last + s * line, p->normed + (p->query_start[s + 1] - 1) * line, line);
    if (product(m, p->sequences, m->vocab, m->hidden, last, m->head, logits, d->threads)) return 1;
    for (int64_t s = 0; s < p->sequences; s++) {
        const int64_t i = which[s];
        d->token_ids[d->row[i] * d->id_row + d->length[i] + depth] = drawn(m, d, i, depth, logits + s * m->vocab * size, scores);
    }
    return 0;
}

static int run_passes(const Model *m, const Drafting *d, Pass *p, int64_t *which, char *last, char *logits, float *scores) {
    int64_t deepest = 0;
    for (int64_t i = 0; i < d->rows; i++) deepest = d->most[i] > deepest ? d->most[i] : deepest;
    for (int64_t depth = 0; depth < deepest; depth++) {
        p->tokens = p->sequences = p->longest = p->max_query = p->query_start[0] = 0;
        for (int64_t i = 0; i < d->rows; i++) {
            if (d->most[i] <= depth) continue;
            which[p->sequences] = i;
            const int64_t first = depth ? d->length[i] + depth - 1 : d->start[i];
            add_sequence(d, p, i, first, d->length[i] + depth - first);
        }
        if (forward(m, d, p) || draw(m, d, p, which, depth, last, logits, scores)) return 1;
    }
    return 0;
}

/* Returns 1 when there is no memory, or a position or block is out of range. */
int headrace_draft(const Model *m, const Drafting *d) {
    const int64_t size = size_of((int)m->type);
    int64_t tokens = 0, failed = 1;
    for (int64_t i = 0; i < d->rows; i++) tokens += d->length[i] - d->start[i];
    Pass p = {0};
    char *memory = make_pass(&p, m, tokens, d->rows, d->table_row);
    int64_t *which = malloc(d->rows * sizeof(int64_t));
    char *last = malloc(d->rows * m->hidden * size), *logits = malloc(d->rows * m->vocab * size);
    float *scores = malloc(m->vocab * sizeof(float));
    if (memory && which && last && logits && scores) failed = run_passes(m, d, &p, which, last, logits, scores);
    free(memory), free(which), free(last), free(logits), free(scores);
    return (int)failed;
}

/* The same, of one pass. */
int headrace_draft_pass(const Model *m, const Drafting *d, const Given *g) {
    Pass p = {g->tokens, g->sequences, g->longest, g->max_query};
    char *memory = make_pass(&p, m, g->tokens, 0, 0);
    if (!memory) return 1;
    for (int64_t t = 0; t < g->tokens; t++) p.ids[t] = (int32_t)g->ids[t];
    p.positions = (int64_t *)g->positions, p.slots = (int64_t *)g->slots;
    p.query_start = (int32_t *)g->query_start, p.context = (int32_t *)g->context, p.table = (int32_t *)g->table;
    p.tree_first = g->tree_first, p.ancestors = g->ancestors;
    const int failed = forward(m, d, &p);
    memcpy(g->hidden, p.normed, failed ? 0 : g->tokens * m->hidden * size_of((int)m->type));
    free(memory);
    return failed;
}
