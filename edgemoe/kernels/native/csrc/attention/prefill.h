/* Attention of several consecutive tokens. */
#pragma once
#include "../pool.h"
#include "attention.h"

#if COMPILED
/* Attention of `rows` consecutive tokens, the first at index kv->past; kv->first is ignored. Each attends to the latest
 * `window` tokens, itself included; 0: to all; and to `ahead` [rows] of the tokens after it, unless NULL: their ends ascend. qkv, cosine, sine and out have a row per token, as in edgemoe_attention. At most 128 heads share a
 * key head. received [past + rows], unless NULL, becomes the attention that each token receives from the rows from `counted`
 * on: the sum over them of the mean over heads. */
int edgemoe_attention_rows(pool *p, const attention_shape *shape, const attention_kv *kv, int64_t rows, int64_t window,
                           const int32_t *ahead, uint16_t *qkv, const void *cosine, const void *sine, uint16_t *out, int64_t counted,
                           float *received);

/* Bytes of edgemoe_attention_rows' scratch on so many threads. tokens: those that receive attention, if it is counted; else 0. */
int64_t edgemoe_attention_scratch(int64_t threads, int64_t dim, int64_t tokens);
#endif
