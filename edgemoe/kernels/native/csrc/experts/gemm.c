/* Several tokens through quantized rows: a chunk's codes are joined once for all of them. */
#include "vnni.h"

#if defined(__x86_64__)
enum { SIDE_BY_SIDE = 4 }; /* tokens that registers have room for */

/* The codes of 32 rows of a chunk. For fine numbers two columns of a row side by side: 0 and 2, 1 and 3, 4 and 6, ...;
 * for coarse ones four: 0 2 1 3, 4 6 5 7, ... */
enum { TILE = CHUNK * 32 };

/* 8 rows' columns 0 and 2 in the lower half of v, 1 and 3 in the upper one -> 0 2 1 3 of each row. */
INLINE __m256i four_of_a_row(__m256i v) {
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,
                                           0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(v, 0xD8), order);
}

/* 4 columns below level 8. */
INLINE void join(int with_d4, const expert *e, int64_t at, uint8_t *tile) {
    __m256i rows[4];
    upper_nibbles(with_d4, e, at, rows);
    for (int r = 0; r < 4; r++) _mm256_store_si256((__m256i *)tile + r, four_of_a_row(rows[r]));
}

/* 4 columns at level 8. */
INLINE void join_8(const matrix *m, const expert *e, int64_t at, uint8_t *tile) {
    __m256i codes[4], fine[4];
    upper_nibbles(1, e, at, codes);
    lower_nibbles(m, e, at, fine);
    for (int r = 0; r < 4; r++) codes[r] = _mm256_or_si256(_mm256_slli_epi16(codes[r], 4), fine[r]);
    for (int i = 0; i < 2; i++) {
        const __m256i first = codes[2 * i], last = codes[2 * i + 1];
        _mm256_store_si256((__m256i *)tile + i, _mm256_permute2x128_si256(first, last, 0x20));
        _mm256_store_si256((__m256i *)tile + 2 + i, _mm256_permute2x128_si256(first, last, 0x31));
    }
}

INLINE void join_32(const matrix *m, const expert *e, int64_t at, int64_t n, uint8_t *tile) {
    for (int64_t i = 0; i < n; i++, at += 32, tile += 4 * OF_ROWS) {
        if (e->level == 2) join(0, e, at, tile);
        else if (e->level == 4) join(1, e, at, tile);
        else join_8(m, e, at, tile);
    }
}

/* The same of a matrix's last 16 rows, which the layout pairs as neighbours. Rare, so plain. */
AVX2 static void join_16(const matrix *m, const expert *e, int64_t at, int64_t n, uint8_t *tile) {
    for (int64_t k = 0; k < 4 * n; k++)
        for (int64_t r = 0; r < 16; r++) {
            const int64_t last = k / 2 % 2, place = at + (k / 4 * 2 + k % 2) * 8 + r / 2; /* of 4 columns the last two */
            const int32_t base = e->base[place], d4 = e->level > 2 ? e->d4[place] : 0, shift = 4 * (r & 1);
            const int32_t both = last ? (base & 0xCC) | (d4 >> 2 & 0x33) : (base & 0x33) << 2 | (d4 & 0x33);
            int32_t code = both >> shift & 15;
            if (e->level == 8) code = code << 4 | (e->d8[place + last * m->half] >> shift & 15);
            uint8_t *four = tile + k / 4 * 4 * OF_ROWS;
            if (e->level == 8) four[k % 2 * 2 * OF_ROWS + 2 * r + last] = (uint8_t)code;
            else four[4 * r + k % 2 * 2 + last] = (uint8_t)code;
        }
}

/* What turns a chunk's integers into its share of 8 rows' results. */
typedef struct { __m256 step, centre; } affine;

/* Sums of 16 rows of `tokens` tokens, whose numbers lie 2 * chunk bytes apart: rows 0-7, then 8-15. */
INLINE void fine_sums(const uint8_t *tile, const int8_t *x, int64_t chunk, int tokens, __m256i codes[2][SIDE_BY_SIDE]) {
    for (int64_t i = 0; i < chunk / 2; i++, tile += 2 * OF_ROWS, x += 4) {
        const __m256i upper = _mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)tile));
        const __m256i lower = _mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)tile + 1));
        for (int t = 0; t < tokens; t++) {
            const __m256i v = four_bytes(x + 2 * t * chunk);
            codes[0][t] = _mm256_add_epi32(codes[0][t], _mm256_madd_epi16(upper, v));
            codes[1][t] = _mm256_add_epi32(codes[1][t], _mm256_madd_epi16(lower, v));
        }
    }
}

/* The same of coarse numbers, which lie chunk bytes apart. */
INLINE void coarse_sums(const uint8_t *tile, const int8_t *x, int64_t chunk, int tokens, __m256i codes[2][SIDE_BY_SIDE]) {
    for (int64_t left = chunk / 4; left > 0; left -= COARSE_STEPS) {
        __m256i of_16[2][SIDE_BY_SIDE];
        for (int t = 0; t < tokens; t++) of_16[0][t] = of_16[1][t] = _mm256_setzero_si256();
        for (int64_t i = left < COARSE_STEPS ? left : COARSE_STEPS; i > 0; i--, tile += 4 * OF_ROWS, x += 4) {
            const __m256i upper = _mm256_load_si256((const __m256i *)tile);
            const __m256i lower = _mm256_load_si256((const __m256i *)tile + 1);
            for (int t = 0; t < tokens; t++) {
                const __m256i v = four_bytes(x + t * chunk);
                of_16[0][t] = _mm256_add_epi16(of_16[0][t], _mm256_maddubs_epi16(upper, v));
                of_16[1][t] = _mm256_add_epi16(of_16[1][t], _mm256_maddubs_epi16(lower, v));
            }
        }
        for (int r = 0; r < 2; r++)
            for (int t = 0; t < tokens; t++)
                codes[r][t] = _mm256_add_epi32(codes[r][t], _mm256_madd_epi16(of_16[r][t], _mm256_set1_epi16(1)));
    }
}

/* Adds a chunk's share of 16 rows of `tokens` tokens. */
INLINE void tile_products(const uint8_t *tile, const int8_t *x, int64_t chunk, int tokens, int64_t level,
                          const float *scale, const float *sum, const affine *rows, float *total) {
    const float unit = level == 8 ? 1 / 16.0f : 1, zero = zero_of(level);
    __m256i codes[2][SIDE_BY_SIDE];
    for (int t = 0; t < tokens; t++) codes[0][t] = codes[1][t] = _mm256_setzero_si256();
    if (level == 8) fine_sums(tile, x, chunk, tokens, codes);
    else coarse_sums(tile, x, chunk, tokens, codes);
    for (int t = 0; t < tokens; t++) {
        const __m256 by = _mm256_set1_ps(unit * scale[t]), all = _mm256_set1_ps(sum[t]);
        const __m256 shift = _mm256_set1_ps(zero * sum[t]);
        for (int r = 0; r < 2; r++) {
            float *into = total + t * OF_ROWS + 8 * r;
            const __m256 share = _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes[r][t]), by, shift);
            const __m256 so_far = _mm256_fmadd_ps(rows[r].step, share, _mm256_load_ps(into));
            _mm256_store_ps(into, _mm256_fmadd_ps(rows[r].centre, all, so_far));
        }
    }
}

AVX2 void rows_of_tokens(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                         const float *scale, const float *sum, int64_t stride, int64_t tokens, uint16_t *y) {
    _Alignas(64) uint8_t tile[TILE];
    _Alignas(64) float total[TOKENS * OF_ROWS];
    const __m256i upper = _mm256_set1_epi32((int32_t)0xFFFF0000);
    const int64_t rows = m->rows - block * 32 < 32 ? 16 : 32, at = m->codes_at + block * m->cols * 8;
    memset(total, 0, sizeof *total * (size_t)(tokens * OF_ROWS));
    for (int64_t c = 0; c < m->cols / chunk; c++) {
        if (rows == 32) join_32(m, e, at + c * chunk * 8, chunk / 4, tile);
        else join_16(m, e, at + c * chunk * 4, chunk / 4, tile);
        const uint8_t *pairs = pairs_of(m, e, block, c, chunk);
        ask_for_pairs(m, e, block, c, chunk);
        if (use_vnni) {
            const int64_t first = c * stride;
            chunk_vnni(tile, pairs, rows, e->level, chunk, x + width_at(e->level) * first * chunk, scale + first, sum + first,
                       tokens, total);
            continue;
        }
        for (int64_t r = 0; r < rows; r += 16) {
            const uint8_t *half = tile + r * (e->level == 8 ? 2 : 4);
            affine both[2];
            for (int i = 0; i < 2; i++) {
                const __m256i pair = _mm256_loadu_si256((const __m256i *)(pairs + 4 * r + 32 * i));
                both[i].step = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
                both[i].centre = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
            }
            int64_t now;
            for (int64_t t = 0; t < tokens; t += now) {
                const int64_t left = tokens - t, first = c * stride + t;
                now = left / ((left + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE);
                const int8_t *from = x + width_at(e->level) * first * chunk;
                float *into = total + t * OF_ROWS + r;
                /* One loop for each count, which has its sums in registers. */
                switch (now) {
                case 1: tile_products(half, from, chunk, 1, e->level, scale + first, sum + first, both, into); break;
                case 2: tile_products(half, from, chunk, 2, e->level, scale + first, sum + first, both, into); break;
                case 3: tile_products(half, from, chunk, 3, e->level, scale + first, sum + first, both, into); break;
                default: tile_products(half, from, chunk, 4, e->level, scale + first, sum + first, both, into);
                }
            }
        }
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) y[t * m->rows + r] = to_bf16(total[t * OF_ROWS + r]);
}
#endif
