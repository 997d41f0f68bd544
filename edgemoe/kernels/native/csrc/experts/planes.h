/* An expert's planes and the numbers they are multiplied with.
 *
 * An expert's codes lie in layout cpu-avx2-paired (storage/layout.py): blocks of 32 rows, of every 4 columns 32 bytes
 * of base and of d4, and 32 in each half of d8. What is multiplied is an integer: activations are turned into numbers
 * with a scale per chunk of 32 or 64 columns. At level 8 they are *fine*, of 14 bits: the rounding that adds is below
 * that of a bf16 number's own. At levels 4 and 2 they are *coarse*, of 8 bits: that adds some 1/254 of a chunk's largest
 * activation to weights that are off by 9 % and more themselves (docs/decisions/0012). A chunk's sum is exact, so one
 * token and many can go different ways to it and come out the same bit for bit:
 *   one token:   numbers times nibbles, straight from the planes, add up in 16 bits: fine ones in halves 128 h + l over
 *                a chunk, 16 steps * 2 products * 15 * 64 = 30720; coarse ones over half of it, 8 * 2 * 15 * 127 = 30480;
 *   more tokens: a chunk's codes are joined once, 32 rows of them in a tile of 2 KiB, and multiplied with every
 *                token: fine ones in 16 bits each, coarse ones in 8, added up as above;
 *   vnni.c:      both, added up in 32 bits.
 */
#ifndef EDGEMOE_PLANES_H
#define EDGEMOE_PLANES_H
#include "../bf16.h"

#if defined(__x86_64__)
typedef struct {
    int64_t rows, cols, group;       /* padded: rows % 16 == 0, cols % group == 0 */
    int64_t parameters_at, codes_at; /* offsets of this matrix in an expert's parameters and two-bit planes */
    int64_t half;                    /* bytes of a two-bit plane: where d8's second half begins */
} matrix;

typedef struct {
    const uint8_t *parameters; /* bf16 [groups, rows, 2]: 16 scale and centre */
    const uint8_t *base, *d4, *d8;
    int64_t level; /* 8, 4 or 2: planes above it may be NULL */
    int64_t x, y, tokens; /* the first of its rows of x and of y, and how many */
} expert;

INLINE __m256i four_bytes(const int8_t *x) { return _mm256_castps_si256(_mm256_broadcast_ss((const float *)x)); }

INLINE __m256i bytes_at(const uint8_t *place) { return _mm256_loadu_si256((const __m256i *)place); }

/* 4 columns of 32 rows, the nibbles of the first two in a and of the last two in b, as products of neighbouring bytes
 * want them: in rows[0] rows 0-7, columns 0 and 2 in the lower half and 1 and 3 in the upper one; then rows 8-15, 16-23,
 * 24-31. */
INLINE void unpacked(__m256i a, __m256i b, __m256i rows[4]) {
    const __m256i four = _mm256_set1_epi8(15);
    const __m256i first = _mm256_unpacklo_epi8(a, b), last = _mm256_unpackhi_epi8(a, b);
    rows[0] = _mm256_and_si256(first, four);
    rows[1] = _mm256_and_si256(last, four);
    rows[2] = _mm256_and_si256(_mm256_srli_epi16(first, 4), four);
    rows[3] = _mm256_and_si256(_mm256_srli_epi16(last, 4), four);
}

/* The same of the upper nibbles, or of level 2's: a's upper bits and b's lower ones have changed places in the planes. */
INLINE void upper_nibbles(int with_d4, const expert *e, int64_t at, __m256i rows[4]) {
    const __m256i low = _mm256_set1_epi8(0x33), high = _mm256_set1_epi8((char)0xCC), b = bytes_at(e->base + at);
    prefetch(e->base + at + AHEAD);
    if (!with_d4) {
        unpacked(_mm256_slli_epi16(_mm256_and_si256(b, low), 2), _mm256_and_si256(b, high), rows);
        return;
    }
    const __m256i d = bytes_at(e->d4 + at);
    prefetch(e->d4 + at + AHEAD);
    const __m256i differing = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(d, 2), b), low);
    unpacked(_mm256_xor_si256(d, _mm256_slli_epi16(differing, 2)), _mm256_xor_si256(b, differing), rows);
}

/* The same of the lower nibbles. */
INLINE void lower_nibbles(const matrix *m, const expert *e, int64_t at, __m256i rows[4]) {
    const uint8_t *a = e->d8 + at, *b = a + m->half;
    prefetch(a + AHEAD);
    prefetch(b + AHEAD);
    unpacked(bytes_at(a), bytes_at(b), rows);
}

/* What stands for the integer 0 of each level, in units of 16 scale (storage/planes.py). */
INLINE float zero_of(int64_t level) { return level == 8 ? -8.46875f : level == 4 ? -8.0f : -6.5f; }

/* Bytes that a number takes in a row's x. */
INLINE int64_t width_at(int64_t level) { return level == 8 ? 2 : 1; }

enum { CHUNK = 64, COARSE_STEPS = 8 }; /* most columns of a chunk; 4 columns at a time, what 16 bits have room for */

/* The scales and centres of a chunk of 32 rows, 4 bytes a row. */
INLINE const uint8_t *pairs_of(const matrix *m, const expert *e, int64_t block, int64_t c, int64_t chunk) {
    return e->parameters + m->parameters_at + (c * chunk / m->group * m->rows + block * 32) * 4;
}

enum { CHUNKS_AHEAD = 8 };

/* Asks memory for those some chunks on, each of which is in another page; behind a block's last are the next one's. */
INLINE void ask_for_pairs(const matrix *m, const expert *e, int64_t block, int64_t c, int64_t chunk) {
    const int64_t chunks = m->cols / chunk, then = c + CHUNKS_AHEAD, next = then >= chunks;
    const uint8_t *pairs = pairs_of(m, e, block + next, next ? then - chunks : then, chunk);
    prefetch(pairs);
    prefetch(pairs + 64);
}

/* How a row's numbers lie, in the order that products want: of 4 columns 0 2 1 3. */
enum form {
    HALVES = 1, /* fine, for one token: per 4 columns the bytes h0 h2 h1 h3 l0 l2 l1 l3 */
    WIDE = 2,   /* fine, for more: 16 bits each */
    BYTES = 4,  /* coarse */
};

/* One token's 32 rows of y from `block`; its chunks lie `stride` apart in x, scale and sum. */
void rows_of_one_token(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x, const float *scale,
                       const float *sum, int64_t stride, uint16_t *y);

enum { TOKENS = 64, OF_ROWS = 32 }; /* most that one pass over weights serves, and how many of its rows */

/* The same of up to TOKENS tokens: 32 rows, or the matrix's last 16. */
void rows_of_tokens(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x, const float *scale,
                    const float *sum, int64_t stride, int64_t tokens, uint16_t *y);
#endif
#endif
