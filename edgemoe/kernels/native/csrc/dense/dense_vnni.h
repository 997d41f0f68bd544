/* The inner loops of dense_int8.c in AVX-512 with VNNI, where the processor has it. Each gives the bits of its AVX2 counterpart. */
#pragma once
#include "strip.h"

#if COMPILED
/* dense_int8.c: four_rows, lay_out for unsigned codes, and strip_256. */
void four_rows_vnni(const int8_t *const at[4], const dense_rows *x, int64_t cols, float out[4]);
void dense_lay_out_vnni(const int8_t *w, int64_t cols, int64_t rows, int64_t columns, uint8_t *codes);
void dense_strip_vnni(const dense_strip *s, int64_t tokens, float *total);
#endif
