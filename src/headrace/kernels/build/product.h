/* The product of a few rows with a weight left as it is: what linear.c offers to the other files. */
#ifndef HEADRACE_PRODUCT_H
#define HEADRACE_PRODUCT_H

#include <stdint.h>

#define CHUNK_N 64 /* rows of w a thread takes at a time */

typedef struct {
    int type; /* of w, bias and y; x is of headrace_product_type(type) */
    int64_t m, n, k;
    const char *x, *w, *bias; /* bias [n] or NULL */
    char *y;
    int64_t x_row, w_row, y_row; /* strides, elements */
    int invariant;               /* the bits of a row must not depend on m */
} Product;

/* That of x where w is of `type`: float32, so that each element is widened once, unless the processor multiplies `type` itself. */
int headrace_product_type(int type);

/* One row x, as products take it. */
void headrace_product_row(int type, const char *x, char *to, int64_t k);

/* Columns from .. to - 1 of y, on the calling thread. */
void headrace_product_columns(const Product *p, int64_t from, int64_t to);

/* y[r, i] = act(x[r, i]) * x[r, width + i], one row, on the calling thread. */
void headrace_gate_row(int type, const char *x, char *y, int64_t width, int kind);

#endif
