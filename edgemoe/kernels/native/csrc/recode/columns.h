/* Codes of a matrix's columns with error feedback (storage/record/nested_codes.py). */
#pragma once
#include "../vectors/bf16.h"

#if COMPILED
enum { MOST_LEVELS_CODED = 3, MOST_COLUMNS_CODED = 64 };

/* Codes the columns [start, end) of a matrix, at most MOST_COLUMNS_CODED, with the bits of nested_codes' plain form.
 *
 * left: float32 [count, columns, rows], what each level still has to reproduce. upper: float32 [columns, columns], how far an
 * error reaches. steps, centres: float32 [columns, rows]. levels, importance: of each of `count` levels, ascending; one above 4
 * has codes of units of `unit` and a rest. Writes the codes to made [columns, rows], and errors [count, end - start, rows].
 * Returns 0, or WRONG_SHAPE. */
int edgemoe_code_columns(float rest, const float *left, const float *upper, const float *steps, const float *centres,
                         int64_t columns, int64_t rows, int64_t start, int64_t end, const int64_t *levels,
                         const float *importance, int64_t count, int64_t unit, uint8_t *made, float *errors);
#endif
