/* The tile instructions of AMX that the kernels use, in plain C: eight tiles of 16 rows of 64 bytes. */
#pragma once
#include "../vectors/bf16.h"

enum { TILES = 8, TILE_ROWS_MOST = 16, TILE_ROW_BYTES = 64 };

typedef struct {
    uint8_t rows[TILES], bytes[TILES]; /* of a row */
    uint8_t data[TILES][TILE_ROWS_MOST][TILE_ROW_BYTES];
} emulated_tiles;

static inline void emulated_zero(emulated_tiles *t, int tile) { memset(t->data[tile], 0, sizeof t->data[tile]); }

static inline void emulated_load(emulated_tiles *t, int tile, const void *from, int64_t stride) {
    emulated_zero(t, tile);
    for (int64_t r = 0; r < t->rows[tile]; r++)
        memcpy(t->data[tile][r], (const uint8_t *)from + r * stride, t->bytes[tile]);
}

static inline void emulated_store(const emulated_tiles *t, int tile, void *to, int64_t stride) {
    for (int64_t r = 0; r < t->rows[tile]; r++) memcpy((uint8_t *)to + r * stride, t->data[tile][r], t->bytes[tile]);
}

/* Adds to each 32-bit number of `sum` the products of a row of `a`, of signed bytes, with a column of fours of `b`. */
static inline void emulated_dot(emulated_tiles *t, int sum, int a, int b, int b_signed) {
    for (int m = 0; m < t->rows[sum]; m++)
        for (int n = 0; n < t->bytes[sum] / 4; n++) {
            int32_t total;
            memcpy(&total, t->data[sum][m] + 4 * n, sizeof total);
            for (int k = 0; k < t->bytes[a]; k++) {
                const uint8_t of_b = t->data[b][k / 4][4 * n + k % 4];
                total += (int8_t)t->data[a][m][k] * (b_signed ? (int8_t)of_b : (int)of_b);
            }
            memcpy(t->data[sum][m] + 4 * n, &total, sizeof total);
        }
}

#if COMPILED
/* Adds to each float32 number of `sum` the products of a row of `a`, of bf16, with a column of pairs of `b`: those of even and of
 * odd index one after another from zero, then both sums (TDPBF16PS, Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
 * Small numbers are zero as far as the thread takes them for it. */
INLINE void emulated_dot_bf16(emulated_tiles *t, int sum, int a, int b) {
    for (int m = 0; m < t->rows[sum]; m++)
        for (int n = 0; n < t->bytes[sum] / 4; n++) {
            float total, part[2] = {0, 0};
            memcpy(&total, t->data[sum][m] + 4 * n, sizeof total);
            for (int k = 0; k < t->bytes[a] / 2; k++) {
                uint16_t of_a, of_b;
                memcpy(&of_a, t->data[a][m] + 2 * k, sizeof of_a);
                memcpy(&of_b, t->data[b][k / 2] + 4 * n + 2 * (k % 2), sizeof of_b);
                part[k % 2] = __builtin_fmaf(from_bf16(of_a), from_bf16(of_b), part[k % 2]);
            }
            total += part[0] + part[1];
            memcpy(t->data[sum][m] + 4 * n, &total, sizeof total);
        }
}
#endif
