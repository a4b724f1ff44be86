/* The arguments of attention over a paged cache: what attention.c offers to the other files. */
#ifndef HEADRACE_ATTENTION_H
#define HEADRACE_ATTENTION_H

#include <stdint.h>

typedef struct {
    int type, cache_type; /* of q and out; of the caches */
    int64_t sequences, q_heads, kv_heads, dim, block_size, tokens;
    const char *q;
    char *out; /* [tokens, q_heads, dim], contiguous */
    int64_t q_row, q_head; /* strides, elements */
    const char *k_cache, *v_cache;
    int64_t k_block, k_head, k_token, v_block, v_head, v_token; /* strides, elements */
    const int32_t *table, *query_start, *context_len;
    int64_t table_row; /* stride, elements */
    int64_t max_query_len, max_context_len;
    int64_t window; /* keys a query sees, itself included; 0 = all */
    const float *k_scales, *v_scales; /* [kv_heads], or NULL for 1: of codes without scales of their own */
    const int32_t *tree_first;  /* [sequences]: the place of each tree's root; NULL where no token is in a tree */
    const int64_t *ancestors;   /* [tokens]: bit i: the token sees the key at tree_first + i; 0: it is in no tree */
    float scale, soft_cap; /* soft_cap 0 = none */
    float *lse; /* [tokens, q_heads], written: log of a row's sum of exponentials, -inf where it sees nothing; NULL = not wanted */
} Attention;

int headrace_attention(const Attention *a, int threads);

#endif
