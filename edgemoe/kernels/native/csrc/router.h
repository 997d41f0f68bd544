/* The router: a token's top-k experts by the scores of its product. */
#ifndef EDGEMOE_ROUTER_H
#define EDGEMOE_ROUTER_H
#include "pool.h"

#if COMPILED
typedef struct {
    const void *weight; /* [count, cols], bf16, or float32 where `wide_weight` is not 0 */
    int64_t count, cols, k;
    int32_t normalise, rounded; /* gate weights of the chosen add up to 1; are rounded to bf16 */
    int32_t precise;    /* the product is float32, not rounded to bf16 */
    int32_t sigmoid;    /* an expert's score is the sigmoid of its own number, not its part of a softmax */
    int32_t wide_weight; /* of a precise router */
    int32_t raw_choice; /* a precise router's choice is by its product and `bias`, not by scores and `bias` */
    const float *bias;  /* [count], added to the scores for the choice alone; NULL: none */
    int64_t groups;     /* consecutive experts of equal number, of which `best_groups` are taken; below 2: all are */
    int64_t best_groups;
    int64_t group_best; /* a group's rank goes by the sum of so many of its best scores, 1 or 2 */
    float scale;        /* factor of the gate weights; 0: none */
    float least;        /* added to the sum that gate weights are divided by */
    float mixing;       /* above 0: a precise router's two experts are chosen as edgemoe_router_topk says; 0: not */
    const uint16_t *product_bias; /* [count], added to a precise router's product; NULL: none */
    int64_t rounded_product;      /* a precise router's product is rounded to bf16, after product_bias was added */
    int64_t rounded_scores;       /* a precise router's scores are rounded to bf16, and all that is computed of them */
    const float *state_norm;      /* [cols], weight of a norm of the states that the product takes; NULL: they stay */
    const uint16_t *state_scale;  /* bf16 [cols], is multiplied with normed states, and then state_factor is */
    float state_epsilon, state_factor;
    const float *expert_scale;    /* [count], factors of the experts' gate weights, after all else; NULL: none */
} router;

/* y = the states that the product of a router with a norm of its own takes, of x, both [tokens, cols]. Returns 0, or
 * OUT_OF_MEMORY. */
int edgemoe_router_states(pool *p, const router *r, const uint16_t *x, int64_t tokens, uint16_t *y);

/* From states x [tokens, x_cols], normed where the router does so: logits [tokens, count], bf16, or float32 where the router is precise; and of each token k
 * experts by their scores, and their gate weights, both [tokens, k], the largest weight first. Of equal scores the first is
 * taken. scores has room for twice `count`.
 *
 * Where `mixing` is not 0, k is 2. The experts are those of the two largest numbers of the product, which is rounded. A gate weight
 * is the expert's part of a softmax over all numbers that are at most `mixing` times their magnitude below it, for the second one
 * without the first; all is rounded to bf16 (SparseMixer, Phi-3.5-MoE).
 *
 * Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_router_topk(pool *p, const router *r, const uint16_t *x, int64_t tokens, int64_t x_cols, void *logits,
                        float *scores, int64_t *chosen, float *gates);

/* Scores [count] of a token's experts, of its logits [count], in the type of edgemoe_router_topk: parts of a softmax, or sigmoids. */
void router_scores(const router *r, const void *logits, float *scores);

/* Gate weights [k] of the chosen experts [k] of a token with these scores, before factors of experts. */
void router_gates(const router *r, const float *scores, const int64_t *chosen, float *gates);
#endif
#endif
