/* One token of a recurrence, on some columns of a head's state. */
#pragma once
#include "vectors/bf16.h"

#if COMPILED
enum {
    COLUMNS = 32,       /* that stay in the first-level cache from token to token */
    WIDE_COLUMNS = 256, /* of a single token */
    MOST_KEY_DIM = 1024,
};

typedef struct {
    const float *q, *k;  /* [key_dim] */
    const float *keep;   /* what stays of a row of the state: of row i keep[i keep_step] */
    int64_t keep_step;
    float rate;
} delta_token;

/* held [width] += `rows` rows of a state, a constant, times what stays of them and the key's numbers, one row after another. */
INLINE void delta_find(const delta_token *t, int64_t i, int rows, int64_t stride, int64_t width, const float *from, float *held) {
    const float *row = from + i * stride, *k = t->k + i, *keep = t->keep + i * t->keep_step;
    for (int64_t j = 0; j < width; j++) {
        float sum = held[j];
        for (int r = 0; r < rows; r++) sum = __builtin_fmaf(k[r], row[r * stride + j] * keep[r * t->keep_step], sum);
        held[j] = sum;
    }
}

/* `rows` rows of `to` = those of a state after the token, and sums [width] += their products with the query's numbers. */
INLINE void delta_replace(const delta_token *t, int64_t i, int rows, int64_t stride, int64_t width, const float *from, float *to,
                          const float *held, float *sums) {
    const float *row = from + i * stride, *k = t->k + i, *q = t->q + i, *keep = t->keep + i * t->keep_step;
    float *after = to + i * stride;
    INDEPENDENT
    for (int64_t j = 0; j < width; j++) {
        float sum = sums[j];
        for (int r = 0; r < rows; r++) {
            const float number = __builtin_fmaf(k[r], held[j], row[r * stride + j] * keep[r * t->keep_step]);
            after[r * stride + j] = number;
            sum = __builtin_fmaf(q[r], number, sum);
        }
        sums[j] = sum;
    }
}

/* Brings `width` columns of four rows that are written or read soon into the second-level cache. */
INLINE void delta_soon(const float *at, int64_t stride, int64_t width, int written) {
    for (int64_t r = 0; r < 4; r++)
        for (int64_t j = 0; j < width; j += 64 / (int64_t)sizeof *at) {
            if (written) __builtin_prefetch(at + r * stride + j, 1, 2);
            else __builtin_prefetch(at + r * stride + j, 0, 2);
        }
}

/* to = the `width` columns `from` of a state [key_dim, stride] after the token, which may lie in the same place; sums [width]
 * are its results of value [width]. Memory is read row by row; where `to` lies elsewhere it is brought while `from` is read, and what
 * follows `from`, another head's state, while `to` is written. */
INLINE void delta_some_columns(const delta_token *t, int64_t key_dim, int64_t stride, int64_t width, const float *from, float *to,
                               const float *value, float *sums) {
    float held[WIDE_COLUMNS];
    int64_t i = 0;
    for (int64_t j = 0; j < width; j++) held[j] = sums[j] = 0;
    for (; i + 4 <= key_dim; i += 4) {
        if (from != to) delta_soon(to + i * stride, stride, width, 1);
        delta_find(t, i, 4, stride, width, from, held);
    }
    for (; i < key_dim; i++) delta_find(t, i, 1, stride, width, from, held);
    for (int64_t j = 0; j < width; j++) held[j] = (value[j] - held[j]) * t->rate;
    for (i = 0; i + 4 <= key_dim; i += 4) {
        if (from != to) delta_soon(from + (key_dim + i) * stride, stride, width, 0);
        delta_replace(t, i, 4, stride, width, from, to, held, sums);
    }
    for (; i < key_dim; i++) delta_replace(t, i, 1, stride, width, from, to, held, sums);
}

/* The same for COLUMNS columns, whose sums stay in registers. */
INLINE void delta_all_columns(const delta_token *t, int64_t key_dim, int64_t stride, const float *from, float *to,
                              const float *value, float *sums) {
    enum { VECTORS = COLUMNS / 8 };
    __m256 held[VECTORS], sum[VECTORS];
    for (int j = 0; j < VECTORS; j++) held[j] = sum[j] = _mm256_setzero_ps();
    for (int64_t i = 0; i < key_dim; i++) {
        const __m256 k = _mm256_set1_ps(t->k[i]), keep = _mm256_set1_ps(t->keep[i * t->keep_step]);
        for (int j = 0; j < VECTORS; j++)
            held[j] = _mm256_fmadd_ps(k, _mm256_mul_ps(_mm256_loadu_ps(from + i * stride + 8 * j), keep), held[j]);
    }
    for (int j = 0; j < VECTORS; j++) {
        held[j] = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(value + 8 * j), held[j]), _mm256_set1_ps(t->rate));
    }
    for (int64_t i = 0; i < key_dim; i++) {
        const __m256 k = _mm256_set1_ps(t->k[i]), q = _mm256_set1_ps(t->q[i]), keep = _mm256_set1_ps(t->keep[i * t->keep_step]);
        for (int j = 0; j < VECTORS; j++) {
            const int64_t at = i * stride + 8 * j;
            const __m256 after = _mm256_fmadd_ps(k, held[j], _mm256_mul_ps(_mm256_loadu_ps(from + at), keep));
            _mm256_storeu_ps(to + at, after);
            sum[j] = _mm256_fmadd_ps(q, after, sum[j]);
        }
    }
    for (int j = 0; j < VECTORS; j++) _mm256_storeu_ps(sums + 8 * j, sum[j]);
}

INLINE void delta_columns(const delta_token *t, int64_t key_dim, int64_t stride, int64_t width, const float *from, float *to,
                          const float *value, float *sums) {
    if (width == COLUMNS) delta_all_columns(t, key_dim, stride, from, to, value, sums);
    else delta_some_columns(t, key_dim, stride, width, from, to, value, sums);
}

/* to [count] = x / sqrt(sum of squares + 1e-6) * scale. */
INLINE void delta_normalised(const float *x, int64_t count, float scale, float *to) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) sum = __builtin_fmaf(x[i], x[i], sum);
    const float by = 1 / __builtin_sqrtf(sum + 1e-6f) * scale;
    for (int64_t i = 0; i < count; i++) to[i] = x[i] * by;
}
#endif
