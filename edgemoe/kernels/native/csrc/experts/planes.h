/* An expert's planes and the integer activations they are multiplied with.
 *
 * The codes lie in layout cpu-avx2-paired (storage/record/layout.py): blocks of 32 rows, of every 4 columns 32 bytes of base,
 * 32 of d4, and 32 in each half of d8. Products are of integers: activations are quantized with a scale per chunk of 32
 * or 64 columns. Level 8 takes 14-bit activations (A14), whose rounding error is below that of bf16 itself. Levels 4
 * and 2 take 8-bit ones (A8), whose error is about 1/254 of a chunk's largest activation, while the weights are off by
 * 9 % and more (docs/decisions/0012). Dense weights take them at 5 and 6 bits too. A chunk's sum is exact, so all kernels give the same bits:
 *   gemv.c: one token, activations times nibbles straight from the planes, in 16-bit sums. A14 is split into halves
 *           128 h + l, which fit over a chunk: 16 steps * 2 products * 15 * 64 = 30720; A8 fits over half a chunk:
 *           8 * 2 * 15 * 127 = 30480, at 5 bits over a quarter and at 6 over an eighth (a8_steps);
 *   gemm.c: more tokens, a chunk's codes are joined once into a tile of 32 rows (2 KiB) and multiplied with every token,
 *           A14 as 16-bit and A8 as 8-bit numbers, in the same sums;
 *   join.c: joins a chunk's codes for gemm.c and tiles/;
 *   vnni.c: both, in 32-bit sums, as gemv.c and gemm.c themselves with AVX-VNNI, SDOT or USDOT;
 *   tiles/: many tokens, the same tile as a matrix of AMX, A14 as h and l.
 */
#pragma once
#include "../block_rows.h"
#include "../paths.h"
#include "factors.h"

#if COMPILED
typedef struct {
    int64_t rows, cols, group;       /* padded: rows % 16 == 0, cols % group == 0 */
    int64_t parameters_at, codes_at; /* byte offsets of this matrix in an expert's parameters and two-bit planes */
    int64_t half;                    /* bytes of a two-bit plane */
    int64_t parameter_bytes;         /* of an expert, all matrices */
    int64_t limit;                   /* 8; 4: level 8 computes the matrix at level 4, and it has no codes in d8; 6 or 5: d8 has
                                        the two bits or the one bit after the upper four, as next_bits reads them */
    int64_t low_at, low_half;        /* byte offset of this matrix in each half of d8, and of d8's second half; of the only
                                        part of d8, and its bytes, where the limit is 6 or 5 */
} matrix;

typedef struct {
    const uint8_t *parameters; /* bf16 [groups, rows, 2]: 16 scale and centre */
    const uint8_t *base, *d4, *d8;
    int64_t level;        /* 8, 4 or 2: planes above it may be NULL */
    int64_t x, y, tokens; /* index of its first row of x and of y, and the number of rows */
    const compensator *compensator; /* whose products are added to its first rows; NULL: none */
    int64_t compensated;            /* how many of them */
    int64_t number;                 /* among all experts of its layer; read where they have biases */
} expert;

/* Whether a matrix's codes lie inside d8. */
static inline int low_codes_fit(const matrix *m) {
    const int64_t weights = m->rows * m->cols;
    if (m->limit == 8) return m->low_at + weights / 4 <= m->low_half;
    if ((m->limit != 6 && m->limit != 5) || m->rows % BLOCK_ROWS || m->codes_at % 64) return 0;
    return m->low_at + weights * (m->limit - 4) / 8 <= m->low_half;
}

/* Whether a matrix is made of whole blocks and groups, and lies inside an expert's planes. */
static inline int matrix_fits(const matrix *m) {
    return m->rows > 0 && m->rows % 16 == 0 && m->group > 0 && m->group % 32 == 0 && m->cols > 0 && m->cols % m->group == 0 &&
           m->parameters_at >= 0 && m->parameters_at + m->cols / m->group * m->rows * 4 <= m->parameter_bytes &&
           m->codes_at >= 0 && m->codes_at + m->rows * m->cols / 4 <= m->half &&
           (m->limit == 4 || (m->low_at >= 0 && low_codes_fit(m)));
}

/* The level that a matrix of an expert is computed at. */
INLINE int64_t level_of(const matrix *m, const expert *e) { return min_of(e->level, m->limit); }

/* The first half of a matrix's codes in d8, at the place of `at` in a two-bit plane; the second is low_half bytes later. */
INLINE const uint8_t *low_codes(const matrix *m, const expert *e, int64_t at) { return e->d8 + (m->low_at - m->codes_at) + at; }

/* Whether every expert has the planes of its level, and its rows lie inside x and y. */
static inline int experts_fit(const expert *e, int64_t count, int64_t x_rows, int64_t y_rows) {
    for (; count > 0; count--, e++) {
        if (e->level != 8 && e->level != 4 && e->level != 2) return 0;
        if (!e->parameters || !e->base || (e->level > 2 && !e->d4) || (e->level > 4 && !e->d8)) return 0;
        if (e->tokens < 0 || e->x < 0 || e->y < 0 || e->x + e->tokens > x_rows || e->y + e->tokens > y_rows) return 0;
        if (e->compensator && (e->compensated < 1 || e->compensated > e->tokens)) return 0;
    }
    return 1;
}

enum { CHUNK = 64 }; /* maximal columns of a chunk */

/* Steps of 4 columns that fit into a 16-bit sum of A8. */
INLINE int64_t a8_steps(int64_t level) { return level == 6 ? 2 : level == 5 ? 4 : 8; }

enum { TILE_CALL_TOKENS = 128 }; /* most tokens of a call of a path with tiles */

/* Largest activations. A14 is 128 h + l, with |h| <= 64 and -64 <= l <= 63. */
enum { A14_MAX = 8191, A8_MAX = 127 };

/* Memory order of a row's activations; of every 4 columns the order is 0 2 1 3. A bit set. */
enum format {
    A14_SPLIT = 1, /* for gemv.c: per 4 columns the bytes h0 h2 h1 h3 l0 l2 l1 l3 */
    A14 = 2,       /* for gemm.c: 16 bits each */
    A8 = 4,
    A14_HALVES = 8, /* for tiles: a chunk's h, then its l, a byte each */
};

/* Bytes of an activation. */
INLINE int64_t activation_bytes(int64_t level) { return level == 8 ? 2 : 1; }

/* The code that stands for weight 0, in units of 16 scale (storage/record/planes.py). */
INLINE float zero_point(int64_t level) {
    return level == 8 ? -8.46875f : level == 6 ? -8.375f : level == 5 ? -8.25f : level == 4 ? -8.0f : -6.5f;
}

/* A code's unit, in units of 16 scale. */
INLINE float code_unit(int64_t level) {
    return level == 8 ? 1 / 16.0f : level == 6 ? 1 / 4.0f : level == 5 ? 1 / 2.0f : 1;
}

/* Unpacks 4 columns of 32 rows, the nibbles of columns 0 and 1 in a, of 2 and 3 in b, to the operand order of
 * maddubs: rows[0] has rows 0-7, columns 0 and 2 in the lower half and 1 and 3 in the upper one; rows[1] has rows 8-15,
 * rows[2] 16-23, rows[3] 24-31. */
INLINE void unpack_nibbles(__m256i a, __m256i b, __m256i rows[4]) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i first = _mm256_unpacklo_epi8(a, b), last = _mm256_unpackhi_epi8(a, b);
    rows[0] = _mm256_and_si256(first, nibble);
    rows[1] = _mm256_and_si256(last, nibble);
    rows[2] = _mm256_and_si256(_mm256_srli_epi16(first, 4), nibble);
    rows[3] = _mm256_and_si256(_mm256_srli_epi16(last, 4), nibble);
}

/* Unpacks the codes' upper nibbles, or level 2's codes. The planes store a's upper bits and b's lower ones swapped. */
INLINE void upper_nibbles(int with_d4, const expert *e, int64_t at, __m256i rows[4]) {
    const __m256i low = _mm256_set1_epi8(0x33), high = _mm256_set1_epi8((char)0xCC), b = load_bytes(e->base + at);
    prefetch(e->base + at + PREFETCH_DISTANCE);
    if (!with_d4) {
        unpack_nibbles(_mm256_slli_epi16(_mm256_and_si256(b, low), 2), _mm256_and_si256(b, high), rows);
        return;
    }
    const __m256i d = load_bytes(e->d4 + at);
    prefetch(e->d4 + at + PREFETCH_DISTANCE);
    const __m256i differing = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(d, 2), b), low);
    unpack_nibbles(_mm256_xor_si256(d, _mm256_slli_epi16(differing, 2)), _mm256_xor_si256(b, differing), rows);
}

/* The place of 4 columns' next bits in d8, at the place of `at` in a two-bit plane; 8 columns share 32 bytes at level 5. */
INLINE const uint8_t *next_codes(int64_t level, const matrix *m, const expert *e, int64_t at) {
    const int64_t place = at - m->codes_at;
    return e->d8 + m->low_at + (level == 6 ? place : place / 64 * 32);
}

/* Appends to unpacked upper nibbles the codes' next bits, two at level 6 and one at level 5. From its lowest bits on, a byte of
 * d8 has the bits of the same byte of rows[0], rows[1], rows[2], rows[3], and at level 5 of the same rows 4 columns later. */
INLINE void next_bits(int64_t level, const matrix *m, const expert *e, int64_t at, __m256i rows[4]) {
    const int count = level == 6 ? 2 : 1, later = level == 5 && (at - m->codes_at) % 64 ? 4 : 0;
    const uint8_t *from = next_codes(level, m, e, at);
    const __m256i d = load_bytes(from), mask = _mm256_set1_epi8((char)(level == 6 ? 3 : 1));
    prefetch(from + PREFETCH_DISTANCE);
    for (int r = 0; r < 4; r++) {
        const __m256i next = _mm256_and_si256(_mm256_srli_epi16(d, r * count + later), mask);
        rows[r] = _mm256_or_si256(_mm256_slli_epi16(rows[r], count), next);
    }
}

/* Unpacks the codes of a level below 8. */
INLINE void unpack_codes(int64_t level, const matrix *m, const expert *e, int64_t at, __m256i rows[4]) {
    upper_nibbles(level > 2, e, at, rows);
    if (level > 4) next_bits(level, m, e, at, rows);
}

/* Unpacks the codes' lower nibbles. */
INLINE void lower_nibbles(const matrix *m, const expert *e, int64_t at, __m256i rows[4]) {
    const uint8_t *a = low_codes(m, e, at), *b = a + m->low_half;
    prefetch(a + PREFETCH_DISTANCE);
    prefetch(b + PREFETCH_DISTANCE);
    unpack_nibbles(load_bytes(a), load_bytes(b), rows);
}

/* The scales and centres of a chunk of 32 rows, 4 bytes per row. */
INLINE const uint8_t *scales_of(const matrix *m, const expert *e, int64_t block, int64_t c, int64_t chunk) {
    return e->parameters + m->parameters_at + (c * chunk / m->group * m->rows + block * BLOCK_ROWS) * 4;
}

enum { CHUNKS_AHEAD = 8 };

/* Prefetches the scales and centres of a later chunk, each of which is in another page; past a block's last chunk, of
 * the next block. */
INLINE void prefetch_scales(const matrix *m, const expert *e, int64_t block, int64_t c, int64_t chunk) {
    const int64_t chunks = m->cols / chunk, then = c + CHUNKS_AHEAD, next = then >= chunks;
    const uint8_t *scales = scales_of(m, e, block + next, next ? then - chunks : then, chunk);
    prefetch(scales);
    prefetch(scales + 64);
}

/* The scales and centres of 8 rows, as float32. */
typedef struct { __m256 scale, centre; } affine;

INLINE affine affine_of(const uint8_t *scales) {
    const __m256i pair = load_bytes(scales), upper = _mm256_set1_epi32((int32_t)0xFFFF0000);
    return (affine){_mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), _mm256_castsi256_ps(_mm256_and_si256(pair, upper))};
}
#endif
