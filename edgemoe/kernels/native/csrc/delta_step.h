/* One token of a recurrence, on some columns of a head's state. */
#pragma once
#include "vectors/bf16.h"

#if COMPILED
enum { COLUMNS = 32, MOST_KEY_DIM = 1024 };

typedef struct {
    const float *q, *k;  /* [key_dim] */
    const float *keep;   /* what stays of a row of the state: of row i keep[i keep_step] */
    int64_t keep_step;
    float rate;
    const float *skip;   /* a number, of a state space; NULL: the delta rule */
} delta_token;

/* to = the `width` columns `from` of a state [key_dim, stride] after the token, which may lie in the same place; sums [width]
 * are its results of value [width]. */
INLINE void delta_some_columns(const delta_token *t, int64_t key_dim, int64_t stride, int64_t width, const float *from, float *to,
                               const float *value, float *sums) {
    float held[COLUMNS];
    for (int64_t j = 0; j < width; j++) held[j] = sums[j] = 0;
    for (int64_t i = 0; i < key_dim; i++) {
        const float *row = from + i * stride, k = t->k[i], keep = t->keep[i * t->keep_step];
        for (int64_t j = 0; j < width; j++) held[j] = __builtin_fmaf(k, row[j] * keep, held[j]);
    }
    for (int64_t j = 0; j < width; j++) {
        if (t->skip) held[j] = 0, sums[j] = *t->skip * value[j];
        held[j] = (value[j] - held[j]) * t->rate;
    }
    for (int64_t i = 0; i < key_dim; i++) {
        const float *row = from + i * stride, k = t->k[i], q = t->q[i], keep = t->keep[i * t->keep_step];
        for (int64_t j = 0; j < width; j++) {
            const float after = __builtin_fmaf(k, held[j], row[j] * keep);
            to[i * stride + j] = after;
            sums[j] = __builtin_fmaf(q, after, sums[j]);
        }
    }
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
        const __m256 v = _mm256_loadu_ps(value + 8 * j);
        if (t->skip) held[j] = _mm256_setzero_ps(), sum[j] = _mm256_mul_ps(_mm256_set1_ps(*t->skip), v);
        held[j] = _mm256_mul_ps(_mm256_sub_ps(v, held[j]), _mm256_set1_ps(t->rate));
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
