/* Products with dense bf16 weights by AVX512-BF16. */
#pragma once
#include "../vectors/bf16.h"

#if COMPILED
/* Numbers that are multiplied: bf16; or int8, by the scale of their row or column and rounded to bf16; or float32. */
enum numbers { BF16_NUMBERS, BY_ROW, BY_COLUMN, FLOAT32_NUMBERS };

/* A matrix [rows, cols]. */
typedef struct {
    const void *at;
    const uint16_t *scale; /* bf16 [rows] of BY_ROW, [cols] of BY_COLUMN */
    enum numbers numbers;  /* not FLOAT32_NUMBERS */
    int64_t rows, cols;
} numbers_matrix;

/* y[token * y_cols + row] of every row, of x[token * x_cols], for processors with AVX512-BF16. */
void dense_bf16(const numbers_matrix *w, const uint16_t *x, int64_t x_cols, int64_t tokens, int64_t y_cols, uint16_t *y);
#endif
