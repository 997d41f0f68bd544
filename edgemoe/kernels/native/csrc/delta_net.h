/* Gated delta nets: convolution, recurrence and norm of consecutive tokens of some sequences. */
#pragma once
#include "pool.h"

#if COMPILED
/* A row of `projected` has the inputs of the convolution, which are all queries, all keys and all values, then z of the output's
 * gate, and for each head of values: a number b of its rate, and `decays` numbers a of its decays. */
typedef struct {
    int64_t key_heads, heads; /* of keys, and of values: a multiple */
    int64_t key_dim, value_dim;
    int64_t taps;                /* of the convolution, this token's included */
    const float *conv;           /* [taps, channels], the oldest input's weights first */
    int64_t decays;              /* of a head: one, or one for each number of a key */
    const float *added, *factor; /* [heads, decays], [heads]: e^(factor softplus(a + added)) of a state stays */
    float lowest;                /* or e^(lowest sigmoid(-factor (a + added))); 0: not */
    int32_t rounded_decay;       /* the exponent is rounded to bf16 */
    const float *norm;           /* [value_dim], weight of the results' norm */
    float epsilon;
    int32_t rounded;             /* the norm's product is rounded before the gate */
    int32_t strict;              /* nothing in the norm is rounded */
    const uint16_t *silu, *sigmoid; /* tables of their values of bf16 numbers, [65536] */
    const float *wide_gate;         /* the gate's function, not rounded */
} delta_net;

/* The state of a sequence in one layer before a call, and where it is to be after it; the same place, or two that do not overlap. */
typedef struct {
    const uint16_t *conv;  /* [channels, taps], the last inputs; NULL: the sequence has no token */
    const float *state;    /* [heads, key_dim, value_dim]; NULL with conv */
    uint16_t *next_conv;
    float *next_state;
} delta_run;

static inline int64_t delta_channels(const delta_net *n) { return 2 * n->key_heads * n->key_dim + n->heads * n->value_dim; }

/* Numbers of a row of `projected`. */
static inline int64_t delta_row_size(const delta_net *n) { return delta_channels(n) + n->heads * (n->value_dim + 1 + n->decays); }

/* out [count, tokens, heads value_dim] of `tokens` tokens of each of `count` sequences, whose states are in runs [count]. The
 * bits of a token do not depend on the number of tokens in a call or on other sequences. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_delta_net(pool *p, const delta_net *n, const uint16_t *projected, int64_t count, int64_t tokens, const delta_run *runs,
                      uint16_t *out);
#endif
