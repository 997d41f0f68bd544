/* The inner loops of dense_int8.c in AVX-512 with VNNI, where the processor has it. Each gives the bits of its AVX2 counterpart. */
#pragma once
#include "strip.h"

#if COMPILED
/* dense_int8.c: sums_of_row, lay_out for unsigned codes, and strip_256. */
void sums_of_row_vnni(const int8_t *w, int64_t columns, const int8_t *x, const int32_t *offset, int64_t chunks, float *to);
void dense_lay_out_vnni(const int8_t *w, int64_t cols, int64_t rows, int64_t columns, uint8_t *codes);
void dense_strip_vnni(const dense_strip *s, int64_t tokens, float *total);
#endif
