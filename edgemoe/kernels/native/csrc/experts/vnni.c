/* vpdpbusd and vpdpwssd: four products of 8-bit numbers, or two of 16-bit ones, added up in 32 bits at once, which AVX2
 * takes two or three instructions for. Sums are of integers and exact, and what follows goes through the same
 * floating-point operations in the same order. */
#include "vnni.h"

#if defined(__x86_64__)
#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))
#define INLINE_VNNI static inline __attribute__((always_inline)) VNNI

/* The intrinsics' own sums are copied to and fro by GCC where many are kept in registers. */
INLINE_VNNI __m512i plus_bytes(__m512i sum, __m512i of_0_to_255, __m512i others) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(of_0_to_255), "v"(others));
    return sum;
}

INLINE_VNNI __m512i plus_words(__m512i sum, __m512i a, __m512i b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

enum { TILE_TOKENS = 4, TILE_ROWS = 4, PAIRS = TILE_TOKENS / 2 };

/* The lower halves of a and b, plus the upper ones. */
INLINE_VNNI __m512i folded(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE));
}

INLINE_VNNI __m512 side_by_side(float a, float b) {
    return _mm512_insertf32x8(_mm512_set1_ps(a), _mm256_set1_ps(b), 1);
}

VNNI void int8_tile_vnni(const int8_t *w, const int16_t *x, const float *scale, int64_t cols, int64_t chunks,
                         float out[4][4]) {
    __m512 total[TILE_ROWS][PAIRS]; /* of two tokens, side by side */
    for (int r = 0; r < TILE_ROWS; r++)
        for (int p = 0; p < PAIRS; p++) total[r][p] = _mm512_setzero_ps();
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = from + DENSE_CHUNK < cols ? from + DENSE_CHUNK : cols;
        __m512i sum[TILE_ROWS][TILE_TOKENS];
        for (int r = 0; r < TILE_ROWS; r++)
            for (int t = 0; t < TILE_TOKENS; t++) sum[r][t] = _mm512_setzero_si512();
        int64_t k = from;
        for (; k + 32 <= end; k += 32) {
            __m512i wide[TILE_ROWS];
            for (int r = 0; r < TILE_ROWS; r++)
                wide[r] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(w + r * cols + k)));
            for (int t = 0; t < TILE_TOKENS; t++) {
                const __m512i v = _mm512_loadu_si512(x + t * cols + k);
                for (int r = 0; r < TILE_ROWS; r++) sum[r][t] = plus_words(sum[r][t], wide[r], v);
            }
        }
        for (; k < end; k += 16)
            for (int r = 0; r < TILE_ROWS; r++) {
                const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + r * cols + k)));
                for (int t = 0; t < TILE_TOKENS; t++) {
                    const __m256i v = _mm256_loadu_si256((const __m256i *)(x + t * cols + k));
                    sum[r][t] = plus_words(sum[r][t], _mm512_zextsi256_si512(wide), _mm512_zextsi256_si512(v));
                }
            }
        for (int p = 0; p < PAIRS; p++) {
            const __m512 by = side_by_side(scale[2 * p * chunks], scale[(2 * p + 1) * chunks]);
            for (int r = 0; r < TILE_ROWS; r++) {
                const __m512i of_two = folded(sum[r][2 * p], sum[r][2 * p + 1]);
                total[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(of_two), by, total[r][p]);
            }
        }
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int p = 0; p < PAIRS; p++) {
            out[r][2 * p] = added_up(_mm512_castps512_ps256(total[r][p]));
            out[r][2 * p + 1] = added_up(_mm512_extractf32x8_ps(total[r][p], 1));
        }
}

VNNI float int8_row_vnni(const int8_t *w, const int16_t *x, const float *scale, int64_t cols) {
    __m256 total = _mm256_setzero_ps();
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = from + DENSE_CHUNK < cols ? from + DENSE_CHUNK : cols;
        __m512i sum[4];
        for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_si512();
        int64_t k = from;
        for (; k + 128 <= end; k += 128) {
            prefetch((const uint8_t *)w + k + AHEAD);
            prefetch((const uint8_t *)w + k + 64 + AHEAD);
            for (int i = 0; i < 4; i++) {
                const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(w + k) + i));
                sum[i] = plus_words(sum[i], wide, _mm512_loadu_si512(x + k + 32 * i));
            }
        }
        for (; k < end; k += 16) {
            const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + k)));
            const __m256i v = _mm256_loadu_si256((const __m256i *)(x + k));
            sum[0] = plus_words(sum[0], _mm512_zextsi256_si512(wide), _mm512_zextsi256_si512(v));
        }
        const __m512i all = _mm512_add_epi32(_mm512_add_epi32(sum[0], sum[1]), _mm512_add_epi32(sum[2], sum[3]));
        const __m256i lanes = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
        total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(lanes), _mm256_set1_ps(*scale), total);
    }
    return added_up(total);
}

INLINE_VNNI __m512i bytes_at_512(const uint8_t *place) { return _mm512_loadu_si512(place); }

/* The nibbles of twice 4 columns of 32 rows, a byte each: in rows[0] the first 4 columns of rows 0-7, in the order of
 * numbers, then the last 4 of the same rows; then rows 8-15, 16-23, 24-31. a and b as in planes.h. */
INLINE_VNNI void unpacked_512(__m512i a, __m512i b, __m512i rows[4]) {
    const __m512i four = _mm512_set1_epi8(15);
    const __m512i order = _mm512_set_epi16(31, 23, 30, 22, 29, 21, 28, 20, 27, 19, 26, 18, 25, 17, 24, 16, 15, 7, 14, 6, 13,
                                           5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    const __m512i first = _mm512_permutexvar_epi16(order, _mm512_unpacklo_epi8(a, b));
    const __m512i last = _mm512_permutexvar_epi16(order, _mm512_unpackhi_epi8(a, b));
    rows[0] = _mm512_and_si512(first, four);
    rows[1] = _mm512_and_si512(last, four);
    rows[2] = _mm512_and_si512(_mm512_srli_epi16(first, 4), four);
    rows[3] = _mm512_and_si512(_mm512_srli_epi16(last, 4), four);
}

INLINE_VNNI void upper_nibbles_512(int with_d4, const expert *e, int64_t at, __m512i rows[4]) {
    const __m512i low = _mm512_set1_epi8(0x33), high = _mm512_set1_epi8((char)0xCC), b = bytes_at_512(e->base + at);
    prefetch(e->base + at + AHEAD);
    if (!with_d4) {
        unpacked_512(_mm512_slli_epi16(_mm512_and_si512(b, low), 2), _mm512_and_si512(b, high), rows);
        return;
    }
    const __m512i d = bytes_at_512(e->d4 + at);
    prefetch(e->d4 + at + AHEAD);
    const __m512i differing = _mm512_and_si512(_mm512_xor_si512(_mm512_srli_epi16(d, 2), b), low);
    unpacked_512(_mm512_xor_si512(d, _mm512_slli_epi16(differing, 2)), _mm512_xor_si512(b, differing), rows);
}

/* Four numbers for the first 4 columns, four for the last. */
INLINE_VNNI __m512i four_and_four(const int8_t *first, const int8_t *last) {
    int32_t one, other;
    memcpy(&one, first, sizeof one);
    memcpy(&other, last, sizeof other);
    return _mm512_mask_set1_epi32(_mm512_set1_epi32(one), 0xFF00, other);
}

/* A chunk's sums of 32 rows, 16 in each, of n times 4 columns. */
INLINE_VNNI void code_sums_512(int64_t level, const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n,
                               __m512i out[2]) {
    __m512i high[4], low[4], rows[4], fine[4]; /* of level 8, 128 times high and low */
    for (int r = 0; r < 4; r++) high[r] = low[r] = _mm512_setzero_si512();
    for (; n > 0; n -= 2, at += 64, x += level == 8 ? 16 : 8) {
        upper_nibbles_512(level > 2, e, at, rows);
        if (level < 8) {
            const __m512i v = four_and_four(x, x + 4);
            for (int r = 0; r < 4; r++) low[r] = plus_bytes(low[r], rows[r], v);
            continue;
        }
        const uint8_t *a = e->d8 + at;
        prefetch(a + AHEAD);
        prefetch(a + m->half + AHEAD);
        unpacked_512(bytes_at_512(a), bytes_at_512(a + m->half), fine);
        const __m512i h = four_and_four(x, x + 8), l = four_and_four(x + 4, x + 12);
        for (int r = 0; r < 4; r++) {
            const __m512i code = _mm512_or_si512(_mm512_slli_epi16(rows[r], 4), fine[r]);
            high[r] = plus_bytes(high[r], code, h);
            low[r] = plus_bytes(low[r], code, l);
        }
    }
    for (int i = 0; i < 2; i++) {
        out[i] = folded(low[2 * i], low[2 * i + 1]);
        if (level == 8) out[i] = _mm512_add_epi32(out[i], _mm512_slli_epi32(folded(high[2 * i], high[2 * i + 1]), 7));
    }
}

INLINE_VNNI void rows_of(int64_t level, const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                         const float *scale, const float *sum, int64_t stride, uint16_t *y) {
    const float unit = level == 8 ? 1 / 16.0f : 1, zero = zero_of(level);
    const __m512i upper = _mm512_set1_epi32((int32_t)0xFFFF0000);
    const int64_t at = m->codes_at + block * m->cols * 8, width = width_at(level);
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t c = 0; c < m->cols / chunk; c++) {
        __m512i codes[2];
        code_sums_512(level, m, e, at + c * chunk * 8, x + width * c * chunk * stride, chunk / 4, codes);
        const uint8_t *pairs = pairs_of(m, e, block, c, chunk);
        ask_for_pairs(m, e, block, c, chunk);
        const __m512 by = _mm512_set1_ps(unit * scale[c * stride]), all = _mm512_set1_ps(sum[c * stride]);
        const __m512 shift = _mm512_set1_ps(zero * sum[c * stride]);
        for (int h = 0; h < 2; h++) {
            const __m512i pair = _mm512_loadu_si512(pairs + 64 * h);
            const __m512 step = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
            const __m512 centre = _mm512_castsi512_ps(_mm512_and_si512(pair, upper));
            total[h] = _mm512_fmadd_ps(step, _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes[h]), by, shift), total[h]);
            total[h] = _mm512_fmadd_ps(centre, all, total[h]);
        }
    }
    float out[32];
    for (int h = 0; h < 2; h++) _mm512_storeu_ps(out + 16 * h, total[h]);
    for (int r = 0; r < 32; r++) y[r] = to_bf16(out[r]);
}

VNNI void rows_of_one_token_vnni(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                                 const float *scale, const float *sum, int64_t stride, uint16_t *y) {
    if (e->level == 2) rows_of(2, m, e, block, chunk, x, scale, sum, stride, y);
    else if (e->level == 4) rows_of(4, m, e, block, chunk, x, scale, sum, stride, y);
    else rows_of(8, m, e, block, chunk, x, scale, sum, stride, y);
}

enum { MOST = 8 }; /* tokens that registers have room for, beside 32 rows */

INLINE_VNNI __m512i four_bytes_512(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}

/* `halves` of 16 rows each times `tokens` tokens. */
INLINE_VNNI void some(const uint8_t *tile, const uint8_t *pairs, int halves, int64_t level, int64_t chunk, const int8_t *x,
                      const float *scale, const float *sum, int tokens, float *total) {
    const float unit = level == 8 ? 1 / 16.0f : 1, zero = zero_of(level);
    __m512i codes[2][MOST], rows[2];
    for (int h = 0; h < halves; h++)
        for (int t = 0; t < tokens; t++) codes[h][t] = _mm512_setzero_si512();
    if (level == 8)
        for (int64_t i = 0; i < chunk / 2; i++, tile += 2 * OF_ROWS, x += 4) {
            for (int h = 0; h < halves; h++)
                rows[h] = _mm512_cvtepu8_epi16(_mm256_load_si256((const __m256i *)tile + h));
            for (int t = 0; t < tokens; t++) {
                const __m512i v = four_bytes_512(x + 2 * t * chunk);
                for (int h = 0; h < halves; h++) codes[h][t] = plus_words(codes[h][t], rows[h], v);
            }
        }
    else
        for (int64_t i = 0; i < chunk / 4; i++, tile += 4 * OF_ROWS, x += 4) {
            for (int h = 0; h < halves; h++) rows[h] = _mm512_load_si512((const __m512i *)tile + h);
            for (int t = 0; t < tokens; t++) {
                const __m512i v = four_bytes_512(x + t * chunk);
                for (int h = 0; h < halves; h++) codes[h][t] = plus_bytes(codes[h][t], rows[h], v);
            }
        }
    for (int h = 0; h < halves; h++) {
        const __m512i pair = _mm512_loadu_si512(pairs + 64 * h);
        const __m512 step = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
        const __m512 centre = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int32_t)0xFFFF0000)));
        for (int t = 0; t < tokens; t++) {
            const __m512 by = _mm512_set1_ps(unit * scale[t]), all = _mm512_set1_ps(sum[t]);
            float *into = total + t * OF_ROWS + 16 * h;
            const __m512 share = _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes[h][t]), by, _mm512_set1_ps(zero * sum[t]));
            const __m512 so_far = _mm512_fmadd_ps(step, share, _mm512_load_ps(into));
            _mm512_store_ps(into, _mm512_fmadd_ps(centre, all, so_far));
        }
    }
}

/* One loop for each count, which has its sums in registers. */
#define SOME(halves, n) some(tile, pairs, halves, level, chunk, x + width * t * chunk, scale + t, sum + t, n, total + t * OF_ROWS)
INLINE_VNNI void all(const uint8_t *tile, const uint8_t *pairs, int halves, int64_t level, int64_t chunk, const int8_t *x,
                     const float *scale, const float *sum, int64_t tokens, float *total) {
    const int64_t width = width_at(level);
    int64_t t = 0;
    for (; t + 8 <= tokens; t += 8) SOME(halves, 8);
    if (tokens & 4) SOME(halves, 4), t += 4;
    if (tokens & 2) SOME(halves, 2), t += 2;
    if (tokens & 1) SOME(halves, 1);
}

VNNI void chunk_vnni(const uint8_t *tile, const uint8_t *pairs, int64_t rows, int64_t level, int64_t chunk, const int8_t *x,
                     const float *scale, const float *sum, int64_t tokens, float *total) {
    if (level == 8 && rows == 32) all(tile, pairs, 2, 8, chunk, x, scale, sum, tokens, total);
    else if (level == 8) all(tile, pairs, 1, 8, chunk, x, scale, sum, tokens, total);
    else if (rows == 32) all(tile, pairs, 2, level, chunk, x, scale, sum, tokens, total);
    else all(tile, pairs, 1, level, chunk, x, scale, sum, tokens, total);
}

VNNI void float_tile_512(const float *a, int64_t a_row, int64_t a_deep, const float *b, int64_t depth, const float *factor,
                         float *c) {
    __m512 sum[OUTER][2];
    for (int i = 0; i < OUTER; i++)
        for (int h = 0; h < 2; h++)
            sum[i][h] = factor ? _mm512_mul_ps(_mm512_loadu_ps(c + i * LANES + 16 * h), _mm512_loadu_ps(factor + 16 * h))
                               : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k++, a += a_deep, b += LANES) {
        const __m512 low = _mm512_loadu_ps(b), high = _mm512_loadu_ps(b + 16);
        for (int i = 0; i < OUTER; i++) {
            const __m512 x = _mm512_set1_ps(a[i * a_row]);
            sum[i][0] = _mm512_fmadd_ps(x, low, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(x, high, sum[i][1]);
        }
    }
    for (int i = 0; i < OUTER; i++)
        for (int h = 0; h < 2; h++) _mm512_storeu_ps(c + i * LANES + 16 * h, sum[i][h]);
}
#endif
