/* The router: a token's top-k experts by a softmax over the router's product. */
#ifndef EDGEMOE_ROUTER_H
#define EDGEMOE_ROUTER_H
#include "pool.h"

#if COMPILED
typedef struct {
    const uint16_t *weight; /* bf16 [count, cols] */
    int64_t count, cols, k;
    int32_t normalise, rounded; /* gate weights of the chosen add up to 1; are rounded to bf16 */
} router;

/* From tokens x [tokens, x_cols]: logits [tokens, count], and of each token the k likeliest, the likeliest first, of a tie
 * the first, with their gate weights: their parts of a softmax over all experts, or over the chosen, both [tokens, k]. probabilities has room for
 * `count`. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_router_topk(pool *p, const router *r, const uint16_t *x, int64_t tokens, int64_t x_cols, uint16_t *logits,
                        float *probabilities, int64_t *chosen, float *gates);

/* How the tokens of a step agree on experts (edgemoe/policy/remapping.py). */
typedef struct {
    float alpha;         /* bins for each unit of a logit */
    int64_t bins;        /* below the likeliest expert's; the last has all lower logits */
    int64_t *popularity; /* [count], scratch */
} remapping;

/* Chooses the experts of a step's tokens again: those of one bin by how popular they are in the step.
 *
 * logits [tokens, count], chosen and gates [tokens, k] are of edgemoe_router_topk; chosen and gates change. probabilities
 * has room for `count`. counts[0] gets the distinct experts chosen before, counts[1] the pairs that were not. */
void edgemoe_remap(const router *r, const remapping *m, const uint16_t *logits, int64_t tokens, float *probabilities,
                   int64_t *chosen, float *gates, int64_t *counts);
#endif
#endif
