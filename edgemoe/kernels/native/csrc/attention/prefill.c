/* Attention of several consecutive tokens; the results are rounded as in decode.c.
 *
 * A task is some consecutive tokens of the queries that share one key head. 32 queries lie side by side in vector lanes,
 * so that scores, softmax and the sum over values need no sum across lanes. Keys come in blocks of 64 that start at
 * multiples of 64, with a running largest score and sum (FlashAttention, Dao et al. 2022), so that no result depends on
 * the other tokens of a call. Where the attention that keys receive is counted (DyMoE eq. 1), a task computes its scores
 * again once its softmaxes are known, while its queries are in the cache.
 */
#include <math.h>
#include <stdatomic.h>

#include "attention.h"
#include "../experts/vnni.h"

#if COMPILED
enum {
    KEYS = 64,         /* per block */
    PANELS = 4,        /* of LANES queries each, per task */
    PREPARE_ROWS = 16, /* tokens of a task of prepare_task */
};

static const float MASKED = -1e30f; /* score of a key that a query does not attend to */
static const float RECEIVED_UNIT = 0x1p-32f; /* of the attention that a key receives: integers add up to the same in any order */

typedef struct {
    const attention_shape *shape;
    const attention_kv *kv;
    int64_t rows, window, task_rows; /* task_rows: tokens of a task */
    uint16_t *qkv;
    const uint16_t *cosine, *sine;
    uint16_t *out;
    float *scratch;
    int64_t counted;   /* first row whose attention is added to `received` */
    int64_t *received; /* [threads, past + rows], in units of RECEIVED_UNIT; NULL: not counted */
    _Atomic int64_t next; /* task */
} rows_job;

/* A thread's scratch, and the running state of each lane's softmax. */
typedef struct {
    float *queries, *sums;         /* [PANELS, dim, LANES] */
    float *keys, *values, *panel;  /* [KEYS, dim] twice, [LANES, dim] */
    float largest[PANELS * LANES], total[PANELS * LANES];
    int32_t position[PANELS * LANES];
    int64_t *received; /* of the job, this thread's */
} workspace;

static int64_t workspace_floats(int64_t dim) { return dim * (2 * PANELS * LANES + 2 * KEYS + LANES); }

/* Numbers of a token's row of qkv. */
static int64_t row_size(const attention_shape *shape) { return (shape->heads + 2 * shape->kv_heads) * shape->dim; }

AVX2 static void prepare_task(void *argument, int64_t task) {
    const rows_job *job = argument;
    const int64_t dim = job->shape->dim, end = min_of((task + 1) * PREPARE_ROWS, job->rows);
    for (int64_t row = task * PREPARE_ROWS; row < end; row++) {
        attention_kv kv = *job->kv;
        kv.past += row;
        attention_prepare(job->shape, &kv, job->qkv + row * row_size(job->shape), job->cosine + row * dim, job->sine + row * dim);
    }
}

/* to [cols, rows] = from [rows, cols], both multiples of 8. */
AVX2 static void transpose(const float *from, int64_t rows, int64_t cols, float *to) {
    for (int64_t r = 0; r < rows; r += 8)
        for (int64_t c = 0; c < cols; c += 8) {
            __m256 a[8], b[8];
            for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(from + (r + i) * cols + c);
            for (int i = 0; i < 8; i += 2) {
                b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
                b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
            }
            for (int i = 0; i < 8; i += 4)
                for (int j = 0; j < 2; j++) {
                    a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
                    a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xEE);
                }
            for (int i = 0; i < 4; i++) {
                _mm256_storeu_ps(to + (c + i) * rows + r, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
                _mm256_storeu_ps(to + (c + i + 4) * rows + r, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
            }
        }
}

/* float_tile_avx512 in AVX2, with the same bits. */
AVX2 static void float_tile_avx2(const float *a, int64_t a_row, int64_t a_depth, const float *b, int64_t depth,
                                 const float *factor, float *c) {
    for (int r = 0; r < OUTER; r += 4)
        for (int l = 0; l < LANES; l += 16) {
            const float *from = a + r * a_row, *with = b + l;
            float *to = c + r * LANES + l;
            __m256 sum[4][2];
            for (int i = 0; i < 4; i++)
                for (int h = 0; h < 2; h++)
                    sum[i][h] = factor ? _mm256_mul_ps(_mm256_loadu_ps(to + i * LANES + 8 * h), _mm256_loadu_ps(factor + l + 8 * h))
                                       : _mm256_setzero_ps();
            for (int64_t k = 0; k < depth; k++, from += a_depth, with += LANES) {
                const __m256 low = _mm256_loadu_ps(with), high = _mm256_loadu_ps(with + 8);
                for (int i = 0; i < 4; i++) {
                    const __m256 x = _mm256_set1_ps(from[i * a_row]);
                    sum[i][0] = _mm256_fmadd_ps(x, low, sum[i][0]);
                    sum[i][1] = _mm256_fmadd_ps(x, high, sum[i][1]);
                }
            }
            for (int i = 0; i < 4; i++)
                for (int h = 0; h < 2; h++) _mm256_storeu_ps(to + i * LANES + 8 * h, sum[i][h]);
        }
}

static void float_tile(const float *a, int64_t a_row, int64_t a_depth, const float *b, int64_t depth, const float *factor,
                       float *c) {
    if (IS_AVX512(path_of(WORK_ATTENTION, SEVERAL_UP_TO + 1))) float_tile_avx512(a, a_row, a_depth, b, depth, factor, c);
    else float_tile_avx2(a, a_row, a_depth, b, depth, factor, c);
}

/* Which of 8 queries at positions `at` do not see the key at `position`; they see none before `first`. */
INLINE __m256i hidden_key(__m256i at, __m256i first, int64_t position) {
    const __m256i key = _mm256_set1_epi32((int32_t)position);
    return _mm256_or_si256(_mm256_cmpgt_epi32(key, at), _mm256_cmpgt_epi32(first, key));
}

/* The first key that each of 8 queries at positions `at` sees. */
INLINE __m256i first_key(__m256i at, int64_t window) {
    return window ? _mm256_sub_epi32(at, _mm256_set1_epi32((int32_t)window - 1)) : _mm256_setzero_si256();
}

/* A step of the online softmax: replaces the scores of `keys` keys from t by e^(score - largest), and updates `largest`
 * and `total`; earlier sums are to be multiplied by `factor`. */
AVX2 static void softmax_block(float *scores, int64_t t, int64_t keys, int64_t window, const int32_t *position,
                               float *largest, float *total, float *factor) {
    for (int l = 0; l < LANES; l += 8) {
        const __m256i at = _mm256_loadu_si256((const __m256i *)(position + l));
        const __m256i first = first_key(at, window);
        const __m256 before = _mm256_loadu_ps(largest + l);
        __m256 most = before, sum = _mm256_setzero_ps();
        for (int64_t k = 0; k < keys; k++) {
            const __m256 hidden = _mm256_castsi256_ps(hidden_key(at, first, t + k));
            const __m256 score = _mm256_blendv_ps(_mm256_loadu_ps(scores + k * LANES + l), _mm256_set1_ps(MASKED), hidden);
            _mm256_storeu_ps(scores + k * LANES + l, score);
            most = _mm256_max_ps(most, score);
        }
        for (int64_t k = 0; k < keys; k++) {
            const __m256 score = _mm256_loadu_ps(scores + k * LANES + l);
            const __m256 hidden = _mm256_cmp_ps(score, _mm256_set1_ps(MASKED), _CMP_EQ_OQ);
            const __m256 weight = _mm256_andnot_ps(hidden, exponential(_mm256_sub_ps(score, most)));
            _mm256_storeu_ps(scores + k * LANES + l, weight);
            sum = _mm256_add_ps(sum, weight);
        }
        const __m256 rescale = exponential(_mm256_sub_ps(before, most));
        _mm256_storeu_ps(factor + l, rescale);
        _mm256_storeu_ps(largest + l, most);
        _mm256_storeu_ps(total + l, _mm256_fmadd_ps(_mm256_loadu_ps(total + l), rescale, sum));
    }
}

/* to = from by, as float32; count % 8 == 0. */
AVX2 static void widen(const uint16_t *from, int64_t count, float by, float *to) {
    for (int64_t i = 0; i < count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_mul_ps(eight_from_bf16(from + i), _mm256_set1_ps(by)));
}

/* Scores of a panel's LANES queries and the keys [keys, dim]; scores [keys rounded up to OUTER, LANES]. */
static void score_keys(const float *queries, const float *keys, int64_t count, int64_t dim, float *scores) {
    for (int64_t k = 0; k < count; k += OUTER) float_tile(keys + k * dim, dim, 1, queries, dim, NULL, scores + k * LANES);
}

/* Adds to `received` [keys] the weights of `keys` keys from t for the queries of a panel, each times `share` [LANES]. */
AVX2 static void add_weights(const float *scores, int64_t t, int64_t keys, int64_t window, const int32_t *position,
                             const float *largest, const float *share, float *received) {
    for (int64_t k = 0; k < keys; k++) {
        __m256 sum = _mm256_setzero_ps();
        for (int l = 0; l < LANES; l += 8) {
            const __m256i at = _mm256_loadu_si256((const __m256i *)(position + l));
            const __m256 hidden = _mm256_castsi256_ps(hidden_key(at, first_key(at, window), t + k));
            const __m256 score = _mm256_sub_ps(_mm256_loadu_ps(scores + k * LANES + l), _mm256_loadu_ps(largest + l));
            sum = _mm256_fmadd_ps(_mm256_andnot_ps(hidden, exponential(score)), _mm256_loadu_ps(share + l), sum);
        }
        received[k] += horizontal_sum(sum);
    }
}

/* Adds the attention that the `count` queries of a task give to each key, from key `from` to `end`, to w->received. */
AVX2 static void count_received(const rows_job *job, int64_t kv_head, int64_t row, int64_t count, int64_t from, int64_t end,
                                workspace *w) {
    const attention_kv *kv = job->kv;
    const int64_t dim = job->shape->dim, sharing = job->shape->heads / job->shape->kv_heads, panels = ceil_div(count, LANES);
    float share[PANELS * LANES];
    for (int64_t i = 0; i < panels * LANES; i++) {
        const int counts = i < count && row + i / sharing >= job->counted; /* surplus lanes repeat a query */
        share[i] = counts ? 1 / w->total[i] : 0;
    }
    for (int64_t t = from; t < end; t += KEYS) {
        const int64_t block = min_of(end - t, KEYS), at = kv_head * kv->context + t;
        float received[KEYS] = {0};
        kv_widen(kv->key_format, kv->keys + at * kv_row_bytes(kv->key_format, dim), block, dim, w->keys);
        for (int64_t p = 0; p < panels; p++) {
            const int64_t last = w->position[(p + 1) * LANES - 1] + 1 - t, keys = min_of(last, block);
            if (keys <= 0) continue;
            float scores[KEYS * LANES];
            score_keys(w->queries + p * LANES * dim, w->keys, keys, dim, scores);
            add_weights(scores, t, keys, job->window, w->position + p * LANES, w->largest + p * LANES, share + p * LANES, received);
        }
        for (int64_t k = 0; k < block; k++) w->received[t + k] += llrintf(received[k] / RECEIVED_UNIT);
    }
}

/* Attention of the `count` queries of one key head from token `row` on, `sharing` per token. */
AVX2 static void attend_rows(const rows_job *job, int64_t kv_head, int64_t row, int64_t count, workspace *w) {
    const attention_shape *shape = job->shape;
    const attention_kv *kv = job->kv;
    const int64_t dim = shape->dim, sharing = shape->heads / shape->kv_heads, panels = ceil_div(count, LANES);
    const int64_t end = kv->past + row + ceil_div(count, sharing), window_start = kv->past + row + 1 - job->window;
    for (int64_t i = 0; i < panels * LANES; i++) {
        const int64_t query = min_of(i, count - 1), token = row + query / sharing; /* surplus lanes repeat the last query */
        w->position[i] = (int32_t)(kv->past + token);
        w->largest[i] = MASKED;
        w->total[i] = 0;
        widen(job->qkv + token * row_size(shape) + (kv_head * sharing + query % sharing) * dim, dim, shape->scaling,
              w->panel + i % LANES * dim);
        kv_rotate(w->panel + i % LANES * dim, dim, kv->rotation);
        if (i % LANES == LANES - 1) transpose(w->panel, LANES, dim, w->queries + i / LANES * LANES * dim);
    }
    memset(w->sums, 0, sizeof(float) * (size_t)(panels * LANES * dim));
    const int64_t from = job->window && window_start > 0 ? window_start / KEYS * KEYS : 0;
    for (int64_t t = from; t < end; t += KEYS) {
        const int64_t block = min_of(end - t, KEYS), at = kv_head * kv->context + t;
        kv_widen(kv->key_format, kv->keys + at * kv_row_bytes(kv->key_format, dim), block, dim, w->keys);
        kv_widen(kv->value_format, kv->values + at * kv_row_bytes(kv->value_format, dim), block, dim, w->values);
        for (int64_t p = 0; p < panels; p++) {
            const int64_t last = w->position[(p + 1) * LANES - 1] + 1 - t, keys = min_of(last, block);
            if (keys <= 0) continue;
            float scores[KEYS * LANES], factor[LANES];
            score_keys(w->queries + p * LANES * dim, w->keys, keys, dim, scores);
            softmax_block(scores, t, keys, job->window, w->position + p * LANES, w->largest + p * LANES, w->total + p * LANES, factor);
            for (int64_t d = 0; d < dim; d += OUTER)
                float_tile(w->values + d, 1, dim, scores, keys, factor, w->sums + (p * dim + d) * LANES);
        }
    }
    if (w->received && row + ceil_div(count, sharing) > job->counted) count_received(job, kv_head, row, count, from, end, w);
    for (int64_t i = 0; i < count; i++) {
        if (i % LANES == 0) transpose(w->sums + i * dim, dim, LANES, w->panel);
        const float by = 1 / w->total[i], *sum = w->panel + i % LANES * dim;
        uint16_t *to = job->out + ((row + i / sharing) * shape->heads + kv_head * sharing + i % sharing) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = to_bf16(sum[d] * by);
    }
}

/* A thread's work: takes tasks, the longest first, until none is left. */
AVX2 static void thread_task(void *argument, int64_t thread) {
    rows_job *job = argument;
    const attention_shape *shape = job->shape;
    const int64_t dim = shape->dim, sharing = shape->heads / shape->kv_heads;
    const int64_t blocks = ceil_div(job->rows, job->task_rows);
    float *scratch = job->scratch + thread * workspace_floats(dim);
    workspace w = {.queries = scratch, .sums = scratch + PANELS * LANES * dim, .keys = scratch + 2 * PANELS * LANES * dim};
    w.values = w.keys + KEYS * dim;
    w.panel = w.values + KEYS * dim;
    if (job->received) w.received = job->received + thread * (job->kv->past + job->rows);
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < blocks * shape->kv_heads;) {
        const int64_t row = (blocks - 1 - task / shape->kv_heads) * job->task_rows;
        attend_rows(job, task % shape->kv_heads, row, sharing * min_of(job->rows - row, job->task_rows), &w);
    }
}

AVX2 int edgemoe_attention_rows(pool *p, const attention_shape *shape, const attention_kv *kv, int64_t rows, int64_t window,
                                uint16_t *qkv, const uint16_t *cosine, const uint16_t *sine, uint16_t *out, int64_t counted,
                                float *received) {
    if (!attention_fits(shape, kv, rows) || shape->heads > PANELS * LANES * shape->kv_heads || window < 0) return WRONG_SHAPE;
    const int64_t sharing = shape->heads / shape->kv_heads, threads = pool_threads(p), tokens = kv->past + rows;
    const size_t floats = (size_t)(threads * workspace_floats(shape->dim)) * sizeof(float); /* a multiple of 64 bytes */
    const size_t counts = received ? (size_t)(threads * tokens) * sizeof(int64_t) : 0;
    float *scratch = pool_acquire(p, floats + counts);
    if (!scratch) return OUT_OF_MEMORY;
    int64_t *sums = received ? (int64_t *)((char *)scratch + floats) : NULL;
    if (sums) memset(sums, 0, counts);
    rows_job job = {.shape = shape, .kv = kv, .rows = rows, .window = window, .task_rows = PANELS * LANES / sharing, .qkv = qkv,
                    .cosine = cosine, .sine = sine, .out = out, .scratch = scratch, .counted = counted, .received = sums};
    pool_run(p, prepare_task, &job, ceil_div(rows, PREPARE_ROWS));
    pool_run(p, thread_task, &job, threads);
    for (int64_t t = 0; sums && t < tokens; t++) {
        int64_t all = 0;
        for (int64_t thread = 0; thread < threads; thread++) all += sums[thread * tokens + t];
        received[t] = (float)((double)all * RECEIVED_UNIT / (double)shape->heads);
    }
    pool_release(p);
    return 0;
}
#endif
