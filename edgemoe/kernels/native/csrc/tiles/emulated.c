/* The kernels of products.h and attention.h over tiles in plain C and vectors of AVX2, for the tests: they run where AMX does not, with its
 * operands, layouts and order. */
#include "emulated.h"

#include "../attention/block_256.h"
#include "../experts/join.h"
#include "emulator.h"

#if COMPILED
typedef emulated_tiles tiles_state;

#define NAME(name) name##_emulated
#define TARGET AVX2
#define INLINE_TILES INLINE

INLINE void configure_emulated(tiles_state *tiles, int tokens) {
    for (int i = 0; i < TILES; i++) {
        tiles->bytes[i] = TILE_ROW_BYTES;
        tiles->rows[i] = (uint8_t)(i == 4 || i == 5 ? TILE_ROWS_MOST : tokens);
    }
}

#define TILE_ZERO(tile) emulated_zero(tiles, tile)
#define TILE_LOAD(tile, from, stride) emulated_load(tiles, tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_store(tiles, tile, to, stride)
#define TILE_DOT_UNSIGNED(sum, a, b) emulated_dot(tiles, sum, a, b, 0)
#define TILE_DOT_SIGNED(sum, a, b) emulated_dot(tiles, sum, a, b, 1)
#define TILE_DOT_BF16(sum, a, b) emulated_dot_bf16(tiles, sum, a, b)
#define TILES_RELEASE() (void)0

typedef struct { __m256 of[2]; } lanes;

INLINE lanes lanes_load(const float *from) { return (lanes){{_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}}; }

INLINE void lanes_store(float *to, lanes v) {
    _mm256_storeu_ps(to, v.of[0]);
    _mm256_storeu_ps(to + 8, v.of[1]);
}

INLINE lanes lanes_all(float x) { return (lanes){{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }

INLINE lanes lanes_multiply(lanes a, lanes b) {
    return (lanes){{_mm256_mul_ps(a.of[0], b.of[0]), _mm256_mul_ps(a.of[1], b.of[1])}};
}

INLINE lanes lanes_fma(lanes a, lanes b, lanes c) {
    return (lanes){{_mm256_fmadd_ps(a.of[0], b.of[0], c.of[0]), _mm256_fmadd_ps(a.of[1], b.of[1], c.of[1])}};
}

/* 2^by h + l as float32; h may be NULL. */
INLINE lanes lanes_shifted(const int32_t *h, const int32_t *l, int by) {
    float to[16];
    for (int i = 0; i < 16; i++) to[i] = (float)((h ? h[i] * (1 << by) : 0) + l[i]);
    return lanes_load(to);
}

/* The scales of 16 rows, the first of each pair of bf16 numbers, or their centres. */
INLINE lanes lanes_pairs(const uint8_t *from, int second) {
    float to[16];
    for (int i = 0; i < 16; i++) {
        uint16_t pair[2];
        memcpy(pair, from + 4 * i, sizeof pair);
        to[i] = from_bf16(pair[second]);
    }
    return lanes_load(to);
}

#define VECTOR lanes
#define LOAD(from) lanes_load(from)
#define STORE(to, v) lanes_store(to, v)
#define ALL(x) lanes_all(x)
#define MULTIPLY(a, b) lanes_multiply(a, b)
#define FMA(a, b, c) lanes_fma(a, b, c)
#define NUMBERS(from) lanes_shifted(NULL, from, 0)
#define SHIFTED(h, l, by) lanes_shifted(h, l, by)
#define SCALES(from) lanes_pairs(from, 0)
#define CENTRES(from) lanes_pairs(from, 1)
#define JOIN join_fours
#include "products.h"
#include "attention.h"

const block_path block_emulated = {rows_emulated, columns_emulated, lanes_emulated, multiply_emulated, softmax_256, softmax_head_256};
#endif
