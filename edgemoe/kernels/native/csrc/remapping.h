/* Tokens of a step that agree on experts (edgemoe/policy/remapping.py). */
#pragma once
#include "router.h"

#if COMPILED
typedef struct {
    float alpha;         /* bins for each unit of a logit */
    int64_t bins;        /* below the likeliest expert's; the last has all lower logits */
    int64_t *popularity; /* [count], scratch */
} remapping;

/* Chooses the experts of a step's tokens again: those of one bin by how popular they are in the step.
 *
 * logits [tokens, count], chosen and gates [tokens, k] are of edgemoe_router_topk; chosen and gates change. Experts are ranked by
 * logits, or where the router has a bias for the choice by logarithms of its biased scores, and of a router with groups those in
 * the groups of a token's own experts. Gate weights are the router's. scratch has room for three times `count`. counts[0] gets the
 * distinct experts chosen before, counts[1] the pairs that were not. */
void edgemoe_remap(const router *r, const remapping *m, const void *logits, int64_t tokens, float *scratch, int64_t *chosen, float *gates,
                   int64_t *counts);
#endif
