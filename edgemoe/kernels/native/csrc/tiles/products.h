/* The kernels of amx.c and emulated.c over their macros: NAME, TARGET, operations on tiles, and VECTOR, 16 numbers of
 * float32. */
#include "../dense/strip.h"
#include "../experts/planes.h"

#if COMPILED

/* Adds 16 tokens' products with half a block's codes, of `chunks` chunks, to acc, total [tokens, BLOCK_ROWS]. A product
 * is stored AHEAD chunks before it is scaled, so that the tiles work while the vectors do. */
enum { AHEAD = 2, BUFFERS = AHEAD + 1 };

/* Of a strip: experts at level 8, or at 4 and 2; signed codes of dense weights, which have neither scales nor centres here. */
enum kind { LEVEL_8, LEVEL_4, DENSE };

enum { STRIP = 8 }; /* chunks whose codes are joined at a time: half of a first-level cache */

/* What the products of a strip share. */
typedef struct {
    const uint8_t *codes;                 /* [chunks, CHUNK / 4, BLOCK_ROWS, 4], of the half's first row */
    const uint8_t *scales[STRIP];         /* and centres, of the half's first row */
    const int8_t *x;                      /* of the first token */
    int64_t x_stride, chunks;             /* bytes from a chunk to the next */
    float by[STRIP][16], shift[STRIP][16], sum[STRIP][16]; /* of the tokens */
} strip;

INLINE_TILES void NAME(product_0)(tiles_state *tiles, const uint8_t *codes, const int8_t *x, enum kind kind, int32_t to[2][16][16]) {
    TILE_ZERO(0);
    TILE_LOAD(4, codes, 4 * BLOCK_ROWS);
    TILE_LOAD(6, x, kind == LEVEL_8 ? 2 * CHUNK : CHUNK);
    if (kind == DENSE) TILE_DOT_SIGNED(0, 6, 4);
    else TILE_DOT_UNSIGNED(0, 6, 4);
    TILE_STORE(0, to[0], 64);
    if (kind != LEVEL_8) return;
    TILE_ZERO(1);
    TILE_LOAD(6, x + CHUNK, 2 * CHUNK);
    TILE_DOT_UNSIGNED(1, 6, 4);
    TILE_STORE(1, to[1], 64);
}

/* product_0 with the other half of the tiles, so that two products in turn do not wait for each other. */
INLINE_TILES void NAME(product_1)(tiles_state *tiles, const uint8_t *codes, const int8_t *x, enum kind kind, int32_t to[2][16][16]) {
    TILE_ZERO(2);
    TILE_LOAD(5, codes, 4 * BLOCK_ROWS);
    TILE_LOAD(7, x, kind == LEVEL_8 ? 2 * CHUNK : CHUNK);
    if (kind == DENSE) TILE_DOT_SIGNED(2, 7, 5);
    else TILE_DOT_UNSIGNED(2, 7, 5);
    TILE_STORE(2, to[0], 64);
    if (kind != LEVEL_8) return;
    TILE_ZERO(3);
    TILE_LOAD(7, x + CHUNK, 2 * CHUNK);
    TILE_DOT_UNSIGNED(3, 7, 5);
    TILE_STORE(3, to[1], 64);
}

INLINE_TILES void NAME(product)(tiles_state *tiles, const strip *s, int64_t c, enum kind kind, int32_t to[2][16][16]) {
    const uint8_t *codes = s->codes + c * CHUNK * BLOCK_ROWS;
    if (c % 2) NAME(product_1)(tiles, codes, s->x + c * s->x_stride, kind, to);
    else NAME(product_0)(tiles, codes, s->x + c * s->x_stride, kind, to);
}

/* `tokens`: a constant 16, or fewer. */
INLINE_TILES void NAME(strip_of)(tiles_state *tiles, const strip *s, enum kind kind, int tokens, float *total) {
    _Alignas(64) int32_t to[BUFFERS][2][16][16];
    VECTOR acc[16];
    for (int t = 0; t < tokens; t++) acc[t] = LOAD(total + t * BLOCK_ROWS);
    for (int64_t c = 0; c < AHEAD && c < s->chunks; c++) NAME(product)(tiles, s, c, kind, to[c % BUFFERS]);
    for (int64_t c = 0; c < s->chunks; c++) {
        if (c + AHEAD < s->chunks) NAME(product)(tiles, s, c + AHEAD, kind, to[(c + AHEAD) % BUFFERS]);
        if (kind == DENSE) {
            for (int t = 0; t < tokens; t++) acc[t] = FMA(NUMBERS(to[c % BUFFERS][0][t]), ALL(s->by[c][t]), acc[t]);
            continue;
        }
        const VECTOR scale = SCALES(s->scales[c]), centre = CENTRES(s->scales[c]);
        for (int t = 0; t < tokens; t++) {
            const VECTOR codes = kind == LEVEL_8 ? SHIFTED(to[c % BUFFERS][0][t], to[c % BUFFERS][1][t], 7) : NUMBERS(to[c % BUFFERS][0][t]);
            const VECTOR units = FMA(codes, ALL(s->by[c][t]), ALL(s->shift[c][t]));
            acc[t] = FMA(centre, ALL(s->sum[c][t]), FMA(scale, units, acc[t]));
        }
    }
    for (int t = 0; t < tokens; t++) STORE(total + t * BLOCK_ROWS, acc[t]);
}

/* The tokens' numbers of a strip: from `scale` and `sum`, `stride` numbers per chunk. */
INLINE_TILES void NAME(strip_scales)(strip *s, int64_t level, const float *scale, const float *sum, int64_t stride, int tokens) {
    const float unit = code_unit(level), zero = zero_point(level);
    for (int64_t c = 0; c < s->chunks; c++, scale += stride, sum += stride)
        for (int t = 0; t < tokens; t++) {
            s->by[c][t] = unit * scale[t];
            s->shift[c][t] = zero * sum[t];
            s->sum[c][t] = sum[t];
        }
}

TARGET static void NAME(strip_products)(tiles_state *tiles, const strip *s, enum kind kind, int tokens, float *total) {
    NAME(configure)(tiles, tokens);
#define STRIP_OF(kind) \
    do { \
        if (tokens == 16) NAME(strip_of)(tiles, s, kind, 16, total); \
        else NAME(strip_of)(tiles, s, kind, tokens, total); \
    } while (0)
    if (kind == LEVEL_8) STRIP_OF(LEVEL_8);
    else if (kind == DENSE) STRIP_OF(DENSE);
    else STRIP_OF(LEVEL_4);
#undef STRIP_OF
}

/* A strip's chunks from `first` on with all tokens. */
TARGET static void NAME(strip_tokens)(tiles_state *tiles, const matrix *m, const expert *e, int64_t block, int64_t first,
                                      int64_t chunks, int64_t rows, const uint8_t *codes, const int8_t *x, const float *scale, const float *sum, int64_t stride,
                                      int64_t tokens, float *total) {
    const int64_t row_bytes = activation_bytes(level_of(m, e)) * CHUNK;
    for (int64_t t = 0; t < tokens; t += 16) {
        const int now = (int)min_of(tokens - t, 16);
        strip s = {.x = x + t * row_bytes, .x_stride = stride * row_bytes, .chunks = chunks};
        NAME(strip_scales)(&s, level_of(m, e), scale + t, sum + t, stride, now);
        for (int64_t r = 0; r < rows; r += 16) {
            s.codes = codes + 4 * r;
            for (int64_t c = 0; c < chunks; c++) s.scales[c] = scales_of(m, e, block, first + c, CHUNK) + 4 * r;
            NAME(strip_products)(tiles, &s, level_of(m, e) == 8 ? LEVEL_8 : LEVEL_4, now, total + t * BLOCK_ROWS + r);
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
        NAME(strip_tokens)(&tiles, m, e, block, first, chunks, rows, codes, x + activation_bytes(level_of(m, e)) * CHUNK * first * stride,
                           scale + first * stride, sum + first * stride, stride, tokens, total);
    }
    TILES_RELEASE();
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) y[t * m->rows + r] = to_bf16(total[t * BLOCK_ROWS + r]);
}

/* Adds a strip of a dense weight's 32 rows to total [tokens, BLOCK_ROWS]. */
TARGET void NAME(dense_strip)(const dense_strip *d, int64_t tokens, float *total) {
    tiles_state tiles = {0};
    for (int64_t t = 0; t < tokens; t += 16) {
        const int now = (int)min_of(tokens - t, 16);
        strip s = {.x = d->x.q + t * CHUNK, .x_stride = d->x.tokens * CHUNK, .chunks = d->chunks};
        for (int64_t c = 0; c < d->chunks; c++)
            for (int i = 0; i < now; i++) s.by[c][i] = d->x.scale[c * d->x.tokens + t + i];
        for (int64_t r = 0; r < BLOCK_ROWS; r += 16) {
            s.codes = d->codes + 4 * r;
            NAME(strip_products)(&tiles, &s, DENSE, now, total + t * BLOCK_ROWS + r);
        }
    }
    TILES_RELEASE();
}
#endif
