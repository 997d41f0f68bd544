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

/* Of each 128 bits of a and of b: both sums of two neighbours. */
INLINE_BF16 __m512 neighbours(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); }

/* The sums of four accumulators of one token, in the lowest 128 bits, and of another token's in the third 128 bits: of each
 * accumulator its halves are added first, then neighbours twice, then what is left of both halves. */
INLINE_BF16 __m512 sums_of(const __m512 a[ROWS], const __m512 b[ROWS]) {
    __m512 half[ROWS];
    for (int r = 0; r < ROWS; r++) half[r] = _mm512_add_ps(_mm512_shuffle_f32x4(a[r], b[r], 0x44), _mm512_shuffle_f32x4(a[r], b[r], 0xee));
    const __m512 pairs = neighbours(neighbours(half[0], half[1]), neighbours(half[2], half[3]));
    return _mm512_add_ps(pairs, _mm512_shuffle_f32x4(pairs, pairs, 0xb1));
}

/* 16 numbers of int8 times `by`; beyond `columns` they are zeros. */
INLINE_BF16 __m512 scaled(const int8_t *from, __mmask16 columns, __m512 by) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(columns, from))), by);
}

INLINE_BF16 __m512 sixteen_from_bf16(const uint16_t *from, __mmask16 columns) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, from)), 16));
}

/* Columns [k, k + STEP) of a row of W; by: of BY_COLUMN their scales. */
INLINE_BF16 __m512bh load_row(enum numbers numbers, const numbers_matrix *w, int64_t row, int64_t k, __mmask32 columns, const __m512 by[2]) {
    const int64_t at = row * w->cols + k;
    if (numbers == BF16_NUMBERS) return load((const uint16_t *)w->at + at, columns);
    const int8_t *from = (const int8_t *)w->at + at;
    const __m512 of_row = numbers == BY_ROW ? _mm512_set1_ps(from_bf16(w->scale[row])) : by[0];
    const __m512 first = scaled(from, (__mmask16)columns, of_row);
    return _mm512_cvtne2ps_pbh(scaled(from + STEP / 2, (__mmask16)(columns >> 16), numbers == BY_ROW ? of_row : by[1]), first);
}

/* x and y of some tokens, from one to the next. */
typedef struct {
    const uint16_t *x;
    uint16_t *y;
    int64_t x_cols, y_cols;
} token_rows;

/* `rows` rows from `row`, 1 or ROWS, times `tokens` tokens; both constants. An output's bits do not depend on either. */
INLINE_BF16 void tile(enum numbers numbers, int rows, int tokens, const numbers_matrix *w, int64_t row, const token_rows *of) {
    /* Where rows are short the next tile's rows are prefetched: this tile's are read before a prefetch of them arrives. */
    const int64_t size = numbers == BF16_NUMBERS ? 2 : 1, ahead = w->cols * size > PREFETCH_DISTANCE ? 0 : ROWS;
    __m512 sum[TOKENS][ROWS];
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < ROWS; r++) sum[t][r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < w->cols; k += STEP) {
        const __mmask32 columns = w->cols - k >= STEP ? ~0u : (1u << (w->cols - k)) - 1;
        __m512bh v[TOKENS];
        __m512 by[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        if (numbers == BY_COLUMN)
            for (int i = 0; i < 2; i++) by[i] = sixteen_from_bf16(w->scale + k + i * STEP / 2, (__mmask16)(columns >> 16 * i));
        for (int t = 0; t < tokens; t++) v[t] = load(of->x + t * of->x_cols + k, columns);
        for (int r = 0; r < rows; r++) {
            if (tokens == 1) prefetch((const uint8_t *)w->at + ((row + r + ahead) * w->cols + k) * size + (ahead ? 0 : PREFETCH_DISTANCE));
            const __m512bh of_row = load_row(numbers, w, row + r, k, columns, by);
            for (int t = 0; t < tokens; t++) sum[t][r] = add_dot(sum[t][r], of_row, v[t]);
        }
    }
#pragma GCC unroll 3 /* so that sums stay in registers */
    for (int t = 0; t < tokens; t += 2) {
        const __m256i out = (__m256i)_mm512_cvtneps_pbh(sums_of(sum[t], sum[min_of(t + 1, tokens - 1)]));
        const __m128i of_token[] = {_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1)};
        for (int i = 0; i < min_of(2, tokens - t); i++) memcpy(of->y + (t + i) * of->y_cols + row, of_token + i, (size_t)rows * sizeof *of->y);
    }
}

INLINE_BF16 void rows_times_tokens(enum numbers numbers, int rows, const numbers_matrix *w, int64_t row, const token_rows *of, int64_t tokens) {
    switch (tokens) {
        case 1: tile(numbers, rows, 1, w, row, of); break;
        case 2: tile(numbers, rows, 2, w, row, of); break;
        case 3: tile(numbers, rows, 3, w, row, of); break;
        case 4: tile(numbers, rows, 4, w, row, of); break;
        case 5: tile(numbers, rows, 5, w, row, of); break;
        default: tile(numbers, rows, TOKENS, w, row, of);
    }
}

INLINE_BF16 void all_rows(enum numbers numbers, const numbers_matrix *w, const uint16_t *x, int64_t x_cols, int64_t tokens, int64_t y_cols,
                          uint16_t *y) {
    for (int64_t t = 0; t < tokens; t += TOKENS) {
        const token_rows of = {x + t * x_cols, y + t * y_cols, x_cols, y_cols};
        const int64_t now = min_of(TOKENS, tokens - t);
        int64_t row = 0;
        for (; row + ROWS <= w->rows; row += ROWS) rows_times_tokens(numbers, ROWS, w, row, &of, now);
        for (; row < w->rows; row++) rows_times_tokens(numbers, 1, w, row, &of, now);
    }
}

BF16 void dense_bf16(const numbers_matrix *w, const uint16_t *x, int64_t x_cols, int64_t tokens, int64_t y_cols, uint16_t *y) {
    switch (w->numbers) {
        case BY_ROW: all_rows(BY_ROW, w, x, x_cols, tokens, y_cols, y); break;
        case BY_COLUMN: all_rows(BY_COLUMN, w, x, x_cols, tokens, y_cols, y); break;
        default: all_rows(BF16_NUMBERS, w, x, x_cols, tokens, y_cols, y);
    }
}
#endif
