/* A token's experts: the likeliest of a softmax over the router's product. */
#include "router.h"

#include "dense.h"

#if defined(__x86_64__)
#include <math.h>

/* From logits [count]: the k likeliest, the likeliest first, of a tie the first, and their shares of a softmax over all
 * or over the chosen. probabilities has room for `count`. */
AVX2 void edgemoe_route(const router *r, const uint16_t *logits, float *probabilities, int64_t *chosen, float *shares) {
    float largest = -INFINITY, total = 0, of_chosen = 0;
    for (int64_t i = 0; i < r->count; i++) largest = fmaxf(largest, from_bf16(logits[i]));
    for (int64_t i = 0; i < r->count; i++) total += probabilities[i] = expf(from_bf16(logits[i]) - largest);
    for (int64_t slot = 0; slot < r->k; slot++) {
        int64_t best = 0;
        for (int64_t i = 1; i < r->count; i++) best = probabilities[i] > probabilities[best] ? i : best;
        chosen[slot] = best;
        of_chosen += shares[slot] = probabilities[best] / total;
        probabilities[best] = -1;
    }
    for (int64_t slot = 0; slot < r->k; slot++) {
        if (r->normalise) shares[slot] /= of_chosen;
        if (r->rounded) shares[slot] = from_bf16(to_bf16(shares[slot]));
    }
}

AVX2 int edgemoe_choose(pool *p, const router *r, const uint16_t *x, int64_t tokens, uint16_t *logits,
                        float *probabilities, int64_t *chosen, float *shares) {
    if (edgemoe_dense_product(p, r->weight, NULL, r->count, r->cols, x, tokens, logits)) return -1;
    for (; tokens > 0; tokens--, logits += r->count, chosen += r->k, shares += r->k)
        edgemoe_route(r, logits, probabilities, chosen, shares);
    return 0;
}
#endif
