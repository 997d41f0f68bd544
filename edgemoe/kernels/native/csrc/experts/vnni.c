/* The inner loops with vpdpbusd and vpdpwssd: four products of 8-bit numbers, or two of 16-bit ones, added up in 32 bits
 * by one instruction, where AVX2 takes two or three. Integer sums are exact, and the floating-point operations and their
 * order are those of the AVX2 functions. */
#include "vnni.h"

#include "../vectors/vnni.h"
#include "join.h"

#if defined(__x86_64__)
/* Adds the upper half of each to its lower one: a's sum in the lower half, b's in the upper one. */
INLINE_VNNI __m512i fold_halves(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE));
}

INLINE_VNNI __m512i load_bytes_512(const uint8_t *from) { return _mm512_loadu_si512(from); }

/* Unpacked rows of two columns' nibbles, or of their next bits, to four columns of a row in each dword. */
INLINE_VNNI __m512i fours_512(__m512i v) {
    return _mm512_permutexvar_epi16(_mm512_set_epi16(31, 23, 30, 22, 29, 21, 28, 20, 27, 19, 26, 18, 25, 17, 24, 16, 15, 7, 14, 6,
                                                     13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0), v);
}

/* Unpacks 8 columns of 32 rows, a byte each: rows[0] has the first 4 columns of rows 0-7, in the activations' order, then
 * the last 4 of the same rows; rows[1] has rows 8-15, rows[2] 16-23, rows[3] 24-31. a and b as in unpack_nibbles. */
INLINE_VNNI void unpack_nibbles_512(__m512i a, __m512i b, __m512i rows[4]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i first = fours_512(_mm512_unpacklo_epi8(a, b)), last = fours_512(_mm512_unpackhi_epi8(a, b));
    rows[0] = _mm512_and_si512(first, nibble);
    rows[1] = _mm512_and_si512(last, nibble);
    rows[2] = _mm512_and_si512(_mm512_srli_epi16(first, 4), nibble);
    rows[3] = _mm512_and_si512(_mm512_srli_epi16(last, 4), nibble);
}

/* Loads 8 columns of 32 rows: a and b as in unpack_nibbles. */
INLINE_VNNI void load_upper_512(int with_d4, const expert *e, int64_t at, __m512i *first, __m512i *last) {
    const __m512i low = _mm512_set1_epi8(0x33), high = _mm512_set1_epi8((char)0xCC), b = load_bytes_512(e->base + at);
    prefetch(e->base + at + PREFETCH_DISTANCE);
    if (!with_d4) {
        *first = _mm512_slli_epi16(_mm512_and_si512(b, low), 2);
        *last = _mm512_and_si512(b, high);
        return;
    }
    const __m512i d = load_bytes_512(e->d4 + at);
    prefetch(e->d4 + at + PREFETCH_DISTANCE);
    const __m512i differing = _mm512_and_si512(_mm512_xor_si512(_mm512_srli_epi16(d, 2), b), low);
    *first = _mm512_xor_si512(d, _mm512_slli_epi16(differing, 2));
    *last = _mm512_xor_si512(b, differing);
}

INLINE_VNNI void upper_nibbles_512(int with_d4, const expert *e, int64_t at, __m512i rows[4]) {
    __m512i a, b;
    load_upper_512(with_d4, e, at, &a, &b);
    unpack_nibbles_512(a, b, rows);
}

/* planes.h: unpack_codes of 8 columns, as unpack_nibbles_512 has them. */
INLINE_VNNI void unpack_codes_512(int64_t level, const matrix *m, const expert *e, int64_t at, __m512i rows[4]) {
    upper_nibbles_512(level > 2, e, at, rows);
    if (level <= 4) return;
    const int count = level == 6 ? 2 : 1;
    const __m512i mask = _mm512_set1_epi8((char)(level == 6 ? 3 : 1));
    const uint8_t *from = next_codes(level, m, e, at);
    prefetch(from + PREFETCH_DISTANCE);
    __m512i d;
    if (level == 6) d = load_bytes_512(from);
    else {
        const __m512i both = _mm512_broadcast_i64x4(load_bytes(from));
        d = _mm512_mask_srli_epi64(both, 0xF0, both, 4); /* the last 4 columns' bits, in the upper half */
    }
    d = fours_512(d);
    for (int r = 0; r < 4; r++) /* a | (b & mask) */
        rows[r] = _mm512_ternarylogic_epi32(_mm512_slli_epi16(rows[r], count), _mm512_srli_epi16(d, r * count), mask, 0xF8);
}

/* The 4 bytes at `first` throughout the lower half, the 4 at `last` throughout the upper one. */
INLINE_VNNI __m512i broadcast_two_fours(const int8_t *first, const int8_t *last) {
    return _mm512_mask_set1_epi32(_mm512_set1_epi32(four_bytes(first)), 0xFF00, four_bytes(last));
}

/* Four columns of a row in each dword: of 8 columns, a and b as in unpack_nibbles, the first 4 in fours[0] and the last 4 in
 * fours[1], rows 0-15 in the lower nibbles and 16-31 in the upper ones. */
INLINE_VNNI void fours_of_nibbles(__m512i a, __m512i b, __m512i fours[2]) {
    const __m512i order = _mm512_set_epi16(47, 39, 46, 38, 45, 37, 44, 36, 43, 35, 42, 34, 41, 33, 40, 32, 15, 7, 14, 6, 13, 5,
                                           12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    const __m512i upper = _mm512_unpacklo_epi8(a, b), lower = _mm512_unpackhi_epi8(a, b);
    fours[0] = _mm512_permutex2var_epi16(upper, order, lower);
    fours[1] = _mm512_permutex2var_epi16(upper, _mm512_add_epi16(order, _mm512_set1_epi16(16)), lower);
}

/* join_fours, for 32 rows at level 6 or 5. */
INLINE_VNNI void join_narrow_512(int64_t level, const matrix *m, const expert *e, int64_t at, uint8_t *tile) {
    for (int64_t i = 0; i < CHUNK; i += 8, at += 64, tile += 8 * BLOCK_ROWS) {
        __m512i rows[4];
        unpack_codes_512(level, m, e, at, rows);
        for (int h = 0; h < 2; h++) {
            _mm512_store_si512(tile + 64 * h, _mm512_shuffle_i64x2(rows[2 * h], rows[2 * h + 1], 0x44));
            _mm512_store_si512(tile + 64 * h + 128, _mm512_shuffle_i64x2(rows[2 * h], rows[2 * h + 1], 0xEE));
        }
    }
}

/* join_fours, for 32 rows at another level. */
INLINE_VNNI void join_32_rows_512(int64_t level, const matrix *m, const expert *e, int64_t at, uint8_t *tile) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < CHUNK; i += 8, at += 64, tile += 8 * BLOCK_ROWS) {
        __m512i a, b, upper[2], lower[2];
        load_upper_512(level > 2, e, at, &a, &b);
        fours_of_nibbles(a, b, upper);
        if (level == 8) {
            const uint8_t *d8 = low_codes(m, e, at);
            fours_of_nibbles(load_bytes_512(d8), load_bytes_512(d8 + m->low_half), lower);
        }
        for (int k = 0; k < 2; k++) {
            __m512i first = _mm512_and_si512(upper[k], nibble), last = _mm512_andnot_si512(nibble, upper[k]);
            if (level == 8) {
                first = _mm512_or_si512(_mm512_slli_epi16(first, 4), _mm512_and_si512(lower[k], nibble));
                last = _mm512_or_si512(last, _mm512_and_si512(_mm512_srli_epi16(lower[k], 4), nibble));
            } else last = _mm512_srli_epi16(last, 4);
            _mm512_store_si512(tile + 128 * k, first);
            _mm512_store_si512(tile + 128 * k + 64, last);
        }
    }
}

VNNI void join_fours_avx512(const matrix *m, const expert *e, int64_t block, int64_t c, uint8_t *tile) {
    const int64_t at = m->codes_at + (block * m->cols + c * CHUNK) * 8;
    if (m->rows - block * BLOCK_ROWS < BLOCK_ROWS) join_fours(m, e, block, c, tile);
    else if (level_of(m, e) == 2) join_32_rows_512(2, m, e, at, tile);
    else if (level_of(m, e) == 4) join_32_rows_512(4, m, e, at, tile);
    else if (level_of(m, e) == 5) join_narrow_512(5, m, e, at, tile);
    else if (level_of(m, e) == 6) join_narrow_512(6, m, e, at, tile);
    else join_32_rows_512(8, m, e, at, tile);
}

/* Sums of a chunk of 4 n columns of 32 rows, 16 in each. */
INLINE_VNNI void chunk_sums_512(int64_t level, const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n,
                                __m512i out[2]) {
    __m512i high[4], low[4], rows[4], lower[4]; /* level 8: the sum is 128 high + low; others: low */
    for (int r = 0; r < 4; r++) high[r] = low[r] = _mm512_setzero_si512();
    for (; n > 0; n -= 2, at += 64, x += level == 8 ? 16 : 8) {
        if (level < 8) {
            unpack_codes_512(level, m, e, at, rows);
            const __m512i v = broadcast_two_fours(x, x + 4);
            for (int r = 0; r < 4; r++) low[r] = add_dot_bytes(low[r], rows[r], v);
            continue;
        }
        const uint8_t *a = low_codes(m, e, at), *b = a + m->low_half;
        prefetch(a + PREFETCH_DISTANCE);
        prefetch(b + PREFETCH_DISTANCE);
        upper_nibbles_512(1, e, at, rows);
        unpack_nibbles_512(load_bytes_512(a), load_bytes_512(b), lower);
        const __m512i h = broadcast_two_fours(x, x + 8), l = broadcast_two_fours(x + 4, x + 12);
        for (int r = 0; r < 4; r++) {
            const __m512i code = _mm512_or_si512(_mm512_slli_epi16(rows[r], 4), lower[r]);
            high[r] = add_dot_bytes(high[r], code, h);
            low[r] = add_dot_bytes(low[r], code, l);
        }
    }
    for (int i = 0; i < 2; i++) {
        out[i] = fold_halves(low[2 * i], low[2 * i + 1]);
        if (level == 8) out[i] = _mm512_add_epi32(out[i], _mm512_slli_epi32(fold_halves(high[2 * i], high[2 * i + 1]), 7));
    }
}

/* The scales and centres of 16 rows, as float32. */
typedef struct { __m512 scale, centre; } affine_512;

INLINE_VNNI affine_512 affine_of_512(const uint8_t *scales) {
    const __m512i pair = load_bytes_512(scales), upper = _mm512_set1_epi32((int32_t)0xFFFF0000);
    return (affine_512){_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), _mm512_castsi512_ps(_mm512_and_si512(pair, upper))};
}

INLINE_VNNI void gemv_at_level(int64_t level, const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                               const float *scale, const float *sum, int64_t stride, uint16_t *y) {
    const float unit = code_unit(level), zero = zero_point(level);
    const int64_t at = m->codes_at + block * m->cols * 8, bytes = activation_bytes(level);
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t c = 0; c < m->cols / chunk; c++) {
        __m512i codes[2];
        chunk_sums_512(level, m, e, at + c * chunk * 8, x + bytes * c * chunk * stride, chunk / 4, codes);
        const uint8_t *scales = scales_of(m, e, block, c, chunk);
        prefetch_scales(m, e, block, c, chunk);
        const __m512 by = _mm512_set1_ps(unit * scale[c * stride]), all = _mm512_set1_ps(sum[c * stride]);
        const __m512 shift = _mm512_set1_ps(zero * sum[c * stride]);
        for (int h = 0; h < 2; h++) {
            const affine_512 a = affine_of_512(scales + 64 * h);
            total[h] = _mm512_fmadd_ps(a.scale, _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes[h]), by, shift), total[h]);
            total[h] = _mm512_fmadd_ps(a.centre, all, total[h]);
        }
    }
    float out[32];
    for (int h = 0; h < 2; h++) _mm512_storeu_ps(out + 16 * h, total[h]);
    for (int r = 0; r < 32; r++) y[r] = to_bf16(out[r]);
}

VNNI void gemv_block_vnni(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x, const float *scale,
                          const float *sum, int64_t stride, uint16_t *y) {
    switch (level_of(m, e)) {
    case 2: gemv_at_level(2, m, e, block, chunk, x, scale, sum, stride, y); break;
    case 4: gemv_at_level(4, m, e, block, chunk, x, scale, sum, stride, y); break;
    case 5: gemv_at_level(5, m, e, block, chunk, x, scale, sum, stride, y); break;
    case 6: gemv_at_level(6, m, e, block, chunk, x, scale, sum, stride, y); break;
    default: gemv_at_level(8, m, e, block, chunk, x, scale, sum, stride, y);
    }
}

/* gemv_at_level for `tokens` tokens, a constant of 2 to 4, at a level below 8: each code is unpacked once for all of them. */
INLINE_VNNI void few_at_level(int tokens, int64_t level, const matrix *m, const expert *e, int64_t block, int64_t chunk,
                              const int8_t *x, const float *scale, const float *sum, int64_t stride, uint16_t *y) {
    const float unit = code_unit(level), zero = zero_point(level);
    int64_t at = m->codes_at + block * m->cols * 8;
    __m512 total[FEW_TOKENS][2];
    for (int t = 0; t < tokens; t++) total[t][0] = total[t][1] = _mm512_setzero_ps();
    for (int64_t c = 0; c < m->cols / chunk; c++, x += chunk * stride, scale += stride, sum += stride) {
        __m512i codes[FEW_TOKENS][4], rows[4];
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < 4; r++) codes[t][r] = _mm512_setzero_si512();
        for (int64_t i = 0; i < chunk; i += 8, at += 64) {
            unpack_codes_512(level, m, e, at, rows);
            for (int t = 0; t < tokens; t++) {
                const int8_t *of_token = x + t * chunk + i;
                const __m512i v = broadcast_two_fours(of_token, of_token + 4);
                for (int r = 0; r < 4; r++) codes[t][r] = add_dot_bytes(codes[t][r], rows[r], v);
            }
        }
        const uint8_t *scales = scales_of(m, e, block, c, chunk);
        prefetch_scales(m, e, block, c, chunk);
        for (int h = 0; h < 2; h++) {
            const affine_512 a = affine_of_512(scales + 64 * h);
            for (int t = 0; t < tokens; t++) {
                const __m512 by = _mm512_set1_ps(unit * scale[t]), shift = _mm512_set1_ps(zero * sum[t]);
                const __m512 numbers = _mm512_cvtepi32_ps(fold_halves(codes[t][2 * h], codes[t][2 * h + 1]));
                total[t][h] = _mm512_fmadd_ps(a.scale, _mm512_fmadd_ps(numbers, by, shift), total[t][h]);
                total[t][h] = _mm512_fmadd_ps(a.centre, _mm512_set1_ps(sum[t]), total[t][h]);
            }
        }
    }
    for (int t = 0; t < tokens; t++, y += m->rows) {
        float out[32];
        for (int h = 0; h < 2; h++) _mm512_storeu_ps(out + 16 * h, total[t][h]);
        for (int r = 0; r < 32; r++) y[r] = to_bf16(out[r]);
    }
}

VNNI void few_block_vnni(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x, const float *scale,
                         const float *sum, int64_t stride, int64_t tokens, uint16_t *y) {
#define FEW(level, n) \
    case n: few_at_level(n, level, m, e, block, chunk, x, scale, sum, stride, y); break
#define ANY_FEW(level) \
    do { \
        switch (tokens) { \
            FEW(level, 2); \
            FEW(level, 3); \
            FEW(level, 4); \
        default: gemv_block_vnni(m, e, block, chunk, x, scale, sum, stride, y); \
        } \
    } while (0)
    switch (level_of(m, e)) {
    case 2: ANY_FEW(2); break;
    case 5: ANY_FEW(5); break;
    case 6: ANY_FEW(6); break;
    default: ANY_FEW(4);
    }
#undef ANY_FEW
#undef FEW
}

VNNI void quantize_a8_avx512(const uint16_t *x, int8_t *q, float *scale, float *sum) {
    const __m512i sign = _mm512_set1_epi16(0x7fff);
    const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), sign), b = _mm512_and_si512(_mm512_loadu_si512(x + 32), sign);
    const __m512i most = _mm512_max_epu16(a, b);
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    /* The largest of 8 is the complement of the least complement. */
    const uint16_t bits = (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0);
    const float largest = from_bf16(bits < 0x7f80 ? bits : 0x7fc0);
    const __m512 by = _mm512_set1_ps(by_largest(A8_MAX, largest));
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < CHUNK; i += 16) {
        const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + i))), 16);
        const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(wide), by));
        total = _mm512_add_epi32(total, v);
        const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        _mm_storeu_si128((__m128i *)(q + i), _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(v), order));
    }
    *scale = largest / A8_MAX;
    *sum = (float)_mm512_reduce_add_epi32(total) * *scale;
}

/* Adds a chunk's products of `halves` times 16 rows and `tokens` tokens, at most GEMM_TOKENS. */
INLINE_VNNI void gemm_tokens(const uint8_t *tile, const uint8_t *scales, int halves, int64_t level, int64_t chunk,
                             const int8_t *x, const float *scale, const float *sum, int tokens, float *total) {
    const float unit = code_unit(level), zero = zero_point(level);
    __m512i codes[2][GEMM_TOKENS], rows[2];
    for (int h = 0; h < halves; h++)
        for (int t = 0; t < tokens; t++) codes[h][t] = _mm512_setzero_si512();
    if (level == 8)
        for (int64_t i = 0; i < chunk / 2; i++, tile += 2 * BLOCK_ROWS, x += 4) {
            for (int h = 0; h < halves; h++)
                rows[h] = _mm512_cvtepu8_epi16(_mm256_load_si256((const __m256i *)tile + h));
            for (int t = 0; t < tokens; t++) {
                const __m512i v = _mm512_set1_epi32(four_bytes(x + 2 * t * chunk));
                for (int h = 0; h < halves; h++) codes[h][t] = add_dot_words(codes[h][t], rows[h], v);
            }
        }
    else
        add_fours(tile, halves, chunk, x, tokens, codes);
    affine_512 a[2];
    for (int h = 0; h < halves; h++) a[h] = affine_of_512(scales + 64 * h);
    for (int t = 0; t < tokens; t++) {
        const __m512 by = _mm512_set1_ps(unit * scale[t]), all = _mm512_set1_ps(sum[t]), shift = _mm512_set1_ps(zero * sum[t]);
        for (int h = 0; h < halves; h++) {
            float *into = total + t * BLOCK_ROWS + 16 * h;
            const __m512 units = _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes[h][t]), by, shift);
            const __m512 scaled = _mm512_fmadd_ps(a[h].scale, units, _mm512_load_ps(into));
            _mm512_store_ps(into, _mm512_fmadd_ps(a[h].centre, all, scaled));
        }
    }
}

/* One loop for each count, which has its sums in registers. */
#define TOKENS(n) gemm_tokens(tile, scales, halves, level, chunk, x + bytes * t * chunk, scale + t, sum + t, n, total + t * BLOCK_ROWS)
INLINE_VNNI void gemm_halves(const uint8_t *tile, const uint8_t *scales, int halves, int64_t level, int64_t chunk,
                             const int8_t *x, const float *scale, const float *sum, int64_t tokens, float *total) {
    const int64_t bytes = activation_bytes(level);
    int64_t t = 0;
    for (; t + 8 <= tokens; t += 8) TOKENS(8);
    if (tokens & 4) TOKENS(4), t += 4;
    if (tokens & 2) TOKENS(2), t += 2;
    if (tokens & 1) TOKENS(1);
}

/* With a constant number of columns the tokens lie at constant distances. */
INLINE_VNNI void gemm_columns(const uint8_t *tile, const uint8_t *scales, int64_t rows, int64_t level, int64_t chunk,
                              const int8_t *x, const float *scale, const float *sum, int64_t tokens, float *total) {
    if (level == 8 && rows == 32) gemm_halves(tile, scales, 2, 8, chunk, x, scale, sum, tokens, total);
    else if (level == 8) gemm_halves(tile, scales, 1, 8, chunk, x, scale, sum, tokens, total);
    else if (rows == 32) gemm_halves(tile, scales, 2, level, chunk, x, scale, sum, tokens, total);
    else gemm_halves(tile, scales, 1, level, chunk, x, scale, sum, tokens, total);
}

VNNI void gemm_chunk_vnni(const uint8_t *tile, const uint8_t *scales, int64_t rows, int64_t level, int64_t chunk, const int8_t *x,
                          const float *scale, const float *sum, int64_t tokens, float *total) {
    if (chunk == CHUNK) gemm_columns(tile, scales, rows, level, CHUNK, x, scale, sum, tokens, total);
    else gemm_columns(tile, scales, rows, level, chunk, x, scale, sum, tokens, total);
}
#endif
