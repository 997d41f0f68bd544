/* Products with dense weights, and norms. */
#pragma once
#include "pool.h"

#if defined(__x86_64__)
enum { DENSE_CHUNK = 256 }; /* columns per scale of 16-bit activations */

/* y [tokens, rows] = x [tokens, cols] W^T, x and y bf16; W is int8 with a scale per row, or bf16 if row_scale is NULL.
 * Returns 0, or -1 when out of memory. */
int edgemoe_dense_product(pool *p, const void *weight, const uint16_t *row_scale, int64_t rows, int64_t cols,
                          const uint16_t *x, int64_t tokens, uint16_t *y);

/* y = weight * bf16(x / sqrt(mean(x^2) + epsilon)), all bf16 [rows, cols], rounded where transformers rounds. */
void edgemoe_rms_norm(const uint16_t *x, const uint16_t *weight, float epsilon, int64_t rows, int64_t cols, uint16_t *y);
#endif
