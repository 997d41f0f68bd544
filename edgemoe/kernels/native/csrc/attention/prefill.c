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

#include "prefill.h"

#include "block_paths.h"
#include "decode.h"
#include "transpose.h"

#if COMPILED
enum {
    PANELS = 4,        /* of LANES queries each, per task */
    PREPARE_ROWS = 16, /* tokens of a task of prepare_task */
};

static const float RECEIVED_UNIT = 0x1p-32f; /* of the attention that a key receives: integers add up to the same in any order */

typedef struct {
    const attention_shape *shape;
    const attention_kv *kv;
    const block_path *path;
    int64_t rows, window, task_rows; /* task_rows: tokens of a task */
    const int32_t *ahead; /* [rows], tokens after a row that it sees; NULL: none */
    uint16_t *qkv;
    const void *cosine, *sine;
    uint16_t *out;
    float *scratch;
    int64_t counted;   /* first row whose attention is added to `received` */
    int64_t *received; /* [threads, past + rows], in units of RECEIVED_UNIT; NULL: not counted */
    _Atomic int64_t next; /* task */
} rows_job;

/* A thread's scratch, and the running state of each lane's softmax. */
typedef struct {
    float *queries, *sums;     /* [PANELS, padded(dim), LANES]; queries as B */
    uint32_t *keys, *values;   /* as A */
    float *panel;              /* [LANES, dim] */
    uint16_t *rounded;         /* [KEYS, dim] */
    float scores[KEYS * LANES];
    float largest[PANELS * LANES], total[PANELS * LANES];
    int32_t position[PANELS * LANES], last[PANELS * LANES]; /* of the tokens that a lane sees */
    int64_t *received; /* of the job, this thread's */
} workspace;

static int64_t workspace_floats(int64_t dim) { return padded(dim) * (2 * PANELS * LANES + 2 * KEYS + LANES + KEYS / 2); }

/* A multiple of 64. */
static int64_t workspaces_bytes(int64_t threads, int64_t dim) { return threads * workspace_floats(dim) * (int64_t)sizeof(float); }

int64_t edgemoe_attention_scratch(int64_t threads, int64_t dim, int64_t tokens) {
    return workspaces_bytes(threads, dim) + threads * tokens * (int64_t)sizeof(int64_t);
}

AVX2 static void prepare_task(void *argument, int64_t task) {
    const rows_job *job = argument;
    const attention_shape *shape = job->shape;
    const int64_t end = min_of((task + 1) * PREPARE_ROWS, job->rows);
    for (int64_t row = task * PREPARE_ROWS; row < end; row++) {
        attention_kv kv = *job->kv;
        kv.past += row;
        attention_prepare(shape, &kv, job->qkv + row * attention_row_size(shape), attention_table(shape, job->cosine, row),
                          attention_table(shape, job->sine, row));
    }
}

/* The queries [LANES, dim] of one panel, as B. */
AVX2 static void lay_out_queries(const block_path *path, float *panel, int64_t dim, float *queries) {
    transpose(panel, LANES, dim, queries);
    memset(queries + dim * LANES, 0, sizeof *queries * (size_t)((padded(dim) - dim) * LANES));
    if (path->lanes) path->lanes(queries, padded(dim));
}

/* Adds to `received` [keys] the weights of `keys` keys from t for the queries of a panel, each times `share` [LANES]. */
AVX2 static void add_weights(const float *scores, int64_t t, int64_t keys, const panel_state *s, const float *share, float *received) {
    for (int64_t k = 0; k < keys; k++) {
        __m256 sum = _mm256_setzero_ps();
        for (int l = 0; l < LANES; l += 8) {
            const __m256i at = _mm256_loadu_si256((const __m256i *)(s->position + l)), key = _mm256_set1_epi32((int32_t)(t + k));
            const __m256i last = _mm256_loadu_si256((const __m256i *)(s->last + l));
            const __m256i first = s->window ? _mm256_sub_epi32(at, _mm256_set1_epi32((int32_t)s->window - 1)) : _mm256_setzero_si256();
            const __m256i hidden = _mm256_or_si256(_mm256_cmpgt_epi32(key, last), _mm256_cmpgt_epi32(first, key));
            const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(scores + k * LANES + l), _mm256_set1_ps(s->scaling));
            const __m256 weight = rounded_to_bf16(exponential(_mm256_sub_ps(scaled, _mm256_loadu_ps(s->largest + l))));
            sum = _mm256_fmadd_ps(_mm256_andnot_ps(_mm256_castsi256_ps(hidden), weight), _mm256_loadu_ps(share + l), sum);
        }
        received[k] += horizontal_sum(sum);
    }
}

/* Keys [t, t + count) of a head, or its values, as A. */
static operand block_of(const block_path *path, const attention_kv *kv, int keys, int64_t kv_head, int64_t t, int64_t count,
                        int64_t dim, workspace *w) {
    const int64_t format = keys ? kv->key_format : kv->value_format, at = (kv_head * kv->context + t) * kv_row_bytes(format, dim);
    return keys ? path->rows(format, kv->keys + at, count, dim, w->rounded, w->keys)
                : path->columns(format, kv->values + at, count, dim, w->rounded, w->values);
}

static panel_state panel_of(const rows_job *job, workspace *w, int64_t panel) {
    const int64_t at = panel * LANES;
    return (panel_state){w->position + at, w->last + at, job->window, job->shape->scaling, w->largest + at, w->total + at};
}

/* Adds the attention that the `count` queries of a task give to each key, from key `from` to `end`, to w->received. */
AVX2 static void count_received(const rows_job *job, int64_t kv_head, int64_t row, int64_t count, int64_t from, int64_t end,
                                workspace *w) {
    const int64_t dim = job->shape->dim, sharing = job->shape->heads / job->shape->kv_heads, panels = ceil_div(count, LANES);
    float share[PANELS * LANES];
    for (int64_t i = 0; i < panels * LANES; i++) {
        const int counts = i < count && row + i / sharing >= job->counted; /* surplus lanes repeat a query */
        share[i] = counts ? 1 / w->total[i] : 0;
    }
    for (int64_t t = from; t < end; t += KEYS) {
        const int64_t block = min_of(end - t, KEYS);
        const operand of_keys = block_of(job->path, job->kv, 1, kv_head, t, block, dim, w);
        float received[KEYS] = {0};
        for (int64_t p = 0; p < panels; p++) {
            const panel_state state = panel_of(job, w, p);
            const int64_t keys = min_of(state.last[LANES - 1] + 1 - t, block);
            if (keys <= 0) continue;
            job->path->multiply(of_keys, w->queries + p * LANES * padded(dim), LANES, keys, padded(dim), NULL, w->scores);
            add_weights(w->scores, t, keys, &state, share + p * LANES, received);
        }
        for (int64_t k = 0; k < block; k++) w->received[t + k] += llrintf(received[k] / RECEIVED_UNIT);
    }
}

/* The last token that a row sees. */
static int64_t last_of(const rows_job *job, int64_t row) { return job->kv->past + row + (job->ahead ? job->ahead[row] : 0); }

/* Attention of the `count` queries of one key head from token `row` on, `sharing` per token. */
AVX2 static void attend_rows(const rows_job *job, int64_t kv_head, int64_t row, int64_t count, workspace *w) {
    const attention_shape *shape = job->shape;
    const attention_kv *kv = job->kv;
    const block_path *path = job->path;
    const int64_t dim = shape->dim, own = shape->value_dim, width = padded(dim), sharing = shape->heads / shape->kv_heads, panels = ceil_div(count, LANES);
    const int64_t end = last_of(job, row + ceil_div(count, sharing) - 1) + 1, window_start = kv->past + row + 1 - job->window;
    for (int64_t i = 0; i < panels * LANES; i++) {
        const int64_t query = min_of(i, count - 1), token = row + query / sharing; /* surplus lanes repeat the last query */
        w->position[i] = (int32_t)(kv->past + token);
        w->last[i] = (int32_t)last_of(job, token);
        attention_start(shape, kv_head * sharing + query % sharing, w->largest + i, w->total + i);
        uint16_t rotated[KV_MOST_DIM];
        attention_query(job->qkv + token * attention_row_size(shape) + (kv_head * sharing + query % sharing) * dim, dim, kv->rotation, rotated);
        for (int64_t d = 0; d < dim; d += 8) _mm256_storeu_ps(w->panel + i % LANES * dim + d, eight_from_bf16(rotated + d));
        if (i % LANES == LANES - 1) lay_out_queries(path, w->panel, dim, w->queries + i / LANES * LANES * width);
    }
    memset(w->sums, 0, sizeof *w->sums * (size_t)(panels * LANES * width));
    const int64_t from = job->window && window_start > 0 ? window_start / KEYS * KEYS : 0;
    for (int64_t t = from; t < end; t += KEYS) {
        const int64_t block = min_of(end - t, KEYS);
        const operand of_keys = block_of(path, kv, 1, kv_head, t, block, dim, w), of_values = block_of(path, kv, 0, kv_head, t, block, dim, w);
        for (int64_t p = 0; p < panels; p++) {
            const panel_state state = panel_of(job, w, p);
            const int64_t keys = min_of(state.last[LANES - 1] + 1 - t, block);
            if (keys <= 0) continue;
            float factor[LANES];
            path->multiply(of_keys, w->queries + p * LANES * width, LANES, keys, width, NULL, w->scores);
            path->softmax(w->scores, t, keys, &state, factor);
            if (path->lanes) path->lanes(w->scores, padded(keys));
            path->multiply(of_values, w->scores, LANES, dim, padded(keys), factor, w->sums + p * LANES * width);
        }
    }
    if (w->received && row + ceil_div(count, sharing) > job->counted) count_received(job, kv_head, row, count, from, end, w);
    for (int64_t i = 0; i < count; i++) {
        if (i % LANES == 0) transpose(w->sums + i * width, dim, LANES, w->panel);
        const float by = 1 / w->total[i], *sum = w->panel + i % LANES * dim;
        uint16_t *to = job->out + ((row + i / sharing) * shape->heads + kv_head * sharing + i % sharing) * own;
        for (int64_t d = 0; d < own; d++) to[d] = to_bf16(sum[d] * by + 0.0f); /* no -0, which depends on the split */
    }
}

/* A thread's work: takes tasks, the longest first, until none is left. */
AVX2 static void thread_task(void *argument, int64_t thread) {
    rows_job *job = argument;
    const attention_shape *shape = job->shape;
    const int64_t dim = shape->dim, sharing = shape->heads / shape->kv_heads;
    const int64_t blocks = ceil_div(job->rows, job->task_rows);
    const int64_t width = padded(dim);
    workspace w = {.queries = job->scratch + thread * workspace_floats(dim)};
    w.sums = w.queries + PANELS * LANES * width;
    w.keys = (uint32_t *)(w.sums + PANELS * LANES * width);
    w.values = w.keys + KEYS * width;
    w.panel = (float *)(w.values + KEYS * width);
    w.rounded = (uint16_t *)(w.panel + LANES * width);
    const uint64_t before = flush_small();
    if (job->received) w.received = job->received + thread * (job->kv->past + job->rows);
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < blocks * shape->kv_heads;) {
        const int64_t row = (blocks - 1 - task / shape->kv_heads) * job->task_rows;
        attend_rows(job, task % shape->kv_heads, row, sharing * min_of(job->rows - row, job->task_rows), &w);
    }
    restore_small(before);
}

/* Whether the ends of what rows see ascend within the call. */
static int ahead_fits(const int32_t *ahead, int64_t rows) {
    for (int64_t row = 0; ahead && row < rows; row++)
        if (ahead[row] < 0 || row + ahead[row] >= rows || (row && ahead[row] + 1 < ahead[row - 1])) return 0;
    return 1;
}

AVX2 int edgemoe_attention_rows(pool *p, const attention_shape *shape, const attention_kv *kv, int64_t rows, int64_t window,
                                const int32_t *ahead, uint16_t *qkv, const void *cosine, const void *sine, uint16_t *out, int64_t counted,
                                float *received) {
    if (!attention_fits(shape, kv, rows) || shape->heads > PANELS * LANES * shape->kv_heads || window < 0 || !ahead_fits(ahead, rows)) return WRONG_SHAPE;
    const int64_t sharing = shape->heads / shape->kv_heads, threads = pool_threads(p), tokens = kv->past + rows;
    float *scratch = pool_acquire(p, (size_t)edgemoe_attention_scratch(threads, shape->dim, received ? tokens : 0));
    if (!scratch) return OUT_OF_MEMORY;
    int64_t *sums = received ? (int64_t *)((char *)scratch + workspaces_bytes(threads, shape->dim)) : NULL;
    if (sums) memset(sums, 0, (size_t)(threads * tokens) * sizeof *sums);
    const block_path *path = block_path_of(path_of(WORK_ATTENTION, SEVERAL_UP_TO + 1));
    rows_job job = {.shape = shape, .kv = kv, .path = path, .rows = rows, .window = window, .task_rows = PANELS * LANES / sharing, .ahead = ahead, .qkv = qkv,
                    .cosine = cosine, .sine = sine, .out = out, .scratch = scratch, .counted = counted, .received = sums};
    if (!shape->prepared) pool_run(p, prepare_task, &job, ceil_div(rows, PREPARE_ROWS));
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
