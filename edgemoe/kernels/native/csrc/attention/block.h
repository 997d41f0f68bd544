/* What a path computes of a block of keys and some queries: products of bf16 numbers, and softmax.
 *
 * Every path gives the same bits. The order of sums is that of AMX (TDPBF16PS in Intel's manual): of DEPTH products those
 * of even index are added up one after another from zero, with one rounding each, those of odd index likewise; then both
 * sums, and the result to c. VDPBF16PS adds two products to a sum, the upper one first, so its pairs are numbers 0 and 2
 * of four, and 1 and 3. Both take numbers below 2^-126 for zero, and so does every path, with flush_small; on
 * aarch64 also a result that would only be rounded up to 2^-126.
 */
#pragma once
#include "../paths.h"
#include "attention.h"

#if COMPILED
enum {
    KEYS = 64,  /* most of a block */
    LANES = 32, /* queries of a panel, side by side */
    DEPTH = 32, /* products whose order is fixed together; operands are filled up to a multiple of it with zeros */
};

/* A, as float32 or pairs of bf16: number k of a row lies k * step after the row's first one, which lies `row` after
 * the first one of the row before. Tiles take rows whose numbers follow one another. */
typedef struct {
    const uint32_t *at;
    int64_t row, step;
} operand;

/* A panel's queries of a prompt, in lanes: their positions and the last tokens that they see, both ascending, the tokens
 * that each sees up to its own (0: all), and the running state of softmax. */
typedef struct {
    const int32_t *position, *last;
    int64_t window;
    float scaling;
    float *largest, *total;
} panel_state;

typedef struct {
    /* A of the rows of x [count, dim], stored in a format of keys and values, or of its columns: to [count, padded(dim)] or
     * [padded(count), padded(dim)]; x is rounded to bf16, scratch is [count, dim]. A of the columns, except by tiles, is B of
     * the rows as well: lanes from l on, `step` numbers from one to the next. */
    operand (*rows)(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to);
    operand (*columns)(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to);
    /* Turns x [depth, LANES], float32 with the values of bf16, into B, in its place; NULL: x is B. */
    void (*lanes)(float *x, int64_t depth);
    /* c [rows, LANES] = c factor [LANES] + A B; without factors c is overwritten. B's rows lie `step` numbers apart. Writes up
     * to 3 rows more than `rows`, by tiles 31. */
    void (*multiply)(operand a, const float *b, int64_t step, int64_t rows, int64_t depth, const float *factor, float *c);
    /* A step of the online softmax: replaces the scores of `keys` keys from t, before scaling, by e^(score - largest),
     * rounded to bf16, with zeros after them up to padded(keys), and updates `largest` and `total`; earlier sums are to
     * be multiplied by `factor`. */
    void (*softmax)(float *scores, int64_t t, int64_t keys, const panel_state *s, float *factor);
    /* The same for one query and KEYS keys, in two halves, of which it sees [low, high): returns the factor. */
    float (*softmax_head)(const float *const scores[2], float scaling, int64_t low, int64_t high, float *largest, float *total,
                          uint16_t *weights);
} block_path;

static inline int64_t padded(int64_t n) { return ceil_div(n, DEPTH) * DEPTH; }

/* Whether a query of the panel does not see one of `keys` keys from t. */
static inline int hides_keys(const panel_state *s, int64_t t, int64_t keys) {
    return t + keys - 1 > s->last[0] || (s->window && s->position[LANES - 1] - s->window + 1 > t);
}

/* Of four numbers, those in the upper and in the lower halves of two pairs. */
typedef struct { int upper[2], lower[2]; } pair_order;

/* B as pairs, in its place; `order` is a constant. */
INLINE void pair_lanes(float *x, int64_t depth, pair_order order) {
    const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000);
    for (int64_t k = 0; k < depth; k += 4)
        for (int64_t l = 0; l < LANES; l += 8) {
            __m256i row[4];
            for (int i = 0; i < 4; i++) row[i] = _mm256_loadu_si256((const __m256i *)(x + (k + i) * LANES + l));
            for (int i = 0; i < 2; i++) {
                const __m256i pair = _mm256_or_si256(_mm256_and_si256(row[order.upper[i]], upper), _mm256_srli_epi32(row[order.lower[i]], 16));
                _mm256_storeu_si256((__m256i *)(x + (k / 2 + i) * LANES + l), pair);
            }
        }
}

/* Eight numbers of a row, or zeros, in the lower halves. */
INLINE __m256i eight_halves(const uint16_t *from, int exists) {
    return exists ? _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)) : _mm256_setzero_si256();
}

/* Pairs of the rows of x [count, dim], to [padded(count) / 2, padded(dim)]. */
INLINE void pair_rows(const uint16_t *x, int64_t count, int64_t dim, pair_order order, uint32_t *to) {
    const int64_t width = padded(dim);
    for (int64_t k = 0; k < padded(count); k += 4, x += 4 * dim)
        for (int64_t c = 0; c < width; c += 8) {
            __m256i row[4];
            for (int i = 0; i < 4; i++) row[i] = eight_halves(x + i * dim + c, k + i < count && c < dim);
            for (int i = 0; i < 2; i++) {
                const __m256i pair = _mm256_or_si256(_mm256_slli_epi32(row[order.upper[i]], 16), row[order.lower[i]]);
                _mm256_storeu_si256((__m256i *)(to + (k / 2 + i) * width + c), pair);
            }
        }
}

/* Lets the calling thread take numbers below 2^-126 for zero; returns the state to restore. */
static inline uint64_t flush_small(void) {
#if defined(__x86_64__)
    enum { FLUSH = 1 << 15 | 1 << 6 }; /* results, operands */
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSH);
#else
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"(before | 1 << 24));
#endif
    return before;
}

static inline void restore_small(uint64_t before) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)before);
#else
    __asm__ volatile("msr fpcr, %0" ::"r"(before));
#endif
}
#endif
