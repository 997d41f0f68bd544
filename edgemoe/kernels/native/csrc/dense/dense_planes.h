/* Products with dense weights of 4 bits. */
#pragma once
#include "../pool.h"

#if COMPILED
/* edgemoe_dense_product with a weight of 4, 5 or 6 bits: the bytes of storage/store/dense_groups.py. */
int dense_planes(pool *p, const uint8_t *weight, int64_t bits, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens, uint16_t *y);
#endif
