/* Softmax attention of query heads that share keys and values. */
#include "heads.h"

#if defined(__x86_64__)
#include <math.h>

enum { SUMS = 8 }; /* accumulators that fit into registers */

/* horizontal_sum of each, with the same bits. */
INLINE __m128 four_horizontal_sums(const __m256 v[4]) {
    __m128 s[4];
    for (int i = 0; i < 4; i++) s[i] = _mm_add_ps(_mm256_castps256_ps128(v[i]), _mm256_extractf128_ps(v[i], 1));
    _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
    return _mm_add_ps(_mm_add_ps(s[0], s[2]), _mm_add_ps(s[1], s[3]));
}

/* Scores of n heads from `head` and `many` tokens from t; n * many == SUMS, or many == 1. */
INLINE void compute_scores(const heads *h, int64_t head, int n, int64_t t, int many) {
    __m256 sum[SUMS];
    for (int i = 0; i < n * many; i++) sum[i] = _mm256_setzero_ps();
    for (int64_t i = 0; i < h->dim; i += 8) {
        __m256 query[HEADS];
        for (int k = 0; k < n; k++) query[k] = _mm256_loadu_ps(h->queries + (head + k) * h->dim + i);
        for (int j = 0; j < many; j++) {
            const __m256 key = eight_from_bf16(h->keys + (t + j) * h->dim + i);
            for (int k = 0; k < n; k++) sum[k * many + j] = _mm256_fmadd_ps(query[k], key, sum[k * many + j]);
        }
    }
    float lanes[SUMS];
    if (n * many == SUMS)
        for (int i = 0; i < SUMS; i += 4) _mm_storeu_ps(lanes + i, four_horizontal_sums(sum + i));
    else
        for (int i = 0; i < n * many; i++) lanes[i] = horizontal_sum(sum[i]);
    for (int k = 0; k < n; k++)
        for (int j = 0; j < many; j++) h->scores[(head + k) * h->stride + t + j] = lanes[k * many + j] * h->scaling;
}

/* Replaces scores by e^(score - largest); returns their sum. */
INLINE float exponentials(float *scores, int64_t tokens) {
    float largest = -INFINITY;
    for (int64_t t = 0; t < tokens; t++) largest = scores[t] > largest ? scores[t] : largest;
    for (int64_t t = tokens; t % 8; t++) scores[t] = largest;
    const __m256 most = _mm256_set1_ps(largest);
    for (int64_t t = 0; t < tokens; t += 8)
        _mm256_storeu_ps(scores + t, exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + t), most)));
    for (int64_t t = tokens; t % 8; t++) scores[t] = 0;
    __m256 sum = _mm256_setzero_ps();
    for (int64_t t = 0; t < tokens; t += 8) sum = _mm256_add_ps(sum, _mm256_loadu_ps(scores + t));
    return horizontal_sum(sum);
}

/* Columns [from, from + 8 vectors) of n heads' weighted sums over values; n * vectors <= SUMS. */
INLINE void sum_values(const heads *h, int64_t head, int n, int64_t from, int vectors, const float *total) {
    __m256 sum[SUMS];
    for (int i = 0; i < n * vectors; i++) sum[i] = _mm256_setzero_ps();
    const uint16_t *value = h->values + from;
    const float *scores = h->scores + head * h->stride;
    for (int64_t t = 0; t < h->tokens; t++, value += h->dim) {
        __m256 wide[SUMS];
        for (int j = 0; j < vectors; j++) wide[j] = eight_from_bf16(value + 8 * j);
        for (int k = 0; k < n; k++) {
            const __m256 score = _mm256_set1_ps(scores[k * h->stride + t]);
            for (int j = 0; j < vectors; j++) sum[k * vectors + j] = _mm256_fmadd_ps(score, wide[j], sum[k * vectors + j]);
        }
    }
    for (int k = 0; k < n; k++)
        for (int j = 0; j < vectors; j++) {
            float lanes[8];
            _mm256_storeu_ps(lanes, _mm256_mul_ps(sum[k * vectors + j], _mm256_set1_ps(1 / total[k])));
            for (int i = 0; i < 8; i++) h->out[(head + k) * h->dim + from + 8 * j + i] = to_bf16(lanes[i]);
        }
}

/* Attention of n heads from `head`: 4, 2 or 1. */
INLINE void attend_heads(const heads *h, int64_t head, int n) {
    int64_t t = 0, from = 0;
    for (; t + SUMS / n <= h->tokens; t += SUMS / n) compute_scores(h, head, n, t, SUMS / n);
    for (; t < h->tokens; t++) compute_scores(h, head, n, t, 1);
    float total[HEADS];
    for (int k = 0; k < n; k++) total[k] = exponentials(h->scores + (head + k) * h->stride, h->tokens);
    for (; from + 8 * (SUMS / n) <= h->dim; from += 8 * (SUMS / n)) sum_values(h, head, n, from, SUMS / n, total);
    for (; from < h->dim; from += 16) sum_values(h, head, n, from, 2, total);
}

AVX2 void attend(const heads *h) {
    int64_t head = 0;
    for (; head + 4 <= h->count; head += 4) attend_heads(h, head, 4);
    for (; head + 2 <= h->count; head += 2) attend_heads(h, head, 2);
    for (; head < h->count; head++) attend_heads(h, head, 1);
}
#endif
