/* Low-rank factors of an expert's projections: y += U (V x) after the product with the planes.
 *
 * V has a row over the projection's columns for each of `rank`, U transposed one over its rows. A row is groups of 64
 * numbers, the last one padded; a number is (code - 4) times the group's scale. A group's codes are 24 bytes, 3 of each of
 * eight lanes: lane l has the codes l, l + 8, .. l + 56 at bits 0, 3, .. 21 (storage/compensators/geometry.py). Sums are of
 * float32 and have one order, so a row's bits are its own.
 */
#pragma once
#include "../vectors/bf16.h"

#if COMPILED
/* Rows of 3-bit numbers: codes [rows, groups, 24], of which 4 bytes after the last are read too; bf16 scales [rows, groups]. */
typedef struct { const uint8_t *codes; const uint16_t *scales; } factor_rows;

typedef struct {
    factor_rows v, u;
    int64_t rank, rows, cols; /* of the projection, not padded */
} factors;

enum { PROJECTIONS = 3 };

/* An expert's factors: of gate, up and down; absent: not 0 while they are not in memory. */
typedef struct { factors of[PROJECTIONS]; int64_t absent; } compensator;

/* FACTOR_RANKS: of a call of factors_project. FACTOR_TOKENS: of one of either function, at most. */
enum { FACTOR_GROUP = 64, CODE_BYTES = 24, FACTOR_RANKS = 4, FACTOR_TOKENS = 2 };

/* t[token][i] = row `rank` + i of V times x[token], for i below FACTOR_RANKS and rank + i below f->rank. x has
 * zeros from f->cols to the next multiple of 8. */
void factors_project(const factors *f, int64_t rank, const uint16_t *const *x, int64_t tokens, float *t, int64_t t_stride);

/* Prefetches the same rows of U transposed, which later tasks read in pieces that lie apart. */
INLINE void factors_prefetch(const factors *f, int64_t rank) {
    const int64_t bytes = ceil_div(f->rows, FACTOR_GROUP) * CODE_BYTES;
    const uint8_t *rows = f->u.codes + rank * bytes, *end = rows + min_of(FACTOR_RANKS, f->rank - rank) * bytes;
    for (; rows < end; rows += 64) prefetch(rows);
}

/* Adds U t to the projection's rows [first, end) of y [tokens, y_stride], bf16; y and t start at the first token. */
void factors_add(const factors *f, int64_t first, int64_t end, const float *t, int64_t t_stride, int64_t tokens,
                 uint16_t *y, int64_t y_stride);
#endif
