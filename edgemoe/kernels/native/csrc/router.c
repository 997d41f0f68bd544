/* The router: a token's top-k experts by a softmax over the router's product. */
#include "router.h"

#include "dense.h"

#if defined(__x86_64__)
#include <math.h>

/* From logits [count]: k distinct experts, the likeliest first, of a tie the first, and their gate weights: parts of
 * a softmax over all experts, or over the chosen. probabilities has room for `count`. */
AVX2 void edgemoe_topk_softmax(const router *r, const uint16_t *logits, float *probabilities, int64_t *chosen, float *gates) {
    float largest = -INFINITY, total = 0, chosen_total = 0;
    for (int64_t i = 0; i < r->count; i++) largest = fmaxf(largest, from_bf16(logits[i]));
    for (int64_t i = 0; i < r->count; i++) total += probabilities[i] = expf(from_bf16(logits[i]) - largest);
    for (int64_t slot = 0; slot < r->k; slot++) {
        int64_t best = 0;
        while (probabilities[best] == -1) best++; /* NaN is never above another: without this it would be chosen again */
        for (int64_t i = best + 1; i < r->count; i++) best = probabilities[i] > probabilities[best] ? i : best;
        chosen[slot] = best;
        chosen_total += gates[slot] = probabilities[best] / total;
        probabilities[best] = -1;
    }
    for (int64_t slot = 0; slot < r->k; slot++) {
        if (r->normalise) gates[slot] /= chosen_total;
        if (r->rounded) gates[slot] = from_bf16(to_bf16(gates[slot]));
    }
}

AVX2 int edgemoe_router_topk(pool *p, const router *r, const uint16_t *x, int64_t tokens, int64_t x_cols, uint16_t *logits,
                             float *probabilities, int64_t *chosen, float *gates) {
    if (r->k < 1 || r->k > r->count) return WRONG_SHAPE;
    const int failed = edgemoe_dense_product(p, r->weight, NULL, r->count, r->cols, x, tokens, x_cols, logits, r->count);
    if (failed) return failed;
    for (; tokens > 0; tokens--, logits += r->count, chosen += r->k, gates += r->k)
        edgemoe_topk_softmax(r, logits, probabilities, chosen, gates);
    return 0;
}
#endif
