/* Norm, rotary embedding with the KV write, and activations, plain and gated: what stands between the matrix products.
 *
 * What lives here: operations a row (a token) at a time. What may not: matrix products, attention.
 * All work in float32 inside; rows are independent, so their bits do not depend on the batch.
 */
#include "common.h"
#include "kv_codes.h"
#include "product.h"
#include "rotary.h"

#ifdef _OPENMP
const int headrace_openmp = 1; /* there: the loops of this library are shared out to threads */
#endif

enum { SILU = 0, GELU = 1, GELU_TANH = 2 };
enum { OK = 0, BAD_POSITION = 1, BAD_SLOT = 2 };

/* Below this many elements the threads cost more than they bring. */
#define WORTH_THREADS 32768

INLINE void norm_row(const char *x, const char *residual, const char *weight, char *y, char *sum, int64_t width, float eps,
                     const int type, const int weight_type) {
    vec squares = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
        vec value = load_upto(x, i, width - i, type);
        if (residual) {
            value += load_upto(residual, i, width - i, type);
            store_upto(sum, i, width - i, value, type);
            value = load_upto(sum, i, width - i, type); /* what the next layer will see: rounded */
        }
        squares += value * value;
    }
    const float scale = 1.0f / sqrtf(vsum(squares) / (float)width + eps);
    const char *from = residual ? sum : x;
    for (int64_t i = 0; i < width; i += LANES)
        store_upto(y, i, width - i, load_upto(from, i, width - i, type) * scale * load_upto(weight, i, width - i, weight_type), type);
}

INLINE void norm_any(const char *x, const char *residual, const char *weight, char *y, char *sum, int64_t width, float eps, const int type,
                     int weight_type) {
    if (weight_type == type)
        norm_row(x, residual, weight, y, sum, width, eps, type, type);
    else
        norm_row(x, residual, weight, y, sum, width, eps, type, F32);
}

/* y = n * weight with n = s / rms(s), s = x + residual (written to sum) or x. Rows are `*_row` elements apart; weight_type is type or F32. */
void headrace_rms_norm(int type, int weight_type, int64_t rows, int64_t width, const char *x, int64_t x_row, const char *residual, int64_t residual_row,
                       const char *weight, float eps, char *y, char *sum, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1 && rows * width > WORTH_THREADS)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t size = size_of(type);
        const char *in = x + r * x_row * size, *add = residual ? residual + r * residual_row * size : NULL;
        char *out = y + r * width * size, *total = residual ? sum + r * width * size : NULL;
        if (type == F32)
            norm_any(in, add, weight, out, total, width, eps, F32, weight_type);
        else if (type == BF16)
            norm_any(in, add, weight, out, total, width, eps, BF16, weight_type);
        else
            norm_any(in, add, weight, out, total, width, eps, F16, weight_type);
    }
}

INLINE vec activate(vec x, int kind) {
    if (kind == SILU) return x / (1.0f + vexp(-x));
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + vtanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    vec out;
    for (int i = 0; i < LANES; i++) out[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.7071067812f));
    return out;
}

INLINE void gate_row(const char *x, char *y, int64_t width, int kind, const int type) {
    for (int64_t i = 0; i < width; i += LANES) {
        vec gate = load_upto(x, i, width - i, type), up = load_upto(x, width + i, width - i, type);
        store_upto(y, i, width - i, activate(gate, kind) * up, type);
    }
}

void headrace_gate_row(int type, const char *x, char *y, int64_t width, int kind) {
    if (type == F32)
        gate_row(x, y, width, kind, F32);
    else if (type == BF16)
        gate_row(x, y, width, kind, BF16);
    else
        gate_row(x, y, width, kind, F16);
}

void headrace_gated_activation(int type, int64_t rows, int64_t width, const char *x, int64_t x_row, int kind, char *y, int threads) {
    const int64_t size = size_of(type);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1 && rows * width > WORTH_THREADS)
    for (int64_t r = 0; r < rows; r++) headrace_gate_row(type, x + r * x_row * size, y + r * width * size, width, kind);
}

INLINE void activate_row(const char *x, char *y, int64_t width, int kind, const int type) {
    for (int64_t i = 0; i < width; i += LANES) store_upto(y, i, width - i, activate(load_upto(x, i, width - i, type), kind), type);
}

void headrace_activation(int type, int64_t rows, int64_t width, const char *x, int64_t x_row, int kind, char *y, int threads) {
    const int64_t size = size_of(type);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1 && rows * width > WORTH_THREADS)
    for (int64_t r = 0; r < rows; r++) {
        const char *in = x + r * x_row * size;
        char *out = y + r * width * size;
        if (type == F32)
            activate_row(in, out, width, kind, F32);
        else if (type == BF16)
            activate_row(in, out, width, kind, BF16);
        else
            activate_row(in, out, width, kind, F16);
    }
}

INLINE void rotate_head(char *x, const float *cos_sin, int64_t half, const int type) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        vec c = load_upto(cos_sin, i, left, F32), s = load_upto(cos_sin, half + i, left, F32);
        vec a = load_upto(x, i, left, type), b = load_upto(x, half + i, left, type);
        store_upto(x, i, left, a * c - b * s, type);
        store_upto(x, half + i, left, b * c + a * s, type);
    }
}


static void copy_cached(const char *from, char *to, int64_t dim, int type, int cache_type) {
    if (type == cache_type)
        memcpy(to, from, dim * size_of(type));
    else
        for (int64_t i = 0; i < dim; i += LANES) store_upto(to, i, dim - i, load_upto(from, i, dim - i, type), cache_type);
}

INLINE void encode_any(const char *from, int64_t dim, int type, char *codes, char *scales, float shared, const int kind) {
    if (type == F32)
        encode_head(from, dim, F32, codes, scales, shared, kind);
    else if (type == BF16)
        encode_head(from, dim, BF16, codes, scales, shared, kind);
    else
        encode_head(from, dim, F16, codes, scales, shared, kind);
}

/* One token's keys or values in one head, to place `offset` of that head's part of a block, which begins at `to`. */
static void store_coded(const Rotary *a, const char *from, char *to, int64_t offset, const float *shared) {
    const int kind = a->cache_type;
    const int64_t line = row_bytes(a->dim, kind);
    char *codes = to + offset * line, *scales = to + a->block_size * line + offset * scale_bytes(kind);
    const float scale = shared ? *shared : 1.0f;
    if (kind == I8)
        encode_any(from, a->dim, a->type, codes, scales, scale, I8);
    else if (kind == E4M3)
        encode_any(from, a->dim, a->type, codes, scales, scale, E4M3);
    else if (kind == E5M2)
        encode_any(from, a->dim, a->type, codes, scales, scale, E5M2);
    else
        encode_any(from, a->dim, a->type, codes, scales, scale, U4);
}

static void rotary_token(const Rotary *a, int64_t t) {
    const int64_t size = size_of(a->type), cache_size = size_of(a->cache_type), slot = a->slots[t];
    char *q = a->q + t * a->q_row * size, *k = a->k + t * a->k_row * size;
    const char *v = a->v + t * a->v_row * size;
    if (a->cos_sin) {
        const float *angles = a->cos_sin + a->positions[t] * a->rotary_dim;
        for (int64_t h = 0; h < a->q_heads + a->kv_heads; h++) {
            char *head = h < a->q_heads ? q + h * a->q_head * size : k + (h - a->q_heads) * a->k_head * size;
            if (a->type == F32)
                rotate_head(head, angles, a->rotary_dim / 2, F32);
            else if (a->type == BF16)
                rotate_head(head, angles, a->rotary_dim / 2, BF16);
            else
                rotate_head(head, angles, a->rotary_dim / 2, F16);
        }
    }
    if (slot < 0) return;
    const int64_t block = slot / a->block_size, offset = slot % a->block_size;
    for (int64_t h = 0; h < a->kv_heads; h++) {
        if (is_coded(a->cache_type)) {
            store_coded(a, k + h * a->k_head * size, a->k_cache + block * a->k_block + h * a->k_cache_head, offset, a->k_scales ? a->k_scales + h : NULL);
            store_coded(a, v + h * a->v_head * size, a->v_cache + block * a->v_block + h * a->v_cache_head, offset, a->v_scales ? a->v_scales + h : NULL);
            continue;
        }
        char *k_to = a->k_cache + (block * a->k_block + h * a->k_cache_head + offset * a->k_token) * cache_size;
        char *v_to = a->v_cache + (block * a->v_block + h * a->v_cache_head + offset * a->v_token) * cache_size;
        copy_cached(k + h * a->k_head * size, k_to, a->dim, a->type, a->cache_type);
        copy_cached(v + h * a->v_head * size, v_to, a->dim, a->type, a->cache_type);
    }
}

/* Rotates q and k in place, then writes k and v to their slots (-1: nowhere). Nothing is touched unless every index is in range. */
int headrace_rotary_write(const Rotary *a, int threads) {
    for (int64_t t = 0; t < a->tokens; t++) {
        if (a->cos_sin && (a->positions[t] < 0 || a->positions[t] >= a->max_positions)) return BAD_POSITION;
        if (a->slots[t] >= a->num_blocks * a->block_size) return BAD_SLOT;
    }
    const int64_t work = a->tokens * (a->q_heads + 2 * a->kv_heads) * a->dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && a->tokens > 1 && work > WORTH_THREADS)
    for (int64_t t = 0; t < a->tokens; t++) rotary_token(a, t);
    return OK;
}
