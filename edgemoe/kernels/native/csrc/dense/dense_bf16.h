/* Products with dense bf16 weights by AVX512-BF16. */
#pragma once
#include "../vectors/bf16.h"

#if COMPILED
/* y[token * y_cols + row] of `rows` rows, for processors with AVX512-BF16. */
void dense_bf16(const uint16_t *w, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens, int64_t y_cols, uint16_t *y);
#endif
