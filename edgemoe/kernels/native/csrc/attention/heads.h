/* Softmax attention of query heads that share keys and values. */
#pragma once
#include "../bf16.h"

#if defined(__x86_64__)
enum { HEADS = 4 }; /* heads that share each widened key and value */

typedef struct {
    int64_t count, dim, tokens, stride; /* heads, % 16 == 0, attended tokens, scores per head */
    float scaling;
    const uint16_t *keys, *values; /* [tokens, dim] */
    const float *queries;          /* [count, dim] */
    float *scores;                 /* scratch [count, stride] */
    uint16_t *out;                 /* [count, dim] */
} heads;

/* Computes scores, softmax and the sum over values in float32. A head's result does not depend on the other heads.
 * stride is a multiple of 8 and at least `tokens`. */
void attend(const heads *h);
#endif
