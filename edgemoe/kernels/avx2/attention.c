/* A new token's attention in one call: norms of heads, rotation, its key and value into the KV, softmax, sum.
 *
 * Everything is rounded to bf16 where transformers' modules round it; scores, softmax and the sum over values are
 * float32.
 */
#include "dense.h"

#if defined(__x86_64__)
#include <math.h>

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
    float *scores; /* [heads, tokens] */
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

enum { TOGETHER = 32 }; /* numbers of a value that are added up at once */

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
    for (int64_t from = 0; from < dim; from += TOGETHER) {
        const int n = (int)(dim - from < TOGETHER ? dim - from : TOGETHER) / 8;
        __m256 sum[TOGETHER / 8];
        for (int j = 0; j < TOGETHER / 8; j++) sum[j] = _mm256_setzero_ps();
        const uint16_t *v = value + from;
        if (n == TOGETHER / 8)
            for (int64_t t = 0; t < tokens; t++, v += dim)
                for (int j = 0; j < TOGETHER / 8; j++)
                    sum[j] = _mm256_fmadd_ps(_mm256_set1_ps(scores[t]), eight_from_bf16(v + 8 * j), sum[j]);
        else
            for (int64_t t = 0; t < tokens; t++, v += dim)
                for (int j = 0; j < n; j++)
                    sum[j] = _mm256_fmadd_ps(_mm256_set1_ps(scores[t]), eight_from_bf16(v + 8 * j), sum[j]);
        float lanes[TOGETHER];
        for (int j = 0; j < n; j++) _mm256_storeu_ps(lanes + 8 * j, _mm256_mul_ps(sum[j], _mm256_set1_ps(1 / total)));
        for (int j = 0; j < 8 * n; j++) job->out[head * dim + from + j] = to_bf16(lanes[j]);
    }
}

/* One sequence's new token.
 *
 * qkv [(heads + 2 kv_heads) dim], the three projections one after another, is overwritten. Its key and value go
 * to token kv->past. cosine and sine are [dim]; out is [heads dim]. Returns 0, or -1 where there is no memory.
 */
int edgemoe_attention(pool *p, const attention_shape *shape, const attention_kv *kv, uint16_t *qkv,
                      const uint16_t *cosine, const uint16_t *sine, uint16_t *out) {
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
    float *scores = pool_take(p, (size_t)(shape->heads * (kv->past + 1 - kv->first)) * sizeof(float));
    if (!scores) return -1;
    attention_job job = {shape, kv, qkv, scores, out};
    pool_run(p, head_task, &job, shape->heads);
    pool_give_back(p);
    return 0;
}

typedef struct {
    const void *weight;
    const uint16_t *row_scale, *bias; /* NULL: none */
    int64_t rows, cols;
} linear;

/* A decoder layer up to its experts. */
typedef struct {
    const attention_shape *attention;
    const uint16_t *before, *behind; /* weights of the norms before attention and behind it */
    float before_epsilon, behind_epsilon;
    linear qkv, out;
} layer;

AVX2 static int apply(pool *p, const linear *l, const uint16_t *x, uint16_t *y) {
    if (edgemoe_dense_product(p, l->weight, l->row_scale, l->rows, l->cols, x, 1, y)) return -1;
    if (l->bias)
        for (int64_t i = 0; i < l->rows; i++) y[i] = to_bf16(from_bf16(y[i]) + from_bf16(l->bias[i]));
    return 0;
}

/* A new token's way up to a layer's experts, rounded where transformers rounds.
 *
 * hidden [H] becomes hidden + attention, and normed [H] its norm. scratch has room for qkv's numbers and those that the
 * heads give, in bf16; cosine and sine are as edgemoe_attention's. Returns 0, or -1 where there is no memory.
 */
AVX2 int edgemoe_up_to_experts(pool *p, const layer *l, const attention_kv *kv, uint16_t *hidden, const uint16_t *cosine,
                               const uint16_t *sine, uint16_t *scratch, uint16_t *normed) {
    const int64_t size = l->out.rows;
    uint16_t *qkv = scratch, *attended = qkv + l->qkv.rows;
    edgemoe_rms_norm(hidden, l->before, l->before_epsilon, 1, size, normed);
    if (apply(p, &l->qkv, normed, qkv)) return -1;
    if (edgemoe_attention(p, l->attention, kv, qkv, cosine, sine, attended)) return -1;
    if (apply(p, &l->out, attended, normed)) return -1;
    for (int64_t i = 0; i < size; i++) hidden[i] = to_bf16(from_bf16(hidden[i]) + from_bf16(normed[i]));
    edgemoe_rms_norm(hidden, l->behind, l->behind_epsilon, 1, size, normed);
    return 0;
}
#endif
