/* Selective state spaces (Mamba-2): convolution, recurrence and gated norm of consecutive tokens of some sequences. */
#pragma once
#include "convolution.h"
#include "delta_net.h"

#if COMPILED
/* A row of `projected` has z of the results' gate, the inputs of the convolution, which are all values, all keys and all queries,
 * and a number of each head's step. A group of heads shares keys and queries. */
typedef struct {
    int64_t groups, heads, key_dim, value_dim; /* heads: a multiple of groups */
    convolution conv;
    const uint16_t *added;    /* bf16 [heads], added to the steps, and rounded */
    const uint16_t *softplus; /* of bf16 numbers, [65536] */
    float least, most;        /* of a step after softplus */
    const float *factor;      /* [heads]: e^(factor step) of a state stays */
    const float *skip;        /* [heads], part of a value that is added to its result */
    const float *norm;        /* [heads value_dim], weight of the results' norm */
    int64_t norm_size;        /* numbers that are normed together */
    float epsilon;
    const float *wide_silu;   /* silu of bf16 numbers, not rounded, [65536] */
} state_space;

static inline int64_t space_values(const state_space *s) { return s->heads * s->value_dim; }

static inline int64_t space_channels(const state_space *s) { return space_values(s) + 2 * s->groups * s->key_dim; }

/* Numbers of a row of `projected`. */
static inline int64_t space_row_size(const state_space *s) { return space_values(s) + space_channels(s) + s->heads; }

/* out [rows, heads value_dim] of the rows of `count` sequences, runs [count], with states [heads, key_dim, value_dim]. The bits of
 * a token do not depend on the number of tokens in a call, nor on other sequences. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_state_space(pool *p, const state_space *s, const uint16_t *projected, int64_t count, const delta_run *runs, uint16_t *out);
#endif
