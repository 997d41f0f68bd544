/* The inner loops of products with AVX-512's instructions for small integers, where the processor has them. Each gives
 * what the one without _vnni gives, bit for bit. */
#ifndef EDGEMOE_VNNI_H
#define EDGEMOE_VNNI_H
#include "../dense.h"
#include "planes.h"

#if defined(__x86_64__)
/* Whether products use what is declared here: set by edgemoe_vnni (pool.c) alone. */
extern int use_vnni;

/* A row of int8 weights times a token; and 4 rows times 4 tokens, out[row][token]: dense.c. cols % 16 == 0. */
float int8_row_vnni(const int8_t *w, const int16_t *x, const float *scale, int64_t cols);
void int8_tile_vnni(const int8_t *w, const int16_t *x, const float *scale, int64_t cols, int64_t chunks, float out[4][4]);

/* One token through an expert's rows: one_token.c. */
void rows_of_one_token_vnni(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                            const float *scale, const float *sum, int64_t stride, uint16_t *y);

/* Adds a chunk's share of `rows` rows, 32 or 16, of every token: many_tokens.c. Its codes are in `tile`, the rows'
 * scales and centres in `pairs`, the tokens' totals OF_ROWS apart. */
void chunk_vnni(const uint8_t *tile, const uint8_t *pairs, int64_t rows, int64_t level, int64_t chunk, const int8_t *x,
                const float *scale, const float *sum, int64_t tokens, float *total);

/* c [OUTER, LANES] = c factor + a b, float32: a[row * a_row + k * a_deep], b [depth, LANES], a factor for each lane.
 * Without factors c is only written. The same order of sums as in attention_rows.c. */
enum { OUTER = 8, LANES = 32 };
void float_tile_512(const float *a, int64_t a_row, int64_t a_deep, const float *b, int64_t depth, const float *factor,
                    float *c);
#endif
#endif
