/* Attention of one token: head norms, rotation, the write to the KV cache, softmax, and the sum over values.
 *
 * Results are rounded to bf16 where transformers' modules round them; scores, softmax and the sum over values are
 * float32.
 */
#include "attention.h"
#include "../dense.h"
#include "heads.h"

#if defined(__x86_64__)
#include <math.h>

static void norm(uint16_t *x, int64_t size, const uint16_t *weight, int64_t cols, float epsilon) {
    if (weight) edgemoe_rms_norm(x, weight, epsilon, size / cols, cols, x);
}

/* x = x cos + rotate_half(x) sin for each head; both products and the sum are rounded. */
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

typedef struct {
    const attention_shape *shape;
    const attention_kv *kv;
    const float *queries; /* [heads, dim] */
    float *scores;        /* [heads, stride] */
    int64_t stride, task_heads; /* task_heads: heads of a task, all of one key head */
    uint16_t *out;
} attention_job;

/* Tasks per key head. */
INLINE int64_t tasks_of(const attention_job *job) {
    return ceil_div(job->shape->heads / job->shape->kv_heads, job->task_heads);
}

AVX2 static void heads_task(void *argument, int64_t task) {
    const attention_job *job = argument;
    const int64_t dim = job->shape->dim, sharing = job->shape->heads / job->shape->kv_heads; /* heads per key head */
    const int64_t kv_head = task / tasks_of(job), from = task % tasks_of(job) * job->task_heads;
    const int64_t head = kv_head * sharing + from, at = (kv_head * job->kv->context + job->kv->first) * dim;
    const heads some = {
        .count = min_of(sharing - from, job->task_heads), .dim = dim, .tokens = job->kv->past + 1 - job->kv->first,
        .stride = job->stride, .scaling = job->shape->scaling, .keys = job->kv->keys + at, .values = job->kv->values + at,
        .queries = job->queries + head * dim, .scores = job->scores + head * job->stride, .out = job->out + head * dim,
    };
    attend(&some);
}

AVX2 void attention_prepare(const attention_shape *shape, const attention_kv *kv, uint16_t *qkv, const uint16_t *cosine,
                            const uint16_t *sine) {
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
}

AVX2 int edgemoe_attention(pool *p, const attention_shape *shape, const attention_kv *kv, uint16_t *qkv,
                           const uint16_t *cosine, const uint16_t *sine, uint16_t *out) {
    const int64_t dim = shape->dim, queries = shape->heads * dim;
    attention_prepare(shape, kv, qkv, cosine, sine);
    const int64_t stride = (kv->past + 1 - kv->first + 7) / 8 * 8;
    float *wide = pool_acquire(p, (size_t)(queries + shape->heads * stride) * sizeof(float));
    if (!wide) return -1;
    for (int64_t i = 0; i < queries; i++) wide[i] = from_bf16(qkv[i]);
    int64_t task_heads = HEADS;
    while (task_heads > 1 && shape->heads / task_heads < pool_threads(p)) task_heads /= 2;
    attention_job job = {shape, kv, wide, wide + queries, stride, task_heads, out};
    pool_run(p, heads_task, &job, shape->kv_heads * tasks_of(&job));
    pool_release(p);
    return 0;
}
#endif
