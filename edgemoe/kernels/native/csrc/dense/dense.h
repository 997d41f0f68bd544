/* Products with dense weights, and norms. */
#pragma once
#include "../paths.h"
#include "../pool.h"

#if COMPILED
/* y [tokens, y_cols] = x [tokens, x_cols] W^T, x and y bf16; W is int8 with a scale per row, or bf16 if row_scale is NULL.
 * Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_dense_product(pool *p, const void *weight, const uint16_t *row_scale, int64_t rows, int64_t cols,
                          const uint16_t *x, int64_t tokens, int64_t x_cols, uint16_t *y, int64_t y_cols);

/* dense_int8.c: the same with an int8 weight. */
int dense_int8(pool *p, const int8_t *weight, const uint16_t *row_scale, int64_t rows, int64_t cols, const uint16_t *x,
               int64_t tokens, uint16_t *y);

enum {
    DENSE_CHUNK = 64, /* columns per scale of 8-bit activations */
    DENSE_STRIP = 4,  /* chunks that are laid out at a time: a quarter of a first-level cache */
};

/* Tokens in 8 bits: q [chunks, tokens, DENSE_CHUNK], a shorter last chunk with zeros behind it; scale, and offset, which is
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

/* What lies PREFETCH_DISTANCE behind column k of a row that is read together with the three behind it. */
INLINE const int8_t *dense_ahead(const int8_t *row, int64_t k, int64_t cols) {
    const int64_t ahead = k + PREFETCH_DISTANCE;
    return row + (ahead < cols ? ahead : ahead + 3 * cols);
}

/* Whether products with bf16 weights go through dense_bf16. edgemoe_bf16 sets it to `use`, on a processor with AVX512-BF16;
 * below 0 leaves it; it returns what it is now. */
extern int use_bf16;
int edgemoe_bf16(int use);

/* dense_bf16.c: y[token * y_cols + row] of `rows` rows, for processors with AVX512-BF16. */
void dense_bf16(const uint16_t *w, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens, int64_t y_cols, uint16_t *y);

/* y = weight * bf16(x / sqrt(mean(x^2) + epsilon)), all bf16 [rows, cols], rounded where transformers rounds. */
void edgemoe_rms_norm(const uint16_t *x, const uint16_t *weight, float epsilon, int64_t rows, int64_t cols, uint16_t *y);
#endif
