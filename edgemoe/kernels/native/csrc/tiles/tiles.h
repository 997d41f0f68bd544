/* Products by tiles of 16 rows of 64 bytes (AMX): a group of 64 columns of 16 tokens and 16 rows is one instruction. */
#pragma once
#include "../experts/planes.h"
#include "../paths.h"

#if COMPILED
/* Most tokens of a gemm_block_tiles call. */
enum { TILE_CALL_TOKENS = 128 };

/* gemm.c: gemm_block by a path with tiles, for chunks of CHUNK columns and activations in A8, at level 8 in A14_HALVES. */
void gemm_block_tiles(enum path path, const matrix *m, const expert *e, int64_t block, const int8_t *x, const float *scale,
                      const float *sum, int64_t stride, int64_t tokens, uint16_t *y);

/* A dense product's x, 16-bit numbers 256 h + l in blocks of 16 tokens: h and l [cols / 64, 16, 16, 4] have of 64 columns
 * 16 times four of each token; scale [chunks, 16]. */
enum { DENSE_TILE_TOKENS = 16, DENSE_TILE_ROWS = 32, DENSE_TILE_COLS = 64 };

typedef struct dense_tiles dense_tiles;

/* Writes y[token * y_cols + row] of DENSE_TILE_ROWS rows of int8 weights and `tokens` tokens. */
typedef void (*dense_tiles_fn)(const dense_tiles *x, const int8_t *w, const uint16_t *row_scale, int64_t tokens, uint16_t *y,
                               int64_t y_cols);

struct dense_tiles {
    dense_tiles_fn product; /* NULL: x is not laid out */
    int8_t *h;
    uint8_t *l;
    float *scale;
    int64_t cols, chunks;
};

/* The product of a path; NULL if it has no tiles, or for columns that tiles do not divide. */
dense_tiles_fn dense_tiles_product(enum path path, int64_t cols);

size_t dense_tiles_bytes(int64_t tokens, int64_t cols);

/* Lays them out from `at`, of dense_tiles_bytes; a token that is not set has numbers of 0 where the last block is not full. */
void dense_tiles_place(dense_tiles *x, uint8_t *at, int64_t tokens, int64_t cols);

/* Takes a token's numbers q [cols] and scales [chunks] over. */
void dense_tiles_set(const dense_tiles *x, int64_t token, const int16_t *q, const float *scale);
#endif
