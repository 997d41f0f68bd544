/* One token through a block of quantized rows. */
#pragma once
#include "planes.h"

#if COMPILED
/* Multiplies one token with the 32 rows of a block; consecutive chunks lie `stride` chunks apart in x, and `stride`
 * numbers in scale and sum. */
void gemv_block(enum path path, const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x, const float *scale,
                const float *sum, int64_t stride, uint16_t *y);
#endif
