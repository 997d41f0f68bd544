/* The same as amx.h in plain C, for tests. */
#pragma once
#include "../attention/block.h"
#include "../dense/strip.h"
#include "../experts/planes.h"

#if COMPILED
void gemm_block_emulated(const matrix *m, const expert *e, int64_t block, const int8_t *x, const float *scale, const float *sum,
                    int64_t stride, int64_t tokens, uint16_t *y);
void dense_strip_emulated(const dense_strip *s, int64_t tokens, float *total);

extern const block_path block_emulated;
#endif
