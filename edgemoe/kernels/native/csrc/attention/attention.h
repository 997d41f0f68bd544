/* A new token's attention. */
#ifndef EDGEMOE_ATTENTION_H
#define EDGEMOE_ATTENTION_H
#include "../pool.h"

#if defined(__x86_64__)
typedef struct {
    int64_t heads, kv_heads, dim;             /* dim % 16 == 0 */
    const uint16_t *q_norm, *k_norm;          /* weights; NULL: no norm */
    int64_t q_norm_size, k_norm_size;         /* consecutive numbers that are normed together */
    float q_epsilon, k_epsilon, scaling;
} attention_shape;

typedef struct {
    uint16_t *keys, *values;    /* [kv_heads, context, dim] */
    int64_t context, past, first; /* tokens: room for, there before this one, the first that it sees */
} attention_kv;

/* One sequence's new token.
 *
 * qkv [(heads + 2 kv_heads) dim], the three projections one after another, is overwritten. Its key and value go
 * to token kv->past. cosine and sine are [dim]; out is [heads dim]. Returns 0, or -1 where there is no memory.
 */
int edgemoe_attention(pool *p, const attention_shape *shape, const attention_kv *kv, uint16_t *qkv,
                      const uint16_t *cosine, const uint16_t *sine, uint16_t *out);

/* The same of `rows` consecutive tokens, of which kv->past says where the first goes and `window` how many of the latest
 * each sees, 0: all; kv->first is not looked at. qkv, cosine, sine and out have a row for each. At most 128 heads may
 * share one of keys. */
int edgemoe_attention_rows(pool *p, const attention_shape *shape, const attention_kv *kv, int64_t rows, int64_t window,
                           uint16_t *qkv, const uint16_t *cosine, const uint16_t *sine, uint16_t *out);

/* A token's norms and rotation, in place; its key and value into the KV. */
void attention_prepare(const attention_shape *shape, const attention_kv *kv, uint16_t *qkv, const uint16_t *cosine,
                       const uint16_t *sine);
#endif
#endif
