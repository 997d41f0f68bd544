/* Codes of a chunk of 32 rows, joined by 256-bit instructions: by level 8 in pairs of columns of a row, 0 and 2, 1 and 3, 4 and 6,
 * ...; by other levels in fours: 0 2 1 3, 4 6 5 7, ... */
#include "join.h"

#if COMPILED
/* Reorders 8 rows, columns 0 and 2 in the lower half and 1 and 3 in the upper one, to 0 2 1 3 of each row. */
INLINE __m256i row_major(__m256i v) {
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,
                                           0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(v, 0xD8), order);
}

/* Joins the codes of 4 columns of 32 rows at a level below 8. */
INLINE void join_codes(int64_t level, const matrix *m, const expert *e, int64_t at, uint8_t *tile) {
    __m256i rows[4];
    unpack_codes(level, m, e, at, rows);
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
        switch (level_of(m, e)) {
        case 2: join_codes(2, m, e, at, tile); break;
        case 4: join_codes(4, m, e, at, tile); break;
        case 5: join_codes(5, m, e, at, tile); break;
        case 6: join_codes(6, m, e, at, tile); break;
        default:
            if (by_fours) join_fours_level_8(m, e, at, tile);
            else join_level_8(m, e, at, tile);
        }
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
            if (level_of(m, e) == 8) code = code << 4 | (low_codes(m, e, place)[last * m->low_half] >> shift & 15);
            uint8_t *four = tile + k / 4 * 4 * BLOCK_ROWS;
            if (!by_fours) four[k % 2 * 2 * BLOCK_ROWS + 2 * r + last] = (uint8_t)code;
            else four[4 * r + k % 2 * 2 + last] = (uint8_t)code;
        }
}

AVX2 void join_rows(const matrix *m, const expert *e, int64_t block, int64_t c, int64_t chunk, int by_fours, uint8_t *tile) {
    const int64_t at = m->codes_at + block * m->cols * 8;
    if (m->rows - block * BLOCK_ROWS >= BLOCK_ROWS) join_32_rows(m, e, at + c * chunk * 8, chunk / 4, by_fours, tile);
    else join_16_rows(m, e, at + c * chunk * 4, chunk / 4, by_fours, tile);
}

AVX2 void join_fours(const matrix *m, const expert *e, int64_t block, int64_t c, uint8_t *tile) {
    join_rows(m, e, block, c, CHUNK, 1, tile);
}
#endif
