/* Several tokens through a block of quantized rows: a chunk's codes are joined once for all tokens. */
#include "gemm.h"

#include "../vectors/dot.h"
#include "join.h"
#include "vnni.h"

#if COMPILED
enum { TILE_TOKENS = 4 }; /* tokens whose sums fit into registers */

enum { TILE_BYTES = CHUNK * BLOCK_ROWS }; /* the codes of a chunk of 32 rows, as join.h joins them */

/* Adds the A14 sums of 16 rows and `tokens` tokens, 2 * chunk bytes apart: codes[0] rows 0-7, codes[1] rows 8-15. */
INLINE void tile_sums_a14(enum dot dot, const uint8_t *tile, const int8_t *x, int64_t chunk, int tokens, __m256i codes[2][TILE_TOKENS]) {
    for (int64_t i = 0; i < chunk / 2; i++, tile += 2 * BLOCK_ROWS, x += 4) {
        const __m256i upper = _mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)tile));
        const __m256i lower = _mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)tile + 1));
        for (int t = 0; t < tokens; t++) {
            const __m256i v = broadcast_four(x + 2 * t * chunk);
            codes[0][t] = add_words(dot, codes[0][t], upper, v);
            codes[1][t] = add_words(dot, codes[1][t], lower, v);
        }
    }
}

/* Adds the A8 sums; the tokens lie `chunk` bytes apart. */
INLINE void tile_sums_a8(int64_t level, const uint8_t *tile, const int8_t *x, int64_t chunk, int tokens, __m256i codes[2][TILE_TOKENS]) {
    const int64_t steps = a8_steps(level);
    for (int64_t left = chunk / 4; left > 0; left -= steps) {
        __m256i of_16[2][TILE_TOKENS];
        for (int t = 0; t < tokens; t++) of_16[0][t] = of_16[1][t] = _mm256_setzero_si256();
        for (int64_t i = min_of(left, steps); i > 0; i--, tile += 4 * BLOCK_ROWS, x += 4) {
            const __m256i upper = _mm256_load_si256((const __m256i *)tile);
            const __m256i lower = _mm256_load_si256((const __m256i *)tile + 1);
            for (int t = 0; t < tokens; t++) {
                const __m256i v = broadcast_four(x + t * chunk);
                of_16[0][t] = _mm256_add_epi16(of_16[0][t], _mm256_maddubs_epi16(upper, v));
                of_16[1][t] = _mm256_add_epi16(of_16[1][t], _mm256_maddubs_epi16(lower, v));
            }
        }
        for (int r = 0; r < 2; r++)
            for (int t = 0; t < tokens; t++)
                codes[r][t] = _mm256_add_epi32(codes[r][t], _mm256_madd_epi16(of_16[r][t], _mm256_set1_epi16(1)));
    }
}

/* tile_sums_a8 with four products an instruction, of codes below 64. */
INLINE void tile_sums_vnni(enum dot dot, const uint8_t *tile, const int8_t *x, int64_t chunk, int tokens, __m256i codes[2][TILE_TOKENS]) {
    for (int64_t i = 0; i < chunk / 4; i++, tile += 4 * BLOCK_ROWS, x += 4) {
        const __m256i upper = _mm256_load_si256((const __m256i *)tile), lower = _mm256_load_si256((const __m256i *)tile + 1);
        for (int t = 0; t < tokens; t++) {
            const __m256i v = broadcast_four(x + t * chunk);
            codes[0][t] = add_bytes(dot, 0, codes[0][t], upper, v);
            codes[1][t] = add_bytes(dot, 0, codes[1][t], lower, v);
        }
    }
}

/* Adds a chunk's products of 16 rows and `tokens` tokens to total [tokens, BLOCK_ROWS]. */
INLINE void tile_products(enum dot dot, const uint8_t *tile, const int8_t *x, int64_t chunk, int tokens, int64_t level,
                          const float *scale, const float *sum, const affine *rows, float *total) {
    const float unit = code_unit(level), zero = zero_point(level);
    __m256i codes[2][TILE_TOKENS];
    for (int t = 0; t < tokens; t++) codes[0][t] = codes[1][t] = _mm256_setzero_si256();
    if (level == 8) tile_sums_a14(dot, tile, x, chunk, tokens, codes);
    else if (dot != DOT_PLAIN) tile_sums_vnni(dot, tile, x, chunk, tokens, codes);
    else tile_sums_a8(level, tile, x, chunk, tokens, codes);
    for (int t = 0; t < tokens; t++) {
        const __m256 by = _mm256_set1_ps(unit * scale[t]), all = _mm256_set1_ps(sum[t]);
        const __m256 shift = _mm256_set1_ps(zero * sum[t]);
        for (int r = 0; r < 2; r++) {
            float *into = total + t * BLOCK_ROWS + 8 * r;
            const __m256 units = _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes[r][t]), by, shift);
            const __m256 scaled = _mm256_fmadd_ps(rows[r].scale, units, _mm256_load_ps(into));
            _mm256_store_ps(into, _mm256_fmadd_ps(rows[r].centre, all, scaled));
        }
    }
}

/* Adds a chunk's products of 16 rows and all tokens; x, scale, sum and total start at the first token. */
INLINE void half_block(enum dot dot, const uint8_t *tile, const uint8_t *scales, int64_t level, int64_t chunk, const int8_t *x,
                       const float *scale, const float *sum, int64_t tokens, float *total) {
    const affine rows[2] = {affine_of(scales), affine_of(scales + 32)};
    const int64_t bytes = activation_bytes(level);
    int64_t now;
    for (int64_t t = 0; t < tokens; t += now) {
        const int64_t left = tokens - t;
        now = left / ceil_div(left, TILE_TOKENS);
#define PRODUCTS(n) tile_products(dot, tile, x + bytes * t * chunk, chunk, n, level, scale + t, sum + t, rows, total + t * BLOCK_ROWS)
        /* One loop for each count, which has its sums in registers. */
        switch (now) {
        case 1: PRODUCTS(1); break;
        case 2: PRODUCTS(2); break;
        case 3: PRODUCTS(3); break;
        default: PRODUCTS(4);
        }
#undef PRODUCTS
    }
}

/* Adds a chunk's products of a block with 256-bit instructions. With a constant number of columns the tokens lie at constant
 * distances; the 16-bit sums of AVX2 are slower so, since the compiler adds them up as a tree, with too few registers. */
#define CHUNK_PRODUCTS(dot, columns) \
    for (int64_t r = 0; r < rows; r += 16, tile += 16 * (level == 8 ? 2 : 4), scales += 64, total += 16) \
        half_block(dot, tile, scales, level, columns, x, scale, sum, tokens, total)

AVX2 static __attribute__((noinline)) void gemm_chunk_avx2_level_8(const uint8_t *tile, const uint8_t *scales, int64_t rows,
                                                                   const int8_t *x, const float *scale, const float *sum,
                                                                   int64_t tokens, float *total) {
    enum { level = 8 };
    CHUNK_PRODUCTS(DOT_PLAIN, CHUNK);
}

AVX2 static __attribute__((noinline)) void gemm_chunk_avx2(const uint8_t *tile, const uint8_t *scales, int64_t rows, int64_t level,
                                                           int64_t chunk, const int8_t *x, const float *scale, const float *sum,
                                                           int64_t tokens, float *total) {
    CHUNK_PRODUCTS(DOT_PLAIN, chunk);
}

/* By a dot that is one instruction. */
AVX2 static void gemm_chunk_dot(enum dot dot, const uint8_t *tile, const uint8_t *scales, int64_t rows, int64_t level, int64_t chunk,
                                const int8_t *x, const float *scale, const float *sum, int64_t tokens, float *total) {
#define ANY_CHUNK(dot) \
    do { \
        if (chunk == CHUNK) CHUNK_PRODUCTS(dot, CHUNK); \
        else CHUNK_PRODUCTS(dot, chunk); \
    } while (0)
    BY_ONE_INSTRUCTION(dot, ANY_CHUNK);
#undef ANY_CHUNK
}

AVX2 void gemm_block(enum path path, const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                     const float *scale, const float *sum, int64_t stride, int64_t tokens, uint16_t *y) {
    _Alignas(64) uint8_t tile[TILE_BYTES];
    _Alignas(64) float total[MAX_TOKENS * BLOCK_ROWS];
    const int64_t rows = min_of(m->rows - block * BLOCK_ROWS, BLOCK_ROWS), bytes = activation_bytes(level_of(m, e));
    const enum dot dot = dot_of(path);
    memset(total, 0, sizeof *total * (size_t)(tokens * BLOCK_ROWS));
    for (int64_t c = 0; c < m->cols / chunk; c++, x += bytes * stride * chunk, scale += stride, sum += stride) {
        if (IS_AVX512(path) && chunk == CHUNK && level_of(m, e) < 8) join_fours_avx512(m, e, block, c, tile);
        else join_rows(m, e, block, c, chunk, level_of(m, e) < 8, tile);
        const uint8_t *scales = scales_of(m, e, block, c, chunk);
        prefetch_scales(m, e, block, c, chunk);
        if (IS_AVX512(path)) gemm_chunk_vnni(tile, scales, rows, level_of(m, e), chunk, x, scale, sum, tokens, total);
        else if (dot != DOT_PLAIN) gemm_chunk_dot(dot, tile, scales, rows, level_of(m, e), chunk, x, scale, sum, tokens, total);
        else if (level_of(m, e) == 8 && chunk == CHUNK) gemm_chunk_avx2_level_8(tile, scales, rows, x, scale, sum, tokens, total);
        else gemm_chunk_avx2(tile, scales, rows, level_of(m, e), chunk, x, scale, sum, tokens, total);
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) y[t * m->rows + r] = to_bf16(total[t * BLOCK_ROWS + r]);
}
#endif
