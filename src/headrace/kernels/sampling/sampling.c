/* The Gumbel-max pick: noise of Philox4x32-10 for every kept token, and the best sum.
 *
 * What lives here: headrace_gumbel_argmax. What may not: thresholds, penalties, anything about requests.
 *
 * The integers are those of the torch twin (kernels/sampling/reference.py); logarithms may differ from torch's in the last bit. Noise is largest
 * where its word is smallest: g = -log(-log1p(-w)) <= -log(w) for w = (word + 1/2) / 2^32, so a bound from the word's exponent tells,
 * before any logarithm, that no token of a vector can win; nearly all are settled by that.
 */
#include "common.h"

typedef uint64_t wvec __attribute__((vector_size(4 * LANES)));

enum { RUN = 64, SPAN = 256 }; /* tokens with the same word of consecutive calls; tokens of RUN calls */
#define LOG2 0.69314718056f
#define LARGEST_NOISE 22.9f /* -log(2^-33) and a little */

INLINE void multiply(uvec x, uint32_t factor, uvec *high, uvec *low) {
    wvec even, odd;
#if LANES == 16
    __m512i f = _mm512_set1_epi64(factor);
    even = (wvec)_mm512_mul_epu32((__m512i)x, f);
    odd = (wvec)_mm512_mul_epu32((__m512i)((wvec)x >> 32), f);
#elif LANES == 8
    __m256i f = _mm256_set1_epi64x(factor);
    even = (wvec)_mm256_mul_epu32((__m256i)x, f);
    odd = (wvec)_mm256_mul_epu32((__m256i)((wvec)x >> 32), f);
#else
    even = ((wvec)x & 0xffffffffu) * (uint64_t)factor;
    odd = ((wvec)x >> 32) * (uint64_t)factor;
#endif
    *high = (uvec)((even >> 32) | (odd & 0xffffffff00000000ull));
    *low = (uvec)((even & 0xffffffffu) | (odd << 32));
}

INLINE void philox(uvec c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uvec h0, l0, h1, l1;
        multiply(c[0], 0xD2511F53u, &h0, &l0);
        multiply(c[2], 0xCD9E8D57u, &h1, &l1);
        c[0] = h1 ^ c[1] ^ k0;
        c[1] = l1;
        c[2] = h0 ^ c[3] ^ k1;
        c[3] = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

static float gumbel(uint32_t word) {
    float uniform = ((float)word + 0.5f) * 0x1p-32f;
    uniform = uniform < 1.0f - 0x1p-24f ? uniform : 1.0f - 0x1p-24f;
    return -logf(-log1pf(-uniform));
}

/* No noise of these words is larger: -log(w) <= (33 - exponent of the word as a float) ln 2; rounding adds at most 1 to the exponent.
 * Word 0 gives the largest noise there is, -log(1/2^33), and is treated as 1. */
INLINE vec bound(uvec words) {
    ivec exponent = ((ivec)__builtin_convertvector(words | 1u, vec) >> 23) - 127;
    return (33.01f - __builtin_convertvector(exponent, vec)) * LOG2; /* .01: the sums in float32 */
}

INLINE int any_above(vec x, float limit) {
    ivec above = x > limit;
#if LANES == 16
    return _mm512_test_epi32_mask((__m512i)above, (__m512i)above) != 0;
#elif LANES == 8
    return _mm256_movemask_ps((__m256)above) != 0;
#else
    int found = 0;
    for (int i = 0; i < LANES; i++) found |= above[i];
    return found;
#endif
}

typedef struct {
    float value;
    int64_t token;
} best;

/* The tokens of one span of one row. `left` of them exist. */
INLINE void pick_in_span(const float *scores, int64_t first, int64_t left, float threshold, int64_t seed, int64_t position, best *b) {
    float most = -INFINITY;
    const int64_t count = left < SPAN ? left : SPAN;
    for (int64_t i = 0; i < count; i++) most = scores[first + i] > most ? scores[first + i] : most;
    if (!(most >= threshold) || most == -INFINITY || most + LARGEST_NOISE < b->value) return;
    for (int at = 0; at < RUN && at < count; at += LANES) {
        uvec c[4] = {{0}, {0}, {0}, {0}};
        for (int i = 0; i < LANES; i++) c[0][i] = (uint32_t)(first / SPAN * RUN + at + i);
        c[1] += (uint32_t)position;
        philox(c, (uint32_t)seed, (uint32_t)((uint64_t)seed >> 32));
        for (int lane = 0; lane < 4; lane++) {
            const int64_t token = first + lane * RUN + at, here = first + count - token;
            if (here <= 0) break;
            vec score;
            if (here >= LANES)
                score = *(const vecu *)(scores + token);
            else
                for (int i = 0; i < LANES; i++) score[i] = i < here ? scores[token + i] : -INFINITY;
            if (!any_above(score + bound(c[lane]), b->value)) continue;
            for (int i = 0; i < LANES && i < here; i++) {
                if (!(score[i] >= threshold)) continue;
                const float value = score[i] + gumbel(c[lane][i]);
                if (value > b->value || (value == b->value && token + i < b->token)) *b = (best){value, token + i};
            }
        }
    }
}

/* tokens[r] = argmax over scores[r][t] >= thresholds[r] of score + noise(seed, position, t); 0 where nothing is kept (NaN).
 * Each row is cut into `parts` runs of spans, so that few rows still use all threads. Returns 1 when there is no memory. */
int headrace_gumbel_argmax(int64_t rows, int64_t vocab, const float *scores, int64_t row_stride, const float *thresholds, const int64_t *seeds,
                           const int64_t *positions, int64_t *tokens, int threads) {
    const int64_t spans = (vocab + SPAN - 1) / SPAN, wanted = rows < threads ? threads : 1, parts = wanted < spans ? wanted : spans;
    best *found = malloc(sizeof(best) * (size_t)(rows * parts));
    if (!found) return 1;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * vocab > 32768) schedule(dynamic)
    for (int64_t task = 0; task < rows * parts; task++) {
        const int64_t row = task / parts, part = task % parts;
        best b = {-INFINITY, 0};
        for (int64_t span = spans * part / parts; span < spans * (part + 1) / parts; span++)
            pick_in_span(scores + row * row_stride, span * SPAN, vocab - span * SPAN, thresholds[row], seeds[row], positions[row], &b);
        found[task] = b;
    }
    for (int64_t row = 0; row < rows; row++) {
        best b = found[row * parts];
        for (int64_t part = 1; part < parts; part++)
            if (found[row * parts + part].value > b.value) b = found[row * parts + part];
        tokens[row] = b.token;
    }
    free(found);
    return 0;
}
