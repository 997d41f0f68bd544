/* Products with dense weights of 4 to 6 bits, and their rows. */
#pragma once
#include "../pool.h"

#if COMPILED
/* edgemoe_dense_product with a weight of 4, 5 or 6 bits: the bytes of storage/store/dense_groups.py. */
int dense_planes(pool *p, const uint8_t *weight, int64_t bits, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens, uint16_t *y);

/* y [cols] = a row of such a weight, rounded to bf16. Returns 0, or WRONG_SHAPE. */
int dense_planes_row(const uint8_t *weight, int64_t bits, int64_t rows, int64_t cols, int64_t row, uint16_t *y);
#endif
