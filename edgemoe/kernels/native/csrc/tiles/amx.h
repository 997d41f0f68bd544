/* The kernels of products.h and attention.h by AMX, as gemm_block_tiles, dense_strip_tiles and a path of attention. */
#pragma once
#include "../attention/block.h"
#include "../dense/strip.h"
#include "../experts/planes.h"

#if COMPILED && COMPILED_AMX
void gemm_block_amx(const matrix *m, const expert *e, int64_t block, const int8_t *x, const float *scale, const float *sum,
                    int64_t stride, int64_t tokens, uint16_t *y);
void dense_strip_amx(const dense_strip *s, int64_t tokens, float *total);

extern const block_path block_amx;
#endif
