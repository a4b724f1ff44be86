/* The arguments of rotation and cache write: what elementwise.c offers to the other files. */
#ifndef HEADRACE_ROTARY_H
#define HEADRACE_ROTARY_H

#include <stdint.h>

typedef struct {
    int type, cache_type;
    int64_t tokens, q_heads, kv_heads, dim, rotary_dim, max_positions, block_size, num_blocks;
    char *q, *k;
    const char *v;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head; /* strides, elements */
    const int64_t *positions, *slots;
    const float *cos_sin; /* [max_positions, rotary_dim] or NULL */
    char *k_cache, *v_cache;
    int64_t k_block, k_cache_head, k_token, v_block, v_cache_head, v_token; /* strides, elements */
    const float *k_scales, *v_scales; /* [kv_heads], or NULL for 1: of codes without scales of their own */
} Rotary;

int headrace_rotary_write(const Rotary *a, int threads);

/* y = norm(x + residual), sum = x + residual; without residual y = norm(x). */
void headrace_rms_norm(int type, int weight_type, int64_t rows, int64_t width, const char *x, int64_t x_row, const char *residual, int64_t residual_row,
                       const char *weight, float eps, char *y, char *sum, int threads);
void headrace_gated_activation(int type, int64_t rows, int64_t width, const char *x, int64_t x_row, int kind, char *y, int threads);

#endif
