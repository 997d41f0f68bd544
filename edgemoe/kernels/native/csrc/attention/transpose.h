/* Transposes matrices of float32. */
#pragma once
#include "../vectors/bf16.h"

#if COMPILED
/* To [cols, rows] = from [rows, cols], both multiples of 8. */
void transpose(const float *from, int64_t rows, int64_t cols, float *to);
#endif
