/* Attention of one token of each of some sequences. */
#pragma once
#include "../pool.h"
#include "attention.h"

#if COMPILED
/* Attention of one token of each of `count` sequences, of kv [count]; a token's result does not depend on the others.
 *
 * qkv [count, attention_row_size], the outputs of the three projections, is overwritten. A token's key and value are
 * written to index past of its KV. cosine and sine are [count, rotated]; out is [count, heads value_dim]. Where shape->prepared, qkv is
 * [count, heads dim] and only read, and cosine and sine may be NULL. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE.
 */
int edgemoe_attention(pool *p, const attention_shape *shape, const attention_kv *kv, int64_t count, uint16_t *qkv,
                      const void *cosine, const void *sine, uint16_t *out);

/* Norms, clips and rotates a token's heads in place; writes its key and value to the KV cache. */
void attention_prepare(const attention_shape *shape, const attention_kv *kv, uint16_t *qkv, const void *cosine,
                       const void *sine);
#endif
