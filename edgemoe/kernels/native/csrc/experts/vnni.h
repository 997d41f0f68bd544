/* The inner loops in AVX-512 with VNNI, where the processor has it. Each gives the bits of its AVX2 counterpart. */
#pragma once
#include "planes.h"

#if COMPILED
/* gemv.c: gemv_block. */
void gemv_block_vnni(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x, const float *scale,
                     const float *sum, int64_t stride, uint16_t *y);

/* The same for `tokens` tokens, 1 to FEW_TOKENS, at a level below 8; x, scale and sum are those of the first. */
enum { FEW_TOKENS = 4 };
void few_block_vnni(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x, const float *scale,
                    const float *sum, int64_t stride, int64_t tokens, uint16_t *y);

/* products.c: quantize_chunk in A8, of CHUNK columns. */
void quantize_a8_avx512(const uint16_t *x, int8_t *q, float *scale, float *sum);

/* join.c: join_fours. */
void join_fours_avx512(const matrix *m, const expert *e, int64_t block, int64_t c, uint8_t *tile);

/* gemm.c: adds a chunk's products of `rows` rows, 32 or 16, to `total` [tokens, BLOCK_ROWS]. `tile` has the chunk's
 * codes, `scales` the rows' scales and centres. */
void gemm_chunk_vnni(const uint8_t *tile, const uint8_t *scales, int64_t rows, int64_t level, int64_t chunk, const int8_t *x,
                     const float *scale, const float *sum, int64_t tokens, float *total);
#endif
