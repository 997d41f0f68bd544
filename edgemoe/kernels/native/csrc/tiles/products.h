/* The kernels of amx.c and emulated.c over their macros: NAME, TARGET, operations on tiles, and VECTOR, 16 numbers of
 * float32. */
#include "../experts/vnni.h"
#include "tiles.h"
#include "../dense/dense.h"

#if COMPILED

/* Adds 16 tokens' products with half a block's codes, of `chunks` chunks, to acc, total [tokens, BLOCK_ROWS]. A product
 * is stored AHEAD chunks before it is scaled, so that the tiles work while the vectors do. */
enum { AHEAD = 2, BUFFERS = AHEAD + 1 };

enum { STRIP = 8 }; /* chunks whose codes are joined at a time: half of a first-level cache */

/* What the products of a strip share. */
typedef struct {
    const uint8_t *codes;                 /* [chunks, CHUNK / 4, BLOCK_ROWS, 4], of the half's first row */
    const uint8_t *scales[STRIP];         /* and centres, of the half's first row */
    const int8_t *x;                      /* of the first token */
    int64_t x_stride, chunks;             /* bytes from a chunk to the next */
    float by[STRIP][16], shift[STRIP][16], sum[STRIP][16]; /* of the tokens */
} strip;

INLINE_TILES void NAME(product_0)(tiles_state *tiles, const uint8_t *codes, const int8_t *x, int level_8, int32_t to[2][16][16]) {
    TILE_ZERO(0);
    TILE_LOAD(4, codes, 4 * BLOCK_ROWS);
    TILE_LOAD(6, x, level_8 ? 2 * CHUNK : CHUNK);
    TILE_DOT_UNSIGNED(0, 6, 4);
    TILE_STORE(0, to[0], 64);
    if (!level_8) return;
    TILE_ZERO(1);
    TILE_LOAD(6, x + CHUNK, 2 * CHUNK);
    TILE_DOT_UNSIGNED(1, 6, 4);
    TILE_STORE(1, to[1], 64);
}

/* product_0 with the other half of the tiles, so that two products in turn do not wait for each other. */
INLINE_TILES void NAME(product_1)(tiles_state *tiles, const uint8_t *codes, const int8_t *x, int level_8, int32_t to[2][16][16]) {
    TILE_ZERO(2);
    TILE_LOAD(5, codes, 4 * BLOCK_ROWS);
    TILE_LOAD(7, x, level_8 ? 2 * CHUNK : CHUNK);
    TILE_DOT_UNSIGNED(2, 7, 5);
    TILE_STORE(2, to[0], 64);
    if (!level_8) return;
    TILE_ZERO(3);
    TILE_LOAD(7, x + CHUNK, 2 * CHUNK);
    TILE_DOT_UNSIGNED(3, 7, 5);
    TILE_STORE(3, to[1], 64);
}

INLINE_TILES void NAME(product)(tiles_state *tiles, const strip *s, int64_t c, int level_8, int32_t to[2][16][16]) {
    const uint8_t *codes = s->codes + c * CHUNK * BLOCK_ROWS;
    if (c % 2) NAME(product_1)(tiles, codes, s->x + c * s->x_stride, level_8, to);
    else NAME(product_0)(tiles, codes, s->x + c * s->x_stride, level_8, to);
}

/* `tokens`: a constant 16, or fewer. */
INLINE_TILES void NAME(strip_of)(tiles_state *tiles, const strip *s, int level_8, int tokens, float *total) {
    _Alignas(64) int32_t to[BUFFERS][2][16][16];
    VECTOR acc[16];
    for (int t = 0; t < tokens; t++) acc[t] = LOAD(total + t * BLOCK_ROWS);
    for (int64_t c = 0; c < AHEAD && c < s->chunks; c++) NAME(product)(tiles, s, c, level_8, to[c % BUFFERS]);
    for (int64_t c = 0; c < s->chunks; c++) {
        if (c + AHEAD < s->chunks) NAME(product)(tiles, s, c + AHEAD, level_8, to[(c + AHEAD) % BUFFERS]);
        const VECTOR scale = SCALES(s->scales[c]), centre = CENTRES(s->scales[c]);
        for (int t = 0; t < tokens; t++) {
            const VECTOR codes = level_8 ? SHIFTED(to[c % BUFFERS][0][t], to[c % BUFFERS][1][t], 7) : NUMBERS(to[c % BUFFERS][0][t]);
            const VECTOR units = FMA(codes, ALL(s->by[c][t]), ALL(s->shift[c][t]));
            acc[t] = FMA(centre, ALL(s->sum[c][t]), FMA(scale, units, acc[t]));
        }
    }
    for (int t = 0; t < tokens; t++) STORE(total + t * BLOCK_ROWS, acc[t]);
}

/* The tokens' numbers of a strip: from `scale` and `sum`, `stride` numbers a chunk. */
INLINE_TILES void NAME(strip_scales)(strip *s, int64_t level, const float *scale, const float *sum, int64_t stride, int tokens) {
    const float unit = code_unit(level), zero = zero_point(level);
    for (int64_t c = 0; c < s->chunks; c++, scale += stride, sum += stride)
        for (int t = 0; t < tokens; t++) {
            s->by[c][t] = unit * scale[t];
            s->shift[c][t] = zero * sum[t];
            s->sum[c][t] = sum[t];
        }
}

TARGET static void NAME(strip_products)(tiles_state *tiles, const strip *s, int level_8, int tokens, float *total) {
    NAME(configure)(tiles, tokens);
    if (level_8 && tokens == 16) NAME(strip_of)(tiles, s, 1, 16, total);
    else if (level_8) NAME(strip_of)(tiles, s, 1, tokens, total);
    else if (tokens == 16) NAME(strip_of)(tiles, s, 0, 16, total);
    else NAME(strip_of)(tiles, s, 0, tokens, total);
}

/* A strip's chunks from `first` on with all tokens. */
TARGET static void NAME(strip_tokens)(tiles_state *tiles, const matrix *m, const expert *e, int64_t block, int64_t first,
                                      int64_t chunks, int64_t rows, const uint8_t *codes, const int8_t *x, const float *scale, const float *sum, int64_t stride,
                                      int64_t tokens, float *total) {
    const int64_t row_bytes = activation_bytes(e->level) * CHUNK;
    for (int64_t t = 0; t < tokens; t += 16) {
        const int now = (int)min_of(tokens - t, 16);
        strip s = {.x = x + t * row_bytes, .x_stride = stride * row_bytes, .chunks = chunks};
        NAME(strip_scales)(&s, e->level, scale + t, sum + t, stride, now);
        for (int64_t r = 0; r < rows; r += 16) {
            s.codes = codes + 4 * r;
            for (int64_t c = 0; c < chunks; c++) s.scales[c] = scales_of(m, e, block, first + c, CHUNK) + 4 * r;
            NAME(strip_products)(tiles, &s, e->level == 8, now, total + t * BLOCK_ROWS + r);
        }
    }
}

TARGET void NAME(gemm_block)(const matrix *m, const expert *e, int64_t block, const int8_t *x, const float *scale,
                                    const float *sum, int64_t stride, int64_t tokens, uint16_t *y) {
    _Alignas(64) uint8_t codes[STRIP * CHUNK * BLOCK_ROWS];
    _Alignas(64) float total[TILE_CALL_TOKENS * BLOCK_ROWS];
    const int64_t rows = min_of(m->rows - block * BLOCK_ROWS, BLOCK_ROWS), all = m->cols / CHUNK;
    tiles_state tiles = {0};
    memset(total, 0, sizeof *total * (size_t)(tokens * BLOCK_ROWS));
    for (int64_t first = 0; first < all; first += STRIP) {
        const int64_t chunks = min_of(all - first, STRIP);
        for (int64_t c = 0; c < chunks; c++) {
            JOIN(m, e, block, first + c, codes + c * CHUNK * BLOCK_ROWS);
            prefetch_scales(m, e, block, first + c, CHUNK);
        }
        NAME(strip_tokens)(&tiles, m, e, block, first, chunks, rows, codes, x + activation_bytes(e->level) * CHUNK * first * stride,
                           scale + first * stride, sum + first * stride, stride, tokens, total);
    }
    TILES_RELEASE();
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) y[t * m->rows + r] = to_bf16(total[t * BLOCK_ROWS + r]);
}

/* Adds a chunk of `steps` times 64 columns of 32 rows and 16 tokens to total [32, 16]: rows in two tiles, h and l in two. */
INLINE_TILES void NAME(dense_chunk)(tiles_state *tiles, const int8_t *w, int64_t cols, const int8_t *h, const uint8_t *l, int64_t steps,
                                    const float *scale, float *total) {
    _Alignas(64) int32_t to[4][16][16];
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < steps; k++, w += 64, h += 1024, l += 1024) {
        TILE_LOAD(4, w, cols);
        TILE_LOAD(5, w + 16 * cols, cols);
        TILE_LOAD(6, h, 64);
        TILE_LOAD(7, l, 64);
        TILE_DOT_SIGNED(0, 4, 6);
        TILE_DOT_UNSIGNED(1, 4, 7);
        TILE_DOT_SIGNED(2, 5, 6);
        TILE_DOT_UNSIGNED(3, 5, 7);
    }
    TILE_STORE(0, to[0], 64);
    TILE_STORE(1, to[1], 64);
    TILE_STORE(2, to[2], 64);
    TILE_STORE(3, to[3], 64);
    const VECTOR by = LOAD(scale);
    for (int r = 0; r < DENSE_TILE_ROWS; r++)
        STORE(total + 16 * r, FMA(SHIFTED(to[r / 16 * 2][r % 16], to[r / 16 * 2 + 1][r % 16], 8), by, LOAD(total + 16 * r)));
}

TARGET void NAME(dense_product)(const dense_tiles *x, const int8_t *w, const uint16_t *row_scale, int64_t tokens, uint16_t *y,
                                       int64_t y_cols) {
    enum { STEPS = DENSE_CHUNK / DENSE_TILE_COLS };
    tiles_state tiles = {0};
    NAME(configure)(&tiles, 16);
    for (int64_t t = 0; t < tokens; t += DENSE_TILE_TOKENS) {
        _Alignas(64) float total[DENSE_TILE_ROWS * 16] = {0};
        const int64_t at = t * x->cols, steps = x->cols / DENSE_TILE_COLS;
        for (int64_t c = 0; c < x->chunks; c++) {
            const int64_t from = c * STEPS;
            NAME(dense_chunk)(&tiles, w + from * DENSE_TILE_COLS, x->cols, x->h + at + from * 1024, x->l + at + from * 1024,
                              min_of(steps - from, STEPS), x->scale + (t * x->chunks + c * 16), total);
        }
        for (int64_t j = 0; j < min_of(tokens - t, 16); j++)
            for (int64_t r = 0; r < DENSE_TILE_ROWS; r++)
                y[(t + j) * y_cols + r] = to_bf16(from_bf16(row_scale[r]) * total[16 * r + j]);
    }
    TILES_RELEASE();
}
#endif
