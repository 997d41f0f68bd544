/* The functions of ../attention/block.h over the macros of amx.c and emulated.c. */
#include "../attention/block.h"
#include "../attention/transpose.h"

#if COMPILED
static const pair_order NAME(pairs) = {{1, 3}, {0, 2}};

TARGET static operand NAME(rows)(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to) {
    const uint16_t *from = kv_bf16(format, x, count, dim, scratch);
    const int64_t width = padded(dim);
    for (int64_t r = 0; r < count; r++) {
        uint16_t *row = (uint16_t *)to + r * width;
        memcpy(row, from + r * dim, (size_t)dim * sizeof *row);
        memset(row + dim, 0, (size_t)(width - dim) * sizeof *row);
    }
    return (operand){to, width / 2, 1};
}

/* Pairs of rows are the 32-bit numbers that transpose moves. */
TARGET static operand NAME(columns)(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to) {
    const uint16_t *from = kv_bf16(format, x, count, dim, scratch);
    const int64_t width = padded(dim), pairs = padded(count) / 2;
    uint32_t *rows = to + width * (KEYS / 2);
    pair_rows(from, count, dim, NAME(pairs), rows);
    transpose((const float *)rows, pairs, width, (float *)to);
    return (operand){to, pairs, 1};
}

TARGET static void NAME(lanes)(float *x, int64_t depth) { pair_lanes(x, depth, NAME(pairs)); }

/* 32 rows of A, tiles 4 and 5, by 32 lanes of B, tiles 6 and 7. */
TARGET static void NAME(multiply)(operand a, const float *b, int64_t step, int64_t rows, int64_t depth, const float *factor, float *c) {
    tiles_state tiles_of_thread = {0}, *tiles = &tiles_of_thread;
    NAME(configure)(tiles, 16);
    for (int64_t r = 0; r < rows; r += 32) {
        float *to = c + r * LANES;
        if (factor) {
            for (int64_t i = 0; i < 32 * LANES; i += 16) STORE(to + i, MULTIPLY(LOAD(to + i), LOAD(factor + i % LANES)));
            TILE_LOAD(0, to, 4 * LANES);
            TILE_LOAD(1, to + 16, 4 * LANES);
            TILE_LOAD(2, to + 16 * LANES, 4 * LANES);
            TILE_LOAD(3, to + 16 * LANES + 16, 4 * LANES);
        } else {
            TILE_ZERO(0);
            TILE_ZERO(1);
            TILE_ZERO(2);
            TILE_ZERO(3);
        }
        for (int64_t k = 0; k < depth / 2; k += DEPTH / 2) {
            TILE_LOAD(4, a.at + r * a.row + k, 4 * a.row);
            TILE_LOAD(6, b + k * step, 4 * step);
            TILE_DOT_BF16(0, 4, 6);
            TILE_LOAD(7, b + k * step + 16, 4 * step);
            TILE_DOT_BF16(1, 4, 7);
            TILE_LOAD(5, a.at + (r + 16) * a.row + k, 4 * a.row);
            TILE_DOT_BF16(2, 5, 6);
            TILE_DOT_BF16(3, 5, 7);
        }
        TILE_STORE(0, to, 4 * LANES);
        TILE_STORE(1, to + 16, 4 * LANES);
        TILE_STORE(2, to + 16 * LANES, 4 * LANES);
        TILE_STORE(3, to + 16 * LANES + 16, 4 * LANES);
    }
    TILES_RELEASE();
}
#endif
