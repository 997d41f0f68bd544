/* Softmax attention of query heads that share keys and values. */
#ifndef EDGEMOE_HEADS_H
#define EDGEMOE_HEADS_H
#include "../bf16.h"

#if defined(__x86_64__)
enum { HEADS = 4 }; /* that go over keys and values together: each is widened once for them */

typedef struct {
    int64_t count, dim, tokens, stride; /* heads; of a head, % 16 == 0; seen; from a head's scores to the next one's */
    float scaling;
    const uint16_t *keys, *values; /* [tokens, dim] */
    const float *queries;          /* [count, dim] */
    float *scores;                 /* room for [count, stride] */
    uint16_t *out;                 /* [count, dim] */
} heads;

/* Scores, softmax and the sum over values, in float32. A head's result is the same with others or without. stride is a
 * multiple of 8, and at least `tokens`. */
void attend(const heads *h);
#endif
#endif
