/* Products with dense weights, and norms. */
#pragma once
#include "../pool.h"

#if COMPILED
/* A weight W [rows, cols]. */
typedef struct {
    const void *weight;        /* bf16, int8, or the bytes of storage/store/dense_groups.py */
    const uint16_t *row_scale; /* bf16 [rows], of int8; otherwise NULL */
    int64_t rows, cols, bits;  /* 16, 8, 6, 5 or 4 bits per weight */
} dense_weight;

/* y [tokens, y_cols] = x [tokens, x_cols] W^T, x and y bf16. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_dense_product(pool *p, const dense_weight *w, const uint16_t *x, int64_t tokens, int64_t x_cols, uint16_t *y,
                          int64_t y_cols);

/* A matrix W [rows, cols] for each of some heads: bf16, or int8 with scales, by which it is multiplied and rounded to bf16. */
typedef struct {
    const void *weight;
    const uint16_t *scale; /* bf16: of each head's rows, or columns; NULL: W is bf16 */
    int64_t scale_stride;  /* numbers from a head's scales to those of the next one */
    int64_t by_column;     /* scales are of columns */
    int64_t heads, stride; /* numbers from a head's W to the next one's */
    int64_t rows, cols;
    int64_t x_stride, y_stride; /* the same of x and y */
    int64_t x_cols, y_cols; /* numbers from a token's x of a head, and y, to the next token's */
} dense_heads;

/* y = x W^T for each head, x and y bf16. Bits are those of edgemoe_dense_product with
 * a bf16 weight. */
int edgemoe_dense_heads(pool *p, const dense_heads *h, const uint16_t *x, int64_t tokens, uint16_t *y);

/* y [tokens, rows] = x [tokens, cols] W^T, all float32. A token's bits do not depend on the number of tokens. */
int edgemoe_wide_product(pool *p, const float *weight, int64_t rows, int64_t cols, const float *x, int64_t tokens, float *y);

/* The same with bf16 x, and W in bf16 or float32; the bits are those that float32 copies give. */
int edgemoe_precise_product(pool *p, const void *weight, int wide_weight, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens,
                            float *y);

/* 1 / sqrt(mean(x^2) + epsilon) of x [cols]. */
float edgemoe_rms_factor(const uint16_t *x, int64_t cols, float epsilon);

/* Forms of a norm: the weight is bf16 [cols]; it is float32, and only the product is rounded; the mean is subtracted first, and
 * the weight is float32 [2, cols], factors and then numbers that are added to the products. */
enum { NARROW_NORM, WIDE_NORM, CENTRED_NORM };

/* y = weight * bf16(x / sqrt(mean(x^2) + epsilon)), all bf16 [rows, cols], rounded where transformers rounds. `wide` is the form
 * of the norm. */
void edgemoe_rms_norm(const uint16_t *x, const void *weight, int wide, float epsilon, int64_t rows, int64_t cols, uint16_t *y);
#endif
