/* Products with low-rank factors of 3 bits per number. */
#include "factors.h"

#if COMPILED
/* A group's codes, 8 of each lane, the first of each in the lowest bits; and the eight numbers that codes stand for. */
typedef struct { __m256i codes; __m256 numbers; } group;

INLINE group load_group(factor_rows rows, int64_t at) {
    const __m256i spread = _mm256_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1,
                                            0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    const __m256 signed_codes = _mm256_setr_ps(-4, -3, -2, -1, 0, 1, 2, 3);
    const __m128i *codes = (const __m128i *)(rows.codes + at * CODE_BYTES);
    const __m128i last = _mm_loadu_si128((const __m128i *)((const uint8_t *)codes + CODE_BYTES / 2));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(codes)), last, 1);
    return (group){_mm256_shuffle_epi8(both, spread), _mm256_mul_ps(_mm256_set1_ps(from_bf16(rows.scales[at])), signed_codes)};
}

/* The next 8 numbers of a group, whose codes move up. */
INLINE __m256 next_eight(group *g) {
    const __m256 eight = _mm256_permutevar8x32_ps(g->numbers, g->codes); /* of an index the lowest 3 bits count */
    g->codes = _mm256_srli_epi32(g->codes, 3);
    return eight;
}

INLINE void project(const factors *f, int64_t rank, const uint16_t *const *x, int tokens, float *t, int64_t t_stride) {
    const int64_t groups = ceil_div(f->cols, FACTOR_GROUP);
    int64_t at[FACTOR_RANKS];
    __m256 sums[FACTOR_TOKENS][FACTOR_RANKS];
    for (int r = 0; r < FACTOR_RANKS; r++) {
        at[r] = min_of(rank + r, f->rank - 1) * groups;
        for (int n = 0; n < tokens; n++) sums[n][r] = _mm256_setzero_ps();
    }
    for (int64_t c = 0; c < f->cols; c += FACTOR_GROUP) {
        group g[FACTOR_RANKS];
        for (int r = 0; r < FACTOR_RANKS; r++) {
            g[r] = load_group(f->v, at[r]++);
            prefetch(f->v.codes + at[r] * CODE_BYTES + PREFETCH_DISTANCE);
        }
        const int64_t end = min_of(c + FACTOR_GROUP, f->cols);
        for (int64_t k = c; k < end; k += 8) {
            __m256 inputs[FACTOR_TOKENS];
            for (int n = 0; n < tokens; n++) inputs[n] = eight_from_bf16(x[n] + k);
            for (int r = 0; r < FACTOR_RANKS; r++) {
                const __m256 eight = next_eight(g + r);
                for (int n = 0; n < tokens; n++) sums[n][r] = _mm256_fmadd_ps(eight, inputs[n], sums[n][r]);
            }
        }
    }
    for (int n = 0; n < tokens; n++)
        for (int r = 0; r < FACTOR_RANKS && rank + r < f->rank; r++) t[n * t_stride + r] = horizontal_sum(sums[n][r]);
}

AVX2 void factors_project(const factors *f, int64_t rank, const uint16_t *const *x, int64_t tokens, float *t, int64_t t_stride) {
    /* One loop for each count, which has its sums in registers. */
    if (tokens == 1) project(f, rank, x, 1, t, t_stride);
    else project(f, rank, x, FACTOR_TOKENS, t, t_stride);
}

enum { HALF = FACTOR_GROUP / 2, VECTORS = HALF / 8 };

/* Adds U t to the rows of half a group, of which those in [first, end) are stored. */
INLINE void add_half(const factors *f, int64_t half, int64_t first, int64_t end, const float *t, int64_t t_stride,
                     int tokens, uint16_t *y, int64_t y_stride) {
    const int64_t groups = ceil_div(f->rows, FACTOR_GROUP);
    __m256 sums[FACTOR_TOKENS][VECTORS];
    for (int n = 0; n < tokens; n++)
        for (int i = 0; i < VECTORS; i++) sums[n][i] = _mm256_setzero_ps();
    for (int64_t r = 0; r < f->rank; r++) {
        group g = load_group(f->u, r * groups + half / 2);
        if (half % 2) g.codes = _mm256_srli_epi32(g.codes, 3 * VECTORS);
        for (int i = 0; i < VECTORS; i++) {
            const __m256 eight = next_eight(&g);
            for (int n = 0; n < tokens; n++)
                sums[n][i] = _mm256_fmadd_ps(eight, _mm256_set1_ps(t[n * t_stride + r]), sums[n][i]);
        }
    }
    const int64_t from = half * HALF;
    for (int n = 0; n < tokens; n++) {
        float added[HALF];
        for (int i = 0; i < VECTORS; i++) _mm256_storeu_ps(added + 8 * i, sums[n][i]);
        uint16_t *row = y + n * y_stride;
        for (int64_t i = first > from ? first : from; i < min_of(end, from + HALF); i++)
            row[i] = to_bf16(from_bf16(row[i]) + added[i - from]);
    }
}

AVX2 void factors_add(const factors *f, int64_t first, int64_t end, const float *t, int64_t t_stride, int64_t tokens,
                      uint16_t *y, int64_t y_stride) {
    for (int64_t half = first / HALF; half * HALF < end; half++) {
        if (tokens == 1) add_half(f, half, first, end, t, t_stride, 1, y, y_stride);
        else add_half(f, half, first, end, t, t_stride, FACTOR_TOKENS, y, y_stride);
    }
}
#endif
