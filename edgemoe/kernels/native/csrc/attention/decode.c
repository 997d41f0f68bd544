/* Attention of one token of each of some sequences: head norms, rotation, the write to the KV cache, softmax, and the sum over values.
 *
 * Results are rounded to bf16 where transformers' modules round them; scores, softmax and the sum over values are
 * float32.
 */
#include <stdatomic.h>

#include "attention.h"
#include "../dense/dense.h"

#if COMPILED
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

AVX2 void attention_prepare(const attention_shape *shape, const attention_kv *kv, uint16_t *qkv, const uint16_t *cosine,
                            const uint16_t *sine) {
    const int64_t dim = shape->dim, queries = shape->heads * dim, keys = shape->kv_heads * dim;
    uint16_t *key = qkv + queries, *value = key + keys;
    norm(qkv, queries, shape->q_norm, shape->q_norm_size, shape->q_epsilon);
    norm(key, keys, shape->k_norm, shape->k_norm_size, shape->k_epsilon);
    rotate(qkv, shape->heads, dim, cosine, sine);
    rotate(key, shape->kv_heads, dim, cosine, sine);
    for (int64_t head = 0; head < shape->kv_heads; head++) {
        const int64_t to = head * kv->context + kv->past;
        kv_store(kv->key_format, key + head * dim, dim, kv->rotation, kv->keys + to * kv_row_bytes(kv->key_format, dim));
        kv_store(kv->value_format, value + head * dim, dim, 0, kv->values + to * kv_row_bytes(kv->value_format, dim));
    }
}

enum {
    MOST_HEADS = 8, /* of a task, which read each key and value once */
    SUMS = 8,       /* accumulators that fit into registers */
    BLOCK = 64,     /* tokens whose keys or values stay in a first-level cache for all heads; SUMS divides it */
};

/* Query heads that share keys and values. A head's result does not depend on the other heads. */
typedef struct {
    int64_t dim, tokens, stride, count; /* dim % 16 == 0; stride: scores per head, % 8 == 0, >= tokens; heads */
    float scaling;
    const float *queries; /* [heads, dim], rotated as keys are */
    float *scores;        /* scratch [heads, stride] */
    float *sums;          /* scratch [heads, dim], of values */
    const uint8_t *keys, *values; /* [tokens] rows of their formats */
    uint16_t *out;        /* [heads, dim] */
} heads;

/* horizontal_sum of each, with the same bits. */
INLINE __m128 four_horizontal_sums(const __m256 v[4]) {
    __m128 s[4];
    for (int i = 0; i < 4; i++) s[i] = _mm_add_ps(_mm256_castps256_ps128(v[i]), _mm256_extractf128_ps(v[i], 1));
    _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
    return _mm_add_ps(_mm_add_ps(s[0], s[2]), _mm_add_ps(s[1], s[3]));
}

/* Scores of n heads from `head` and `many` tokens from t; n * many == SUMS, or many == 1. */
INLINE void compute_scores(const int format, const heads *h, int64_t head, int n, int64_t t, int many) {
    const int64_t row = kv_row_bytes(format, h->dim);
    __m256 sum[SUMS];
    for (int i = 0; i < n * many; i++) sum[i] = _mm256_setzero_ps();
    for (int64_t i = 0; i < h->dim; i += 16) {
        const float *query = h->queries + head * h->dim + i;
        for (int j = 0; j < many; j++) {
            __m256 key[2];
            kv_sixteen(format, h->keys + (t + j) * row, h->dim, i, key);
            for (int half = 0; half < 2; half++)
                for (int k = 0; k < n; k++)
                    sum[k * many + j] = _mm256_fmadd_ps(_mm256_loadu_ps(query + k * h->dim + 8 * half), key[half], sum[k * many + j]);
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
    float largest = -INFINITY, lanes[8];
    __m256 of_lanes = _mm256_set1_ps(largest);
    int64_t from = 0;
    for (; from + 8 <= tokens; from += 8) of_lanes = _mm256_max_ps(_mm256_loadu_ps(scores + from), of_lanes); /* not of NaN */
    _mm256_storeu_ps(lanes, of_lanes);
    for (int i = 0; i < 8; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    for (; from < tokens; from++) largest = scores[from] > largest ? scores[from] : largest;
    for (int64_t t = tokens; t % 8; t++) scores[t] = largest;
    const __m256 most = _mm256_set1_ps(largest);
    for (int64_t t = 0; t < tokens; t += 8)
        _mm256_storeu_ps(scores + t, exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + t), most)));
    for (int64_t t = tokens; t % 8; t++) scores[t] = 0;
    __m256 sum = _mm256_setzero_ps();
    for (int64_t t = 0; t < tokens; t += 8) sum = _mm256_add_ps(sum, _mm256_loadu_ps(scores + t));
    return horizontal_sum(sum);
}

/* Adds values of `tokens` tokens from t, columns [from, from + 8 vectors), weighted, to n heads' sums; n * vectors <= SUMS. */
INLINE void add_values(const int format, const heads *h, int64_t head, int n, int64_t from, int vectors, int64_t t, int64_t tokens) {
    __m256 sum[SUMS];
    float *sums = h->sums + head * h->dim + from;
    for (int k = 0; k < n; k++)
        for (int j = 0; j < vectors; j++) sum[k * vectors + j] = _mm256_loadu_ps(sums + k * h->dim + 8 * j);
    const int64_t row = kv_row_bytes(format, h->dim);
    const uint8_t *value = h->values + t * row;
    const float *scores = h->scores + head * h->stride + t;
    for (int64_t i = 0; i < tokens; i++, value += row) {
        __m256 wide[SUMS];
        for (int j = 0; j < vectors; j += 2) kv_sixteen(format, value, h->dim, from + 8 * j, wide + j);
        for (int k = 0; k < n; k++) {
            const __m256 score = _mm256_set1_ps(scores[k * h->stride + i]);
            for (int j = 0; j < vectors; j++) sum[k * vectors + j] = _mm256_fmadd_ps(score, wide[j], sum[k * vectors + j]);
        }
    }
    for (int k = 0; k < n; k++)
        for (int j = 0; j < vectors; j++) _mm256_storeu_ps(sums + k * h->dim + 8 * j, sum[k * vectors + j]);
}

/* Scores of n heads from `head`, 8, 4, 2 or 1, and `tokens` tokens from t. */
INLINE void scores_of(const int format, const heads *h, int64_t head, int n, int64_t t, int64_t tokens) {
    const int64_t end = t + tokens;
    for (; t + SUMS / n <= end; t += SUMS / n) compute_scores(format, h, head, n, t, SUMS / n);
    for (; t < end; t++) compute_scores(format, h, head, n, t, 1);
}

/* Adds these tokens' values to the heads' weighted sums. */
INLINE void sums_of(const int format, const heads *h, int64_t head, int n, int64_t t, int64_t tokens) {
    int64_t from = 0;
    for (; from + 8 * (SUMS / n) <= h->dim; from += 8 * (SUMS / n)) add_values(format, h, head, n, from, SUMS / n, t, tokens);
    for (; from < h->dim; from += 16) add_values(format, h, head, n, from, 2, t, tokens);
}

/* Calls f(format, h, head, n, t, tokens) for the heads, `most` or fewer at a time, and for the blocks of their tokens. */
#define ALL_BLOCKS(f, format, most) \
    for (int64_t t = 0; t < h->tokens; t += BLOCK) { \
        const int64_t tokens = min_of(h->tokens - t, BLOCK); \
        int64_t head = 0; \
        for (; most == 8 && head + 8 <= h->count; head += 8) f(format, h, head, 8, t, tokens); \
        for (; head + 4 <= h->count; head += 4) f(format, h, head, 4, t, tokens); \
        for (; head + 2 <= h->count; head += 2) f(format, h, head, 2, t, tokens); \
        for (; head < h->count; head++) f(format, h, head, 1, t, tokens); \
    }

#define BY_FORMAT(f, format, most) \
    do { \
        if (format == KV_BF16) ALL_BLOCKS(f, KV_BF16, most) \
        else if (format == KV_Q8_0) ALL_BLOCKS(f, KV_Q8_0, most) \
        else ALL_BLOCKS(f, KV_Q4_0, most) \
    } while (0)

/* Attention of all heads. */
AVX2 static void attend(const attention_kv *kv, const heads *h) {
    BY_FORMAT(scores_of, kv->key_format, 8);
    float total[MOST_HEADS];
    for (int64_t k = 0; k < h->count; k++) total[k] = exponentials(h->scores + k * h->stride, h->tokens);
    memset(h->sums, 0, (size_t)(h->count * h->dim) * sizeof(float));
    BY_FORMAT(sums_of, kv->value_format, 4);
    for (int64_t k = 0; k < h->count; k++) {
        const float by = 1 / total[k];
        for (int64_t i = k * h->dim; i < (k + 1) * h->dim; i++) h->out[i] = to_bf16(h->sums[i] * by);
    }
}

/* One token of each of `count` sequences. A thread takes tasks, each some heads of one token that share a key head. */
typedef struct {
    const attention_shape *shape;
    const attention_kv *kv; /* [count] */
    int64_t count, task_heads, stride;
    uint16_t *qkv;
    const uint16_t *cosine, *sine;
    float *queries, *scratch; /* [count, heads, dim]; [threads, thread_numbers] */
    int64_t thread_numbers;
    uint16_t *out;
    _Atomic int64_t next; /* task */
} attention_job;

/* Tasks per key head. */
INLINE int64_t tasks_of(const attention_job *job) {
    return ceil_div(job->shape->heads / job->shape->kv_heads, job->task_heads);
}

AVX2 static void prepare_task(void *argument, int64_t token) {
    const attention_job *job = argument;
    const int64_t dim = job->shape->dim, queries = job->shape->heads * dim;
    uint16_t *qkv = job->qkv + token * (queries + 2 * job->shape->kv_heads * dim);
    attention_prepare(job->shape, job->kv + token, qkv, job->cosine + token * dim, job->sine + token * dim);
    for (int64_t i = 0; i < queries; i++) job->queries[token * queries + i] = from_bf16(qkv[i]);
    kv_rotate(job->queries + token * queries, queries, job->kv[token].rotation);
}

AVX2 static void heads_task(const attention_job *job, int64_t task, float *scratch) {
    const attention_shape *shape = job->shape;
    const int64_t per_token = shape->kv_heads * tasks_of(job), token = task / per_token, sharing = shape->heads / shape->kv_heads;
    const int64_t kv_head = task % per_token / tasks_of(job), from = task % tasks_of(job) * job->task_heads;
    const int64_t row = token * shape->heads + kv_head * sharing + from, count = min_of(sharing - from, job->task_heads);
    const attention_kv *kv = job->kv + token;
    const int64_t at = kv_head * kv->context + kv->first;
    const uint8_t *keys = kv->keys + at * kv_row_bytes(kv->key_format, shape->dim);
    const uint8_t *values = kv->values + at * kv_row_bytes(kv->value_format, shape->dim);
    float *sums = scratch + job->task_heads * job->stride;
    const heads h = {shape->dim, kv->past + 1 - kv->first, job->stride, count, shape->scaling, job->queries + row * shape->dim,
                     scratch, sums, keys, values, job->out + row * shape->dim};
    attend(kv, &h);
}

AVX2 static void thread_task(void *argument, int64_t thread) {
    attention_job *job = argument;
    float *scratch = job->scratch + thread * job->thread_numbers;
    const int64_t tasks = job->count * job->shape->kv_heads * tasks_of(job);
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < tasks;) heads_task(job, task, scratch);
}

AVX2 int edgemoe_attention(pool *p, const attention_shape *shape, const attention_kv *kv, int64_t count, uint16_t *qkv,
                           const uint16_t *cosine, const uint16_t *sine, uint16_t *out) {
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!attention_fits(shape, kv + i, 1)) return WRONG_SHAPE;
        if (kv[i].past + 1 - kv[i].first > longest) longest = kv[i].past + 1 - kv[i].first;
    }
    if (count < 1) return WRONG_SHAPE;
    attention_job job = {.shape = shape, .kv = kv, .count = count, .stride = (longest + 7) / 8 * 8, .qkv = qkv,
                         .cosine = cosine, .sine = sine, .out = out};
    job.task_heads = min_of(shape->heads / shape->kv_heads, MOST_HEADS);
    const int64_t threads = pool_threads(p), queries = count * shape->heads * shape->dim;
    while (job.task_heads > 1 && count * shape->heads / job.task_heads < threads) job.task_heads /= 2;
    job.thread_numbers = job.task_heads * (job.stride + shape->dim);
    job.queries = pool_acquire(p, (size_t)(queries + threads * job.thread_numbers) * sizeof(float));
    if (!job.queries) return OUT_OF_MEMORY;
    job.scratch = job.queries + queries;
    pool_run(p, prepare_task, &job, count);
    pool_run(p, thread_task, &job, threads);
    pool_release(p);
    return 0;
}
#endif
