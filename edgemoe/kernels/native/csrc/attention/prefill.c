/* Attention of a sequence's latest tokens, a prompt's: as attention.c, many at once.
 *
 * A task is some consecutive tokens of the queries that share one head of keys and values; 32 queries lie side by side
 * in the lanes of vectors, so that scores, softmax and the sum over values need no sum across lanes. Keys come 64 at a
 * time, from a multiple of 64 on, and the largest score so far is kept with what was summed up under it (FlashAttention,
 * Dao et al. 2022): no result depends on which other tokens are computed with it.
 */
#include <stdatomic.h>

#include "attention.h"
#include "../experts/vnni.h"

#if defined(__x86_64__)
enum { KEYS = 64, PANELS = 4, AT_ONCE = 16 };

static const float LEAST = -1e30f; /* of what is hidden */

typedef struct {
    const attention_shape *shape;
    const attention_kv *kv;
    int64_t rows, window, together; /* together: tokens of a task */
    uint16_t *qkv;
    const uint16_t *cosine, *sine;
    uint16_t *out;
    float *scratch;
    _Atomic int64_t taken;
} rows_job;

/* A thread's part of the scratch, and the lanes' sums. */
typedef struct {
    float *queries, *sums;       /* [PANELS, dim, LANES] */
    float *keys, *values, *line; /* [KEYS, dim] twice, [LANES, dim] */
    float largest[PANELS * LANES], total[PANELS * LANES];
    int32_t position[PANELS * LANES];
} workplace;

static int64_t numbers_of(int64_t dim) { return dim * (2 * PANELS * LANES + 2 * KEYS + LANES); }

static int64_t row_size(const attention_shape *shape) { return (shape->heads + 2 * shape->kv_heads) * shape->dim; }

AVX2 static void prepare_task(void *argument, int64_t task) {
    const rows_job *job = argument;
    const int64_t dim = job->shape->dim, end = (task + 1) * AT_ONCE;
    for (int64_t row = task * AT_ONCE; row < end && row < job->rows; row++) {
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

AVX2 static void tile(const float *a, int64_t a_row, int64_t a_deep, const float *b, int64_t depth, const float *factor,
                      float *c) {
    for (int r = 0; r < OUTER; r += 4)
        for (int l = 0; l < LANES; l += 16) {
            const float *from = a + r * a_row, *with = b + l;
            float *to = c + r * LANES + l;
            __m256 sum[4][2];
            for (int i = 0; i < 4; i++)
                for (int h = 0; h < 2; h++)
                    sum[i][h] = factor ? _mm256_mul_ps(_mm256_loadu_ps(to + i * LANES + 8 * h), _mm256_loadu_ps(factor + l + 8 * h))
                                       : _mm256_setzero_ps();
            for (int64_t k = 0; k < depth; k++, from += a_deep, with += LANES) {
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

static void product(const float *a, int64_t a_row, int64_t a_deep, const float *b, int64_t depth, const float *factor,
                    float *c) {
    if (use_vnni) float_tile_512(a, a_row, a_deep, b, depth, factor, c);
    else tile(a, a_row, a_deep, b, depth, factor, c);
}

/* Scores of `keys` keys from t become their shares of a sum under the largest so far; what was summed up before counts
 * `factor` times. */
AVX2 static void shares(float *scores, int64_t t, int64_t keys, int64_t window, const int32_t *position, float *largest,
                        float *total, float *factor) {
    for (int l = 0; l < LANES; l += 8) {
        const __m256i at = _mm256_loadu_si256((const __m256i *)(position + l));
        const __m256i first = window ? _mm256_sub_epi32(at, _mm256_set1_epi32((int32_t)window - 1)) : _mm256_setzero_si256();
        const __m256 before = _mm256_loadu_ps(largest + l);
        __m256 most = before, sum = _mm256_setzero_ps();
        for (int64_t k = 0; k < keys; k++) {
            const __m256i key = _mm256_set1_epi32((int32_t)(t + k));
            const __m256i hidden = _mm256_or_si256(_mm256_cmpgt_epi32(key, at), _mm256_cmpgt_epi32(first, key));
            const __m256 score = _mm256_blendv_ps(_mm256_loadu_ps(scores + k * LANES + l), _mm256_set1_ps(LEAST),
                                                  _mm256_castsi256_ps(hidden));
            _mm256_storeu_ps(scores + k * LANES + l, score);
            most = _mm256_max_ps(most, score);
        }
        for (int64_t k = 0; k < keys; k++) {
            const __m256 score = _mm256_loadu_ps(scores + k * LANES + l);
            const __m256 hidden = _mm256_cmp_ps(score, _mm256_set1_ps(LEAST), _CMP_EQ_OQ);
            const __m256 share = _mm256_andnot_ps(hidden, exponential(_mm256_sub_ps(score, most)));
            _mm256_storeu_ps(scores + k * LANES + l, share);
            sum = _mm256_add_ps(sum, share);
        }
        const __m256 kept = exponential(_mm256_sub_ps(before, most));
        _mm256_storeu_ps(factor + l, kept);
        _mm256_storeu_ps(largest + l, most);
        _mm256_storeu_ps(total + l, _mm256_fmadd_ps(_mm256_loadu_ps(total + l), kept, sum));
    }
}

AVX2 static void widen(const uint16_t *from, int64_t count, float by, float *to) {
    for (int64_t i = 0; i < count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_mul_ps(eight_from_bf16(from + i), _mm256_set1_ps(by)));
}

/* `count` queries from token `row`, `sharing` of each token, from `head` on. */
AVX2 static void attend_rows(const rows_job *job, int64_t kv_head, int64_t row, int64_t count, workplace *w) {
    const attention_shape *shape = job->shape;
    const int64_t dim = shape->dim, sharing = shape->heads / shape->kv_heads, panels = (count + LANES - 1) / LANES;
    const int64_t end = job->kv->past + row + (count + sharing - 1) / sharing, seen_from = job->kv->past + row + 1 - job->window;
    for (int64_t i = 0; i < panels * LANES; i++) {
        const int64_t of = i < count ? i : count - 1, token = row + of / sharing; /* the last lanes do the last query again */
        w->position[i] = (int32_t)(job->kv->past + token);
        w->largest[i] = LEAST;
        w->total[i] = 0;
        widen(job->qkv + token * row_size(shape) + (kv_head * sharing + of % sharing) * dim, dim, shape->scaling,
              w->line + i % LANES * dim);
        if (i % LANES == LANES - 1) transpose(w->line, LANES, dim, w->queries + i / LANES * LANES * dim);
    }
    memset(w->sums, 0, sizeof(float) * (size_t)(panels * LANES * dim));
    for (int64_t t = job->window && seen_from > 0 ? seen_from / KEYS * KEYS : 0; t < end; t += KEYS) {
        const int64_t some = end - t < KEYS ? end - t : KEYS, at = (kv_head * job->kv->context + t) * dim;
        widen(job->kv->keys + at, some * dim, 1, w->keys);
        widen(job->kv->values + at, some * dim, 1, w->values);
        for (int64_t p = 0; p < panels; p++) {
            const int64_t last = w->position[(p + 1) * LANES - 1] + 1 - t, keys = last < some ? last : some;
            if (keys <= 0) continue;
            float scores[KEYS * LANES], factor[LANES];
            for (int64_t k = 0; k < keys; k += OUTER)
                product(w->keys + k * dim, dim, 1, w->queries + p * LANES * dim, dim, NULL, scores + k * LANES);
            shares(scores, t, keys, job->window, w->position + p * LANES, w->largest + p * LANES, w->total + p * LANES, factor);
            for (int64_t d = 0; d < dim; d += OUTER)
                product(w->values + d, 1, dim, scores, keys, factor, w->sums + (p * dim + d) * LANES);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        if (i % LANES == 0) transpose(w->sums + i * dim, dim, LANES, w->line);
        const float by = 1 / w->total[i], *sum = w->line + i % LANES * dim;
        uint16_t *to = job->out + ((row + i / sharing) * shape->heads + kv_head * sharing + i % sharing) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = to_bf16(sum[d] * by);
    }
}

/* A thread's: whatever is left to do, in its part of the scratch. The longest first. */
AVX2 static void thread_task(void *argument, int64_t thread) {
    rows_job *job = argument;
    const attention_shape *shape = job->shape;
    const int64_t dim = shape->dim, sharing = shape->heads / shape->kv_heads;
    const int64_t blocks = (job->rows + job->together - 1) / job->together;
    float *scratch = job->scratch + thread * numbers_of(dim);
    workplace w = {.queries = scratch, .sums = scratch + PANELS * LANES * dim, .keys = scratch + 2 * PANELS * LANES * dim};
    w.values = w.keys + KEYS * dim;
    w.line = w.values + KEYS * dim;
    for (int64_t taken; (taken = atomic_fetch_add(&job->taken, 1)) < blocks * shape->kv_heads;) {
        const int64_t row = (blocks - 1 - taken / shape->kv_heads) * job->together, left = job->rows - row;
        attend_rows(job, taken % shape->kv_heads, row, sharing * (left < job->together ? left : job->together), &w);
    }
}

AVX2 int edgemoe_attention_rows(pool *p, const attention_shape *shape, const attention_kv *kv, int64_t rows, int64_t window,
                                uint16_t *qkv, const uint16_t *cosine, const uint16_t *sine, uint16_t *out) {
    const int64_t sharing = shape->heads / shape->kv_heads, threads = pool_threads(p);
    float *scratch = pool_take(p, (size_t)(threads * numbers_of(shape->dim)) * sizeof(float));
    if (!scratch) return -1;
    rows_job job = {.shape = shape, .kv = kv, .rows = rows, .window = window, .together = PANELS * LANES / sharing, .qkv = qkv,
                    .cosine = cosine, .sine = sine, .out = out, .scratch = scratch};
    pool_run(p, prepare_task, &job, (rows + AT_ONCE - 1) / AT_ONCE);
    pool_run(p, thread_task, &job, threads);
    pool_give_back(p);
    return 0;
}
#endif
