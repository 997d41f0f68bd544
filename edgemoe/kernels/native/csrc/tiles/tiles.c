/* The choice between AMX and its emulation, and a dense product's activations as tiles. */
#include "tiles.h"
#include "../dense/dense.h"

#if COMPILED
void gemm_block_amx(const matrix *m, const expert *e, int64_t block, const int8_t *x, const float *scale, const float *sum,
                    int64_t stride, int64_t tokens, uint16_t *y);
void gemm_block_emulated(const matrix *m, const expert *e, int64_t block, const int8_t *x, const float *scale, const float *sum,
                         int64_t stride, int64_t tokens, uint16_t *y);
void dense_product_amx(const dense_tiles *x, const int8_t *w, const uint16_t *row_scale, int64_t tokens, uint16_t *y, int64_t y_cols);
void dense_product_emulated(const dense_tiles *x, const int8_t *w, const uint16_t *row_scale, int64_t tokens, uint16_t *y,
                            int64_t y_cols);

void gemm_block_tiles(enum path path, const matrix *m, const expert *e, int64_t block, const int8_t *x, const float *scale,
                      const float *sum, int64_t stride, int64_t tokens, uint16_t *y) {
#if COMPILED_AMX
    if (path == PATH_AMX) gemm_block_amx(m, e, block, x, scale, sum, stride, tokens, y);
    else
#endif
        gemm_block_emulated(m, e, block, x, scale, sum, stride, tokens, y);
}

dense_tiles_fn dense_tiles_product(enum path path, int64_t cols) {
    if (cols % DENSE_TILE_COLS) return NULL;
#if COMPILED_AMX
    if (path == PATH_AMX) return dense_product_amx;
#endif
    return path == PATH_AMX_EMULATED ? dense_product_emulated : NULL;
}

/* Tokens in whole blocks. */
static int64_t padded(int64_t tokens) { return ceil_div(tokens, DENSE_TILE_TOKENS) * DENSE_TILE_TOKENS; }

size_t dense_tiles_bytes(int64_t tokens, int64_t cols) {
    return (size_t)padded(tokens) * (2 * (size_t)cols + sizeof(float) * (size_t)ceil_div(cols, DENSE_CHUNK));
}

void dense_tiles_place(dense_tiles *x, uint8_t *at, int64_t tokens, int64_t cols) {
    x->cols = cols, x->chunks = ceil_div(cols, DENSE_CHUNK);
    x->h = (int8_t *)at;
    x->l = at + padded(tokens) * cols;
    x->scale = (float *)(at + 2 * padded(tokens) * cols);
    memset(at, 0, dense_tiles_bytes(tokens, cols));
}

void dense_tiles_set(const dense_tiles *x, int64_t token, const int16_t *q, const float *scale) {
    enum { TOKENS = DENSE_TILE_TOKENS };
    const int64_t block = token / TOKENS, lane = token % TOKENS, at = block * TOKENS * x->cols;
    for (int64_t k = 0; k < x->cols; k += 4) {
        int8_t *h = x->h + at + k * TOKENS + 4 * lane;
        uint8_t *l = x->l + at + k * TOKENS + 4 * lane;
        for (int i = 0; i < 4; i++) h[i] = (int8_t)(q[k + i] >> 8), l[i] = (uint8_t)q[k + i];
    }
    for (int64_t c = 0; c < x->chunks; c++) x->scale[(block * x->chunks + c) * TOKENS + lane] = scale[c];
}
#endif
