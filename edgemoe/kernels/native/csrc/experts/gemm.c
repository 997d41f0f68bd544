/* Several tokens through a block of quantized rows: a chunk's codes are joined once for all tokens. */
#include "../vectors/dot.h"
#include "vnni.h"

#if COMPILED
enum { TILE_TOKENS = 4 }; /* tokens whose sums fit into registers */

/* Bytes of a tile: the codes of a chunk of 32 rows, by level 8 in pairs of columns of a row, 0 and 2, 1 and 3, 4 and 6,
 * ...; by levels 4 and 2 in fours: 0 2 1 3, 4 6 5 7, ... */
enum { TILE_BYTES = CHUNK * BLOCK_ROWS };

/* Reorders 8 rows, columns 0 and 2 in the lower half and 1 and 3 in the upper one, to 0 2 1 3 of each row. */
INLINE __m256i row_major(__m256i v) {
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,
                                           0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(v, 0xD8), order);
}

/* Joins the codes of 4 columns of 32 rows at level 4 or 2. */
INLINE void join_level_4(int with_d4, const expert *e, int64_t at, uint8_t *tile) {
    __m256i rows[4];
    upper_nibbles(with_d4, e, at, rows);
    for (int r = 0; r < 4; r++) _mm256_store_si256((__m256i *)tile + r, row_major(rows[r]));
}

INLINE void codes_level_8(const matrix *m, const expert *e, int64_t at, __m256i codes[4]) {
    __m256i lower[4];
    upper_nibbles(1, e, at, codes);
    lower_nibbles(m, e, at, lower);
    for (int r = 0; r < 4; r++) codes[r] = _mm256_or_si256(_mm256_slli_epi16(codes[r], 4), lower[r]);
}

INLINE void join_level_8(const matrix *m, const expert *e, int64_t at, uint8_t *tile) {
    __m256i codes[4];
    codes_level_8(m, e, at, codes);
    for (int i = 0; i < 2; i++) {
        const __m256i first = codes[2 * i], last = codes[2 * i + 1];
        _mm256_store_si256((__m256i *)tile + i, _mm256_permute2x128_si256(first, last, 0x20));
        _mm256_store_si256((__m256i *)tile + 2 + i, _mm256_permute2x128_si256(first, last, 0x31));
    }
}

/* join_level_8 in fours, as by the other levels. */
INLINE void join_fours_level_8(const matrix *m, const expert *e, int64_t at, uint8_t *tile) {
    __m256i codes[4];
    codes_level_8(m, e, at, codes);
    for (int r = 0; r < 4; r++) _mm256_store_si256((__m256i *)tile + r, row_major(codes[r]));
}

/* Joins the codes of a chunk of 4 n columns of 32 rows. */
INLINE void join_32_rows(const matrix *m, const expert *e, int64_t at, int64_t n, int by_fours, uint8_t *tile) {
    for (int64_t i = 0; i < n; i++, at += 32, tile += 4 * BLOCK_ROWS) {
        if (e->level == 2) join_level_4(0, e, at, tile);
        else if (e->level == 4) join_level_4(1, e, at, tile);
        else if (by_fours) join_fours_level_8(m, e, at, tile);
        else join_level_8(m, e, at, tile);
    }
}

/* Joins the codes of a matrix's last 16 rows, which the layout pairs as neighbours. Rare, so plain. */
AVX2 static void join_16_rows(const matrix *m, const expert *e, int64_t at, int64_t n, int by_fours, uint8_t *tile) {
    for (int64_t k = 0; k < 4 * n; k++)
        for (int64_t r = 0; r < 16; r++) {
            const int64_t last = k / 2 % 2, place = at + (k / 4 * 2 + k % 2) * 8 + r / 2; /* last: column 2 or 3 of 4 */
            const int32_t base = e->base[place], d4 = e->level > 2 ? e->d4[place] : 0, shift = 4 * (r & 1);
            const int32_t both = last ? (base & 0xCC) | (d4 >> 2 & 0x33) : (base & 0x33) << 2 | (d4 & 0x33);
            int32_t code = both >> shift & 15;
            if (e->level == 8) code = code << 4 | (e->d8[place + last * m->half] >> shift & 15);
            uint8_t *four = tile + k / 4 * 4 * BLOCK_ROWS;
            if (!by_fours) four[k % 2 * 2 * BLOCK_ROWS + 2 * r + last] = (uint8_t)code;
            else four[4 * r + k % 2 * 2 + last] = (uint8_t)code;
        }
}

INLINE void join_rows(const matrix *m, const expert *e, int64_t block, int64_t c, int64_t chunk, int by_fours, uint8_t *tile) {
    const int64_t at = m->codes_at + block * m->cols * 8;
    if (m->rows - block * BLOCK_ROWS >= BLOCK_ROWS) join_32_rows(m, e, at + c * chunk * 8, chunk / 4, by_fours, tile);
    else join_16_rows(m, e, at + c * chunk * 4, chunk / 4, by_fours, tile);
}

AVX2 void join_fours(const matrix *m, const expert *e, int64_t block, int64_t c, uint8_t *tile) {
    join_rows(m, e, block, c, CHUNK, 1, tile);
}

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
INLINE void tile_sums_a8(const uint8_t *tile, const int8_t *x, int64_t chunk, int tokens, __m256i codes[2][TILE_TOKENS]) {
    for (int64_t left = chunk / 4; left > 0; left -= A8_STEPS) {
        __m256i of_16[2][TILE_TOKENS];
        for (int t = 0; t < tokens; t++) of_16[0][t] = of_16[1][t] = _mm256_setzero_si256();
        for (int64_t i = min_of(left, A8_STEPS); i > 0; i--, tile += 4 * BLOCK_ROWS, x += 4) {
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

/* tile_sums_a8 with four products an instruction, of codes below 16. */
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
    else tile_sums_a8(tile, x, chunk, tokens, codes);
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
    const int64_t rows = min_of(m->rows - block * BLOCK_ROWS, BLOCK_ROWS), bytes = activation_bytes(e->level);
    const enum dot dot = dot_of(path);
    memset(total, 0, sizeof *total * (size_t)(tokens * BLOCK_ROWS));
    for (int64_t c = 0; c < m->cols / chunk; c++, x += bytes * stride * chunk, scale += stride, sum += stride) {
        if (IS_AVX512(path) && chunk == CHUNK && e->level < 8) join_fours_avx512(m, e, block, c, tile);
        else join_rows(m, e, block, c, chunk, e->level < 8, tile);
        const uint8_t *scales = scales_of(m, e, block, c, chunk);
        prefetch_scales(m, e, block, c, chunk);
        if (IS_AVX512(path)) gemm_chunk_vnni(tile, scales, rows, e->level, chunk, x, scale, sum, tokens, total);
        else if (dot != DOT_PLAIN) gemm_chunk_dot(dot, tile, scales, rows, e->level, chunk, x, scale, sum, tokens, total);
        else if (e->level == 8 && chunk == CHUNK) gemm_chunk_avx2_level_8(tile, scales, rows, x, scale, sum, tokens, total);
        else gemm_chunk_avx2(tile, scales, rows, e->level, chunk, x, scale, sum, tokens, total);
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) y[t * m->rows + r] = to_bf16(total[t * BLOCK_ROWS + r]);
}
#endif
