/* Which machine this library was built for. */
#include "common.h"

/* Bit 0: bf16 dot instructions. Bit 1: 512-bit vectors. */
int headrace_features(void) {
    int bits = HAVE_BF16_DOT;
#if defined(__AVX512F__)
    bits |= 2;
#endif
    return bits;
}
