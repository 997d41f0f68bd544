/* A new token's attention in one call: norms of heads, rotation, its key and value into the KV, softmax, sum.
 *
 * Everything is rounded to bf16 where transformers' modules round it; scores, softmax and the sum over values are
 * float32.
 */
#include "native.h"

#if defined(__x86_64__)
#include <math.h>
#include <string.h>

typedef struct {
    int64_t heads, kv_heads, dim;             /* dim % 8 == 0 */
    const uint16_t *q_norm, *k_norm;          /* weights; NULL: no norm */
    int64_t q_norm_size, k_norm_size;         /* consecutive numbers that are normed together */
    float q_epsilon, k_epsilon, scaling;
} attention_shape;

typedef struct {
    uint16_t *keys, *values;    /* [kv_heads, context, dim] */
    int64_t context, past, first; /* tokens: room for, there before this one, the first that it sees */
} attention_kv;

typedef struct {
    const attention_shape *shape;
    const attention_kv *kv;
    const uint16_t *query;
    float *scores; /* [heads, past + 1 - first] */
    uint16_t *out;
} attention_job;

static void norm(uint16_t *x, int64_t size, const uint16_t *weight, int64_t together, float epsilon) {
    if (weight) edgemoe_rms_norm(x, weight, epsilon, size / together, together, x);
}

/* x cos + rotate_half(x) sin for each head, both products and the sum rounded. */
AVX2 static void rotate(uint16_t *x, int64_t heads, int64_t dim, const uint16_t *cosine, const uint16_t *sine) {
    const int64_t half = dim / 2;
    for (; heads-- > 0; x += dim)
        for (int64_t i = 0; i < half; i++) {
            const float low = from_bf16(x[i]), high = from_bf16(x[i + half]);
            const float a = from_bf16(to_bf16(low * from_bf16(cosine[i])));
            const float b = from_bf16(to_bf16(-high * from_bf16(sine[i])));
            const float c = from_bf16(to_bf16(high * from_bf16(cosine[i + half])));
            const float d = from_bf16(to_bf16(low * from_bf16(sine[i + half])));
            x[i] = to_bf16(a + b);
            x[i + half] = to_bf16(c + d);
        }
}

AVX2 static void head_task(void *argument, int64_t head) {
    const attention_job *job = argument;
    const int64_t dim = job->shape->dim, tokens = job->kv->past + 1 - job->kv->first;
    const int64_t at = (head / (job->shape->heads / job->shape->kv_heads) * job->kv->context + job->kv->first) * dim;
    const uint16_t *query = job->query + head * dim, *key = job->kv->keys + at, *value = job->kv->values + at;
    float *scores = job->scores + head * tokens;

    float largest = -INFINITY;
    for (int64_t t = 0; t < tokens; t++, key += dim) {
        __m256 sum = _mm256_setzero_ps();
        for (int64_t i = 0; i < dim; i += 8) sum = _mm256_fmadd_ps(eight_from_bf16(query + i), eight_from_bf16(key + i), sum);
        scores[t] = added_up(sum) * job->shape->scaling;
        largest = scores[t] > largest ? scores[t] : largest;
    }
    float total = 0;
    for (int64_t t = 0; t < tokens; t++) total += scores[t] = expf(scores[t] - largest);
    const __m256 by = _mm256_set1_ps(1 / total);
    for (int64_t i = 0; i < dim; i += 8) {
        __m256 sum = _mm256_setzero_ps();
        for (int64_t t = 0; t < tokens; t++)
            sum = _mm256_fmadd_ps(_mm256_set1_ps(scores[t]), eight_from_bf16(value + t * dim + i), sum);
        float lanes[8];
        _mm256_storeu_ps(lanes, _mm256_mul_ps(sum, by));
        for (int j = 0; j < 8; j++) job->out[head * dim + i + j] = to_bf16(lanes[j]);
    }
}

/* One sequence's new token.
 *
 * qkv [(heads + 2 kv_heads) dim], the three projections one after another, is overwritten. Its key and value go
 * to token kv->past. cosine and sine are [dim]; scores has room for heads * (past + 1 - first). out is [heads dim].
 */
void edgemoe_attention(pool *p, const attention_shape *shape, const attention_kv *kv, uint16_t *qkv,
                       const uint16_t *cosine, const uint16_t *sine, float *scores, uint16_t *out) {
    const int64_t dim = shape->dim, queries = shape->heads * dim, keys = shape->kv_heads * dim;
    uint16_t *key = qkv + queries, *value = key + keys;
    norm(qkv, queries, shape->q_norm, shape->q_norm_size, shape->q_epsilon);
    norm(key, keys, shape->k_norm, shape->k_norm_size, shape->k_epsilon);
    rotate(qkv, shape->heads, dim, cosine, sine);
    rotate(key, shape->kv_heads, dim, cosine, sine);
    for (int64_t head = 0; head < shape->kv_heads; head++) {
        const int64_t to = (head * kv->context + kv->past) * dim;
        memcpy(kv->keys + to, key + head * dim, (size_t)dim * 2);
        memcpy(kv->values + to, value + head * dim, (size_t)dim * 2);
    }
    attention_job job = {shape, kv, qkv, scores, out};
    edgemoe_run(p, head_task, &job, shape->heads);
}
#endif
