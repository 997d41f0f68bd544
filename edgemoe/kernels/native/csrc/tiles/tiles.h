/* Products by tiles of 16 rows of 64 bytes (AMX): a group of 64 columns of 16 tokens and 16 rows is one instruction. */
#pragma once
#include "../dense/strip.h"
#include "../experts/planes.h"
#include "../paths.h"

#if COMPILED
/* gemm_block (experts/gemm.h) by a path with tiles, for chunks of CHUNK columns and activations in A8, at level 8 in A14_HALVES. */
void gemm_block_tiles(enum path path, const matrix *m, const expert *e, int64_t block, const int8_t *x, const float *scale,
                      const float *sum, int64_t stride, int64_t tokens, uint16_t *y);

/* dense_strip_vnni (dense/dense_vnni.h) by a path with tiles, with signed codes. */
void dense_strip_tiles(enum path path, const dense_strip *s, int64_t tokens, float *total);
#endif
