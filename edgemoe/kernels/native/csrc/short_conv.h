/* Gated short convolutions: consecutive tokens of some sequences. */
#pragma once
#include "delta_net.h"

#if COMPILED
/* Most inputs that a short convolution adds up. */
enum { MOST_TAPS = 16 };

/* A row of `projected` has b, c and x, `channels` numbers of each. A token's result is c conv(b x). */
typedef struct {
    int64_t channels, taps; /* taps: of the convolution, this token's included; at most MOST_TAPS */
    const float *conv;      /* [taps, channels], the oldest input's weights first */
    const float *bias;      /* [channels], added to the convolution; NULL: none */
} short_conv;

/* out [rows, channels] of the rows of `count` sequences, runs [count], whose states have the last inputs alone. The bits of a token
 * do not depend on the number of tokens in a call. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_short_conv(pool *p, const short_conv *s, const uint16_t *projected, int64_t count, const delta_run *runs, uint16_t *out);
#endif
