/* Products with dense int8 weights. */
#pragma once
#include "../pool.h"

#if COMPILED
/* edgemoe_dense_product with an int8 weight. */
int dense_int8(pool *p, const int8_t *weight, const uint16_t *row_scale, int64_t rows, int64_t cols, const uint16_t *x,
               int64_t tokens, uint16_t *y);
#endif
