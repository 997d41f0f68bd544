/* A strip: some chunks of 32 rows of a dense int8 weight, laid out for products with many tokens in 8 bits. */
#pragma once
#include "../block_rows.h"
#include "../vectors/bf16.h"

#if COMPILED
enum {
    DENSE_CHUNK = 64, /* columns per scale of 8-bit activations */
    DENSE_STRIP = 4,  /* chunks that are laid out at a time: a quarter of a first-level cache */
};

/* Tokens in 8 bits: q [chunks, tokens, DENSE_CHUNK], a shorter last chunk with zeros after it; scale, and offset, which is
 * 128 times the sum of q, [chunks, tokens]. */
typedef struct {
    int8_t *q;
    float *scale;
    int32_t *offset;
    int64_t tokens;
} dense_rows;

/* Some chunks of 32 rows of a weight, and of x: codes [chunks, DENSE_CHUNK / 4, 32, 4] have 128 added on AVX-512's
 * path and where takes_unsigned(dot) (vectors/dot.h) is true; otherwise they are signed. */
typedef struct {
    const uint8_t *codes;
    int64_t chunks;
    dense_rows x;
} dense_strip;
#endif
