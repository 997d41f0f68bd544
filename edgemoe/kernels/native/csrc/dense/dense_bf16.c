/* Products with bf16 weights by vdpbf16ps, which multiplies 32 pairs of bf16 numbers and adds them to 16 float32 sums. */
#include "dense_bf16.h"

#if defined(__x86_64__)
#define BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")))
#define INLINE_BF16 static inline __attribute__((always_inline)) BF16

enum { ROWS = 4, TOKENS = 6, STEP = 32 }; /* of a tile, and its columns at a time */

INLINE_BF16 __m512bh load(const uint16_t *from, __mmask32 columns) {
    return (__m512bh)_mm512_maskz_loadu_epi16(columns, from);
}

/* Assembly: with the intrinsic GCC copies sums between registers where many are live. */
INLINE_BF16 __m512 add_dot(__m512 sum, __m512bh a, __m512bh b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

/* The sums of four accumulators, in one order for all of them. */
INLINE_BF16 __m128 sums_of(const __m512 a[ROWS]) {
    __m256 half[ROWS];
    for (int r = 0; r < ROWS; r++) half[r] = _mm256_add_ps(_mm512_castps512_ps256(a[r]), _mm512_extractf32x8_ps(a[r], 1));
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

/* `rows` rows, 1 or ROWS, times `tokens` tokens; both constants. An output's bits do not depend on either. */
INLINE_BF16 void tile(int rows, int tokens, const uint16_t *w, int64_t cols, const uint16_t *x, int64_t y_cols, uint16_t *y) {
    __m512 sum[TOKENS][ROWS];
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < ROWS; r++) sum[t][r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < cols; k += STEP) {
        const __mmask32 columns = cols - k >= STEP ? ~0u : (1u << (cols - k)) - 1;
        __m512bh v[TOKENS];
        for (int t = 0; t < tokens; t++) v[t] = load(x + t * cols + k, columns);
        for (int r = 0; r < rows; r++) {
            if (tokens == 1) prefetch((const uint8_t *)(w + r * cols + k) + PREFETCH_DISTANCE);
            const __m512bh of_row = load(w + r * cols + k, columns);
            for (int t = 0; t < tokens; t++) sum[t][r] = add_dot(sum[t][r], of_row, v[t]);
        }
    }
    for (int t = 0; t < tokens; t++) {
        const __m128i out = (__m128i)_mm_cvtneps_pbh(sums_of(sum[t]));
        memcpy(y + t * y_cols, &out, (size_t)rows * sizeof *y);
    }
}

INLINE_BF16 void rows_times_tokens(int rows, const uint16_t *w, int64_t cols, const uint16_t *x, int64_t tokens,
                                   int64_t y_cols, uint16_t *y) {
    switch (tokens) {
        case 1: tile(rows, 1, w, cols, x, y_cols, y); break;
        case 2: tile(rows, 2, w, cols, x, y_cols, y); break;
        case 3: tile(rows, 3, w, cols, x, y_cols, y); break;
        case 4: tile(rows, 4, w, cols, x, y_cols, y); break;
        case 5: tile(rows, 5, w, cols, x, y_cols, y); break;
        default: tile(rows, TOKENS, w, cols, x, y_cols, y);
    }
}

BF16 void dense_bf16(const uint16_t *w, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens, int64_t y_cols,
                     uint16_t *y) {
    for (int64_t t = 0; t < tokens; t += TOKENS) {
        const int64_t now = min_of(TOKENS, tokens - t);
        int64_t row = 0;
        for (; row + ROWS <= rows; row += ROWS) rows_times_tokens(ROWS, w + row * cols, cols, x + t * cols, now, y_cols, y + t * y_cols + row);
        for (; row < rows; row++) rows_times_tokens(1, w + row * cols, cols, x + t * cols, now, y_cols, y + t * y_cols + row);
    }
}
#endif
