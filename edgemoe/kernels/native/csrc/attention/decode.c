/* Attention of one token of each of some sequences: head norms, rotation, the write to the KV cache, softmax, and the sum
 * over values.
 *
 * Results are rounded to bf16 where transformers' modules round them. A token has the bits that prefill.c gives it: the same
 * blocks of keys, sums in the same order. Keys lie in lanes here, and some heads that share them are the rows of A.
 */
#include <stdatomic.h>

#include "decode.h"

#include "../dense/dense.h"
#include "block_paths.h"
#include "transpose.h"

#if COMPILED
#include <math.h>

static void norm(uint16_t *x, int64_t size, const void *weight, int64_t wide, int64_t cols, float epsilon) {
    if (weight) edgemoe_rms_norm(x, weight, (int)wide, epsilon, size / cols, cols, x);
}

/* x = x cos + rotate_half(x) sin for the leading numbers of each head, in float32; the sum alone is rounded. */
AVX2 static void rotate_wide(uint16_t *x, int64_t heads, const attention_shape *shape, const float *cosine, const float *sine) {
    const int64_t half = shape->rotated / 2, dim = shape->dim, pairs = shape->pairing == ROTATE_WIDE_PAIRS;
    for (; heads-- > 0; x += dim)
        for (int64_t i = 0; i < half; i++) {
            uint16_t *low = x + (pairs ? 2 * i : i), *high = pairs ? low + 1 : low + half;
            const float a = from_bf16(*low), b = from_bf16(*high);
            *low = to_bf16(a * cosine[i] - b * sine[i]);
            *high = to_bf16(b * cosine[i] + a * sine[i]);
        }
}

/* The same by bf16 tables; both products and the sum are rounded. */
AVX2 static void rotate_halves(uint16_t *x, int64_t heads, const attention_shape *shape, const uint16_t *cosine, const uint16_t *sine) {
    const int64_t half = shape->rotated / 2, dim = shape->dim;
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

static void rotate(uint16_t *x, int64_t heads, const attention_shape *shape, const void *cosine, const void *sine) {
    if (shape->pairing == ROTATE_HALVES) rotate_halves(x, heads, shape, cosine, sine);
    else rotate_wide(x, heads, shape, cosine, sine);
}

/* Limits the magnitude of bf16 numbers; NaN stays. */
AVX2 static void clip(uint16_t *x, int64_t count, float most) {
    for (int64_t i = 0; i < count; i++) {
        const float value = from_bf16(x[i]);
        x[i] = to_bf16(value > most ? most : value < -most ? -most : value);
    }
}

/* Norms, clips and multiplies a token's projected values, and writes them to the KV cache. */
AVX2 static void store_values(const attention_shape *shape, const attention_kv *kv, const uint16_t *value) {
    const int64_t dim = shape->dim, own = shape->value_dim;
    uint16_t to[KV_MOST_DIM] = {0};
    for (int64_t head = 0; head < shape->kv_heads; head++, value += own) {
        memcpy(to, value, (size_t)own * sizeof *to);
        norm(to, own, shape->v_norm, shape->wide_norms, own, shape->v_epsilon);
        if (shape->clip > 0) clip(to, own, shape->clip);
        for (int64_t i = 0; i < own && shape->v_scale != 0; i++) to[i] = to_bf16(from_bf16(to[i]) * shape->v_scale);
        kv_store(kv->value_format, to, dim, 0, kv->values + (head * kv->context + kv->past) * kv_row_bytes(kv->value_format, dim));
    }
}

/* Norms a token's queries and keys. */
static void norm_heads(const attention_shape *shape, uint16_t *queries, uint16_t *keys) {
    norm(queries, shape->heads * shape->dim, shape->q_norm, shape->wide_norms, shape->q_norm_size, shape->q_epsilon);
    norm(keys, shape->kv_heads * shape->dim, shape->k_norm, shape->wide_norms, shape->k_norm_size, shape->k_epsilon);
}

AVX2 void attention_prepare(const attention_shape *shape, const attention_kv *kv, uint16_t *qkv, const void *cosine,
                            const void *sine) {
    const int64_t dim = shape->dim, queries = shape->heads * dim, keys = shape->kv_heads * dim;
    uint16_t *key = qkv + queries;
    store_values(shape, kv, shape->values_are_keys ? key : key + keys);
    if (!shape->norms_last) norm_heads(shape, qkv, key);
    if (shape->clip > 0) clip(qkv, queries + keys, shape->clip);
    rotate(qkv, shape->heads, shape, cosine, sine);
    if (!shape->queries_alone) rotate(key, shape->kv_heads, shape, cosine, sine);
    if (shape->norms_last) norm_heads(shape, qkv, key);
    for (int64_t head = 0; head < shape->kv_heads; head++) {
        const int64_t to = head * kv->context + kv->past;
        kv_store(kv->key_format, key + head * dim, dim, kv->rotation, kv->keys + to * kv_row_bytes(kv->key_format, dim));
    }
}

enum {
    MOST_HEADS = 8, /* of a task, which reads each key and value once */
    ROWS = 4,       /* of A, at a time; two or three take as long */
};

/* A thread's scratch: a block of keys and of values, and the running softmax and sums of a task's heads. */
typedef struct {
    uint32_t *queries, *rows, *values; /* A of the queries; the keys' rows; values as B. [MOST_HEADS or KEYS, padded(dim)] */
    float *lanes;                      /* keys as B: [padded(dim), LANES] */
    float *sums;                       /* [padded(dim) / LANES, MOST_HEADS, LANES] */
    uint16_t *rounded;                 /* [KEYS, dim] */
    float scores[KEYS / LANES][MOST_HEADS][LANES];
    uint16_t weights[MOST_HEADS * KEYS];
    uint32_t weight_rows[MOST_HEADS * KEYS]; /* A of the weights */
    float largest[MOST_HEADS], total[MOST_HEADS];
} workspace;

static int64_t workspace_floats(int64_t dim) { return padded(dim) * (2 * MOST_HEADS + 2 * KEYS + LANES + KEYS / 2); }

static workspace workspace_at(float *scratch, int64_t dim) {
    const int64_t width = padded(dim);
    workspace w = {.lanes = scratch, .sums = scratch + LANES * width};
    w.queries = (uint32_t *)(w.sums + MOST_HEADS * width);
    w.rows = w.queries + MOST_HEADS * width;
    w.values = w.rows + KEYS * width;
    w.rounded = (uint16_t *)(w.values + KEYS * width);
    return w;
}

/* Query heads of one token that share keys and values. A head's result does not depend on the other heads. */
typedef struct {
    const attention_shape *shape;
    const attention_kv *kv;
    int64_t kv_head, first, count; /* first: of all heads of queries */
    const uint16_t *queries; /* [count, dim], as stored in qkv */
    uint16_t *out;           /* [count, value_dim] */
} heads;

static operand rows_from(operand a, int64_t row) { return (operand){a.at + row * a.row, a.row, a.step}; }

/* What is still to be prefetched of the next block's keys and values. A few lines at a time: more than a core has in flight
 * would stop it. */
typedef struct {
    const uint8_t *at[2], *end[2];
    int64_t lines; /* at a time */
} next_block;

INLINE void prefetch_some(next_block *next) {
    const int i = next->at[0] >= next->end[0];
    for (int64_t n = 0; n < next->lines && next->at[i] < next->end[i]; n++, next->at[i] += 64) prefetch(next->at[i]);
}

/* Adds the `count` keys and values from t, a multiple of KEYS, to the softmax and sums of the heads. */
AVX2 static void add_block(const block_path *path, const heads *h, operand queries, int64_t t, int64_t count, workspace *w) {
    static const float ONES[LANES] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const attention_kv *kv = h->kv;
    const int64_t dim = h->shape->dim, width = padded(dim), row = h->kv_head * kv->context + t;
    const int64_t some = h->count == 1 ? 1 : ceil_div(h->count, ROWS) * ROWS;
    const int64_t key_bytes = kv_row_bytes(kv->key_format, dim), value_bytes = kv_row_bytes(kv->value_format, dim);
    const uint8_t *stored_keys = kv->keys + row * key_bytes, *stored_values = kv->values + row * value_bytes;
    const uint8_t *next_keys = stored_keys + count * key_bytes, *next_values = stored_values + count * value_bytes;
    const int64_t left = min_of(kv->past + 1 - t - count, KEYS), calls = ceil_div(some, ROWS) * (KEYS + width) / LANES + h->count;
    next_block next = {{next_keys, next_values}, {next_keys + left * key_bytes, next_values + left * value_bytes},
                       ceil_div(KEYS * (key_bytes + value_bytes), 64 * calls) + 1};
    const operand of_keys = path->rows(kv->key_format, stored_keys, count, dim, w->rounded, w->rows);
    for (int64_t k = 0; k < count; k += LANES) {
        transpose((const float *)of_keys.at + k * of_keys.row, LANES, of_keys.row, w->lanes);
        for (int64_t r = 0; r < some; r += ROWS) {
            prefetch_some(&next);
            path->multiply(rows_from(queries, r), w->lanes, LANES, min_of(some, ROWS), width, NULL, w->scores[k / LANES][r]);
        }
    }
    const int64_t low = kv->first > t ? kv->first - t : 0;
    for (int64_t i = 0; i < h->count; i++) {
        prefetch_some(&next);
        const float *const scores[] = {w->scores[0][i], w->scores[1][i]};
        const float factor = path->softmax_head(scores, h->shape->scaling, low, count, w->largest + i, w->total + i, w->weights + i * KEYS);
        for (int64_t l = 0; factor != 1 && l < width * MOST_HEADS; l += MOST_HEADS * LANES)
            for (int64_t j = l + i * LANES; j < l + (i + 1) * LANES; j++) w->sums[j] *= factor;
    }
    const operand of_weights = path->rows(KV_BF16, (const uint8_t *)w->weights, some, KEYS, NULL, w->weight_rows);
    const operand of_values = path->columns(kv->value_format, stored_values, count, dim, w->rounded, w->values);
    for (int64_t l = 0; l < dim; l += LANES) {
        const float *b = (const float *)of_values.at + l;
        for (int64_t r = 0; r < some; r += ROWS) {
            prefetch_some(&next);
            path->multiply(rows_from(of_weights, r), b, of_values.step, min_of(some, ROWS), padded(count), ONES, w->sums + l * MOST_HEADS + r * LANES);
        }
    }
}

AVX2 static void attend(const block_path *path, const heads *h, workspace *w) {
    const attention_kv *kv = h->kv;
    const int64_t dim = h->shape->dim, own = h->shape->value_dim, end = kv->past + 1;
    uint16_t queries[MOST_HEADS * KV_MOST_DIM];
    memset(queries + h->count * dim, 0, sizeof *queries * (size_t)((MOST_HEADS - h->count) * dim));
    for (int64_t i = 0; i < h->count; i++) attention_query(h->queries + i * dim, dim, kv->rotation, queries + i * dim);
    const operand of_queries = path->rows(KV_BF16, (const uint8_t *)queries, MOST_HEADS, dim, NULL, w->queries);
    for (int64_t i = 0; i < MOST_HEADS; i++) w->largest[i] = MASKED, w->total[i] = 0;
    for (int64_t i = 0; i < h->count; i++) attention_start(h->shape, h->first + i, w->largest + i, w->total + i);
    memset(w->sums, 0, sizeof *w->sums * (size_t)(MOST_HEADS * padded(dim)));
    memset(w->weights, 0, sizeof w->weights); /* of heads that are not there */
    for (int64_t t = kv->first / KEYS * KEYS; t < end; t += KEYS) add_block(path, h, of_queries, t, min_of(end - t, KEYS), w);
    for (int64_t i = 0; i < h->count; i++) {
        const float by = 1 / w->total[i];
        for (int64_t d = 0; d < own; d++) h->out[i * own + d] = to_bf16(w->sums[(d / LANES * MOST_HEADS + i) * LANES + d % LANES] * by + 0.0f);
    }
}

/* One token of each of `count` sequences. A thread takes tasks, each some heads of one token that share a key head. */
typedef struct {
    const attention_shape *shape;
    const attention_kv *kv; /* [count] */
    const block_path *path;
    int64_t count, task_heads;
    uint16_t *qkv;
    const void *cosine, *sine;
    float *scratch; /* [threads, workspace_floats] */
    uint16_t *out;
    _Atomic int64_t next; /* task */
} attention_job;

/* Tasks per key head. */
INLINE int64_t tasks_of(const attention_job *job) { return ceil_div(job->shape->heads / job->shape->kv_heads, job->task_heads); }

AVX2 static void prepare_task(void *argument, int64_t token) {
    const attention_job *job = argument;
    const attention_shape *shape = job->shape;
    uint16_t *qkv = job->qkv + token * attention_row_size(shape);
    attention_prepare(shape, job->kv + token, qkv, attention_table(shape, job->cosine, token), attention_table(shape, job->sine, token));
}

AVX2 static void heads_task(const attention_job *job, int64_t task, workspace *w) {
    const attention_shape *shape = job->shape;
    const int64_t per_token = shape->kv_heads * tasks_of(job), token = task / per_token, sharing = shape->heads / shape->kv_heads;
    const int64_t kv_head = task % per_token / tasks_of(job), from = task % tasks_of(job) * job->task_heads;
    const int64_t head = kv_head * sharing + from, count = min_of(sharing - from, job->task_heads);
    const heads h = {shape, job->kv + token, kv_head, head, count, job->qkv + token * attention_row_size(shape) + head * shape->dim,
                     job->out + (token * shape->heads + head) * shape->value_dim};
    attend(job->path, &h, w);
}

AVX2 static void thread_task(void *argument, int64_t thread) {
    attention_job *job = argument;
    workspace w = workspace_at(job->scratch + thread * workspace_floats(job->shape->dim), job->shape->dim);
    const int64_t tasks = job->count * job->shape->kv_heads * tasks_of(job);
    const uint64_t before = flush_small();
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < tasks;) heads_task(job, task, &w);
    restore_small(before);
}

AVX2 int edgemoe_attention(pool *p, const attention_shape *shape, const attention_kv *kv, int64_t count, uint16_t *qkv,
                           const void *cosine, const void *sine, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        if (!attention_fits(shape, kv + i, 1)) return WRONG_SHAPE;
    if (count < 1) return WRONG_SHAPE;
    attention_job job = {.shape = shape, .kv = kv, .path = block_path_of(without_tiles(path_of(WORK_ATTENTION, 1))), .count = count,
                         .qkv = qkv, .cosine = cosine, .sine = sine, .out = out};
    job.task_heads = min_of(shape->heads / shape->kv_heads, MOST_HEADS);
    const int64_t threads = pool_threads(p);
    while (job.task_heads > ROWS && count * shape->heads / job.task_heads < threads) job.task_heads /= 2;
    job.scratch = pool_acquire(p, (size_t)(threads * workspace_floats(shape->dim)) * sizeof(float));
    if (!job.scratch) return OUT_OF_MEMORY;
    if (!shape->prepared) pool_run(p, prepare_task, &job, count);
    pool_run(p, thread_task, &job, threads);
    pool_release(p);
    return 0;
}
#endif
