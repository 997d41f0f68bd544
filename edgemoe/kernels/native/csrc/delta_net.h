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

/* Most guesses among the rows of a sequence. */
enum { MOST_GUESSES = 16 };

/* The rows of one sequence in a call, and its state in one layer before them and after them: in the same place, or in two that do not
 * overlap. A row is what the layer's function takes of a token. Guesses are the last rows: they have results, and the state after the
 * call does not have them. They are copied to `kept`, and are `earlier` rows of the next call as far as they were right. */
typedef struct {
    const uint16_t *conv;    /* [channels, taps], the last inputs; NULL: the sequence has no token */
    const float *state;      /* [heads, key_dim, value_dim]; NULL with conv */
    uint16_t *next_conv;
    float *next_state;
    const uint16_t *earlier; /* rows before those of the call that the state does not have */
    uint16_t *kept;          /* space for the guesses' rows */
    int64_t earlier_count;
    int64_t first, tokens, guesses; /* number of its first row, of its rows, and of the guesses among them */
} delta_run;

/* Rows of all runs; 0: a run has no row that is no guess, or too many guesses. */
static inline int64_t delta_rows(const delta_run *runs, int64_t count) {
    int64_t rows = 0;
    for (const delta_run *r = runs; r < runs + count; rows += r++->tokens)
        if (r->guesses < 0 || r->guesses >= r->tokens || r->guesses > MOST_GUESSES || r->earlier_count < 0) return 0;
    return rows;
}

/* Copies the guesses' rows, of `size` numbers each. */
static inline void delta_keep_guesses(const delta_run *runs, int64_t count, const uint16_t *projected, int64_t size) {
    for (const delta_run *r = runs; r < runs + count; r++)
        if (r->guesses) memcpy(r->kept, projected + (r->first + r->tokens - r->guesses) * size, (size_t)(r->guesses * size) * sizeof *projected);
}

static inline int64_t delta_channels(const delta_net *n) { return 2 * n->key_heads * n->key_dim + n->heads * n->value_dim; }

/* Numbers of a row of `projected`. */
static inline int64_t delta_row_size(const delta_net *n) { return delta_channels(n) + n->heads * (n->value_dim + 1 + n->decays); }

/* out [rows, heads value_dim] of the rows of `count` sequences, runs [count]. The bits of a token do not depend on the number of
 * tokens in a call or on other sequences. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_delta_net(pool *p, const delta_net *n, const uint16_t *projected, int64_t count, const delta_run *runs, uint16_t *out);
#endif
