/* Convolutions of channels over consecutive tokens, before a recurrence: for delta_net.c and state_space.c. */
#pragma once
#include "vectors/bf16.h"

#if COMPILED
typedef struct {
    int64_t taps, channels; /* inputs of a sum, this token's included; channels of a row */
    const float *weights;   /* [taps, channels], the oldest input's first */
    const float *bias;      /* [channels], added to the sums; NULL: none */
    const uint16_t *silu;   /* of bf16 numbers, [65536] */
} convolution;

/* Consecutive channels of a task: the first one among all channels, and among the task's own. */
typedef struct { int64_t first, own, count; } channels;

/* to [count] = column i of x [count, taps]. */
INLINE void inputs_of_tap(const uint16_t *x, int64_t taps, int64_t i, int64_t count, float *to) {
    for (int64_t j = 0; j < count; j++) to[j] = from_bf16(x[j * taps + i]);
}

/* Inputs from before the tokens of a call, into the first rows of inputs [taps - 1 + tokens, own]. before [channels, taps]: the
 * last inputs; NULL: there are none. */
AVX2 static inline void earlier_inputs(const convolution *c, const uint16_t *before, channels some, int64_t own, float *inputs) {
    for (int64_t i = 1; i < c->taps; i++, inputs += own) {
        const uint16_t *from = before + some.first * c->taps;
        if (!before) memset(inputs + some.own, 0, (size_t)some.count * sizeof *inputs);
        else if (c->taps == 4) inputs_of_tap(from, 4, i, some.count, inputs + some.own);
        else inputs_of_tap(from, c->taps, i, some.count, inputs + some.own);
    }
}

/* The convolution of some tokens, whose sums are rounded before and after silu. x: the first row's channels, `stride` numbers from
 * those of the next row; inputs as above; convolved [tokens, own]. */
AVX2 static inline void convolve(const convolution *c, const uint16_t *x, int64_t stride, channels some, int64_t own, int64_t tokens,
                                 float *inputs, float *convolved) {
    for (int64_t t = 0; t < tokens; t++) {
        float *in = inputs + t * own + some.own, *to = convolved + t * own + some.own;
        const uint16_t *row = x + t * stride + some.first;
        for (int64_t j = 0; j < some.count; j++) in[(c->taps - 1) * own + j] = from_bf16(row[j]);
        for (int64_t j = 0; j < some.count; j++) to[j] = in[j] * c->weights[some.first + j];
        for (int64_t tap = 1; tap < c->taps; tap++)
            for (int64_t j = 0; j < some.count; j++) to[j] += in[tap * own + j] * c->weights[tap * c->channels + some.first + j];
        for (int64_t j = 0; c->bias && j < some.count; j++) to[j] += c->bias[some.first + j];
        for (int64_t j = 0; j < some.count; j++) to[j] = from_bf16(c->silu[to_bf16(to[j])]);
    }
}
#endif
