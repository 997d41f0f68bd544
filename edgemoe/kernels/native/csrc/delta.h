/* The recurrence of linear attention, token by token. */
#pragma once
#include "pool.h"

#if COMPILED
/* The recurrence of consecutive tokens of one sequence, for each of `heads` heads of values, with its key head's q and k.
 * It is the gated delta rule, q and k divided by their norms, q also by sqrt(key_dim):
 *   state = e^decay state;  state += k (rate (v - k state));  out = q state.
 * q, k [tokens, key_heads, key_dim], v and out [tokens, heads, value_dim], bf16; decay [tokens, heads, decays] and rate
 * [tokens, heads], float32; state [heads, key_dim, value_dim], float32, is read and written.
 * heads % key_heads == 0; decays is 1, or key_dim where each number of a key has its own. A token's bits do not depend on
 * the number of tokens in a call. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_delta_rule(pool *p, const uint16_t *q, const uint16_t *k, const uint16_t *v, const float *decay, const float *rate,
                       int64_t tokens, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim,
                       int64_t decays, float *state, uint16_t *out);
#endif
