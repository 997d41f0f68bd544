/* Several tokens through a block of quantized rows. */
#pragma once
#include "planes.h"

#if COMPILED
enum { MAX_TOKENS = 64 }; /* of a call */

/* Multiplies up to MAX_TOKENS tokens with the rows of a block: 32, or the matrix's last 16. The path has no tiles. */
void gemm_block(enum path path, const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x, const float *scale,
                const float *sum, int64_t stride, int64_t tokens, uint16_t *y);
#endif
