/* Operators on many rows, on all threads. */
#pragma once
#include "pool.h"

#if COMPILED
/* Adds weights[i] * rows[i] to the sum of tokens[i], one i after another: rows bf16 [count, cols], sums float32 [.., cols].
 * Returns 0 or OUT_OF_MEMORY. */
int edgemoe_add_rows(pool *p, const uint16_t *rows, const int64_t *tokens, const float *weights, int64_t count, int64_t cols,
                     float *sums);

/* edgemoe_rms_norm on all threads. Returns 0 or OUT_OF_MEMORY. */
int edgemoe_norm_rows(pool *p, const uint16_t *x, const void *weight, int wide, float epsilon, int64_t rows, int64_t cols,
                      uint16_t *y);
#endif
