/* Products with dense bf16 and float32 weights, and norms. */
#include "dense.h"

#include <stdatomic.h>

#include "../paths.h"
#include "dense_bf16.h"
#include "dense_int8.h"
#include "dense_planes.h"

#if COMPILED
typedef struct {
    const uint16_t *weight; /* bf16 */
    int64_t rows, cols, tokens;
    const uint16_t *x; /* bf16 [tokens, cols] */
    float *wide;       /* x as float, without use_bf16 */
    uint16_t *y;
    int64_t rows_per_task, threads;
} dense_job;

enum {
    TASK_ROWS = 32,     /* rows of a task; up to MAX_UNITS times as many for a single token */
    MAX_UNITS = 4,
    BATCH_TOKENS = 64,  /* tokens per read of the weight */
    PREPARE_TOKENS = 8, /* tokens of a task of prepare_task */
};

AVX2 static void prepare_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t end = min_of((task + 1) * PREPARE_TOKENS, job->tokens) * job->cols;
    for (int64_t i = task * PREPARE_TOKENS * job->cols; i < end; i++) job->wide[i] = from_bf16(job->x[i]);
}

/* Numbers [k, k + 8) of a row of bf16 or float32 numbers. */
INLINE __m256 eight_of(int wide, const void *w, int64_t k) {
    return wide ? _mm256_loadu_ps((const float *)w + k) : eight_from_bf16((const uint16_t *)w + k);
}

/* out[token] of a row, for `tokens`, a constant: 4, with cols % 16 == 0, or 1. Both give the same bits. The row is float32
 * if `wide`, a constant, else bf16. */
INLINE void tile(int wide, int tokens, const void *w, const float *x, int64_t cols, float out[4]) {
    __m256 a[4], b[4];
    float rest = 0;
    for (int t = 0; t < tokens; t++) a[t] = b[t] = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 16 <= cols; k += 16) {
        prefetch((const uint8_t *)w + (wide ? 4 : 2) * k + PREFETCH_DISTANCE);
        const __m256 first = eight_of(wide, w, k), last = eight_of(wide, w, k + 8);
        for (int t = 0; t < tokens; t++) {
            a[t] = _mm256_fmadd_ps(first, _mm256_loadu_ps(x + t * cols + k), a[t]);
            b[t] = _mm256_fmadd_ps(last, _mm256_loadu_ps(x + t * cols + k + 8), b[t]);
        }
    }
    for (; k < cols; k++) rest = __builtin_fmaf(wide ? ((const float *)w)[k] : from_bf16(((const uint16_t *)w)[k]), x[k], rest);
    for (int t = 0; t < tokens; t++) out[t] = horizontal_sum(_mm256_add_ps(a[t], b[t])) + (tokens == 1 ? rest : 0);
}

/* Computes y of a row for 4 tokens, or 1, from t. */
INLINE void outputs(const dense_job *job, int64_t row, int64_t t, int64_t tokens) {
    const uint16_t *w = job->weight + row * job->cols;
    const float *x = job->wide + t * job->cols;
    float out[4];
    if (tokens == 4) tile(0, 4, w, x, job->cols, out);
    else tile(0, 1, w, x, job->cols, out);
    for (int64_t j = 0; j < tokens; j++) job->y[(t + j) * job->rows + row] = to_bf16(out[j]);
}

/* y of rows [from, end) for all tokens. */
AVX2 static void product_rows(const dense_job *job, int64_t from, int64_t end) {
    if (COMPILED_AVX512 && use_bf16) {
        dense_bf16(job->weight + from * job->cols, end - from, job->cols, job->x, job->tokens, job->rows, job->y + from);
        return;
    }
    const int64_t by_fours = job->cols % 16 ? 0 : job->tokens / 4 * 4;
    for (int64_t t = 0; t < by_fours; t += 4)
        for (int64_t row = from; row < end; row++) outputs(job, row, t, 4);
    for (int64_t row = from; row < end; row++)
        for (int64_t t = by_fours; t < job->tokens; t++) outputs(job, row, t, 1);
}

AVX2 static void dense_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t place = contiguous_per_thread(task, ceil_div(job->rows, job->rows_per_task), job->threads);
    product_rows(job, place * job->rows_per_task, min_of((place + 1) * job->rows_per_task, job->rows));
}

AVX2 int edgemoe_dense_product(pool *p, const dense_weight *w, const uint16_t *x, int64_t tokens, int64_t x_cols, uint16_t *y,
                               int64_t y_cols) {
    const int64_t rows = w->rows, cols = w->cols;
    const int in_planes = w->bits == 4 || w->bits == 5 || w->bits == 6;
    if (x_cols != cols || y_cols != rows || (w->bits != 16 && w->bits != 8 && !in_planes)) return WRONG_SHAPE;
    if ((w->row_scale != NULL) != (w->bits == 8)) return WRONG_SHAPE;
    if (w->bits == 8) return dense_int8(p, w->weight, w->row_scale, rows, cols, x, tokens, y);
    if (in_planes) return dense_planes(p, w->weight, w->bits, rows, cols, x, tokens, y);
    const int64_t most = use_bf16 ? tokens : min_of(tokens, BATCH_TOKENS);
    float *wide = pool_acquire(p, use_bf16 ? 0 : (size_t)(most * cols) * sizeof(float));
    if (!wide) return OUT_OF_MEMORY;
    const int64_t units = pool_units_per_task(p, rows / TASK_ROWS, tokens == 1 ? MAX_UNITS : 1);
    for (int64_t now; tokens > 0; tokens -= now, x += now * cols, y += now * rows) {
        now = min_of(tokens, most);
        dense_job job = {w->weight, rows, cols, now, x, wide, y, TASK_ROWS * units, pool_threads(p)};
        if (!use_bf16) pool_run(p, prepare_task, &job, ceil_div(now, PREPARE_TOKENS));
        pool_run(p, dense_task, &job, ceil_div(rows, job.rows_per_task));
    }
    pool_release(p);
    return 0;
}

/* Products of several heads; a task is BATCH_TOKENS tokens of one. */
typedef struct {
    const dense_heads *heads;
    dense_job each; /* a head's, with all tokens */
    uint16_t *converted; /* [threads, rows, cols], of int8 weights */
    int64_t tasks;
    _Atomic int64_t next;
} heads_job;

/* to = bf16(w * scale) of a head's int8 weight [rows, cols]. */
AVX2 static void convert(const dense_heads *h, const int8_t *w, const uint16_t *scale, uint16_t *to) {
    for (int64_t row = 0; row < h->rows; row++, w += h->cols, to += h->cols) {
        const __m256 of_row = _mm256_set1_ps(h->by_column ? 0 : from_bf16(scale[row]));
        int64_t k = 0;
        for (; k + 8 <= h->cols; k += 8) {
            const __m256 wide = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(w + k))));
            const __m256 by = h->by_column ? eight_from_bf16(scale + k) : of_row;
            _mm_storeu_si128((__m128i *)(to + k), eight_to_bf16(_mm256_mul_ps(wide, by)));
        }
        for (; k < h->cols; k++) to[k] = to_bf16((float)w[k] * from_bf16(scale[h->by_column ? k : row]));
    }
}

AVX2 static void heads_thread(void *argument, int64_t thread) {
    heads_job *job = argument;
    const dense_heads *h = job->heads;
    const int64_t batches = job->tasks / h->heads;
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < job->tasks;) {
        const int64_t head = task / batches, from = task % batches * BATCH_TOKENS;
        dense_job one = job->each;
        if (h->scale) {
            uint16_t *converted = job->converted + thread * h->rows * h->cols;
            convert(h, (const int8_t *)h->weight + head * h->stride, h->scale + head * h->scale_stride, converted);
            one.weight = converted;
        } else one.weight += head * h->stride;
        one.tokens = min_of(BATCH_TOKENS, one.tokens - from);
        one.x += head * h->x_stride + from * h->cols;
        one.y += head * h->y_stride + from * h->rows;
        one.wide += use_bf16 ? 0 : thread * BATCH_TOKENS * h->cols;
        for (int64_t i = 0; !use_bf16 && i < one.tokens * h->cols; i++) one.wide[i] = from_bf16(one.x[i]);
        product_rows(&one, 0, h->rows);
    }
}

AVX2 int edgemoe_dense_heads(pool *p, const dense_heads *h, const uint16_t *x, int64_t tokens, uint16_t *y) {
    if (h->heads < 1 || tokens < 1 || h->stride < h->rows * h->cols) return WRONG_SHAPE;
    if (h->x_stride < tokens * h->cols || h->y_stride < tokens * h->rows) return WRONG_SHAPE;
    const int threads = pool_threads(p);
    const int64_t wide = use_bf16 ? 0 : threads * BATCH_TOKENS * h->cols, converted = h->scale ? threads * h->rows * h->cols : 0;
    float *scratch = pool_acquire(p, (size_t)wide * sizeof(float) + (size_t)converted * sizeof(uint16_t));
    if (!scratch) return OUT_OF_MEMORY;
    heads_job job = {.heads = h, .each = {h->weight, h->rows, h->cols, tokens, x, scratch, y, h->rows, threads},
                     .converted = (uint16_t *)(scratch + wide), .tasks = h->heads * ceil_div(tokens, BATCH_TOKENS)};
    pool_run(p, heads_thread, &job, threads);
    pool_release(p);
    return 0;
}

typedef struct {
    const void *weight;
    int64_t wide; /* the weight is float32, else bf16 */
    const float *x;
    int64_t rows, cols, tokens;
    float *y;
} wide_job;

enum { WIDE_ROWS = 8 }; /* of a task */

INLINE void wide_rows(int wide, const wide_job *job, int64_t from, int64_t end) {
    const int64_t by_fours = job->cols % 16 ? 0 : job->tokens / 4 * 4;
    float out[4];
    for (int64_t t = 0; t < job->tokens; t += t < by_fours ? 4 : 1)
        for (int64_t row = from; row < end; row++) {
            const uint8_t *w = (const uint8_t *)job->weight + row * job->cols * (wide ? 4 : 2);
            const float *x = job->x + t * job->cols;
            if (t < by_fours) tile(wide, 4, w, x, job->cols, out);
            else tile(wide, 1, w, x, job->cols, out);
            for (int64_t j = 0; j < (t < by_fours ? 4 : 1); j++) job->y[(t + j) * job->rows + row] = out[j];
        }
}

AVX2 static void wide_task(void *argument, int64_t task) {
    const wide_job *job = argument;
    const int64_t from = task * WIDE_ROWS, end = min_of(from + WIDE_ROWS, job->rows);
    if (job->wide) wide_rows(1, job, from, end);
    else wide_rows(0, job, from, end);
}

AVX2 int edgemoe_wide_product(pool *p, const float *weight, int64_t rows, int64_t cols, const float *x, int64_t tokens,
                              float *y) {
    if (!pool_acquire(p, 0)) return OUT_OF_MEMORY;
    wide_job job = {weight, 1, x, rows, cols, tokens, y};
    pool_run(p, wide_task, &job, ceil_div(rows, WIDE_ROWS));
    pool_release(p);
    return 0;
}

AVX2 int edgemoe_precise_product(pool *p, const uint16_t *weight, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens,
                                 float *y) {
    const int64_t most = min_of(tokens, BATCH_TOKENS);
    float *wide = pool_acquire(p, (size_t)(most * cols) * sizeof *wide);
    if (!wide) return OUT_OF_MEMORY;
    for (int64_t now; tokens > 0; tokens -= now, x += now * cols, y += now * rows) {
        now = min_of(tokens, most);
        for (int64_t i = 0; i < now * cols; i++) wide[i] = from_bf16(x[i]);
        wide_job job = {weight, 0, wide, rows, cols, now, y};
        pool_run(p, wide_task, &job, ceil_div(rows, WIDE_ROWS));
    }
    pool_release(p);
    return 0;
}

AVX2 float edgemoe_rms_factor(const uint16_t *x, int64_t cols, float epsilon) {
    float lanes[8] = {0};
    int64_t k = 0;
    for (; k + 8 <= cols; k += 8)
        for (int j = 0; j < 8; j++) lanes[j] = __builtin_fmaf(from_bf16(x[k + j]), from_bf16(x[k + j]), lanes[j]);
    for (; k < cols; k++) lanes[0] = __builtin_fmaf(from_bf16(x[k]), from_bf16(x[k]), lanes[0]);
    const float sum = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    return 1 / __builtin_sqrtf(sum / (float)cols + epsilon);
}

AVX2 void edgemoe_rms_norm(const uint16_t *x, const void *weight, int wide, float epsilon, int64_t rows, int64_t cols,
                           uint16_t *y) {
    for (; rows-- > 0; x += cols, y += cols) {
        const float by = edgemoe_rms_factor(x, cols, epsilon), *wider = weight;
        const uint16_t *narrow = weight;
        if (wide) for (int64_t k = 0; k < cols; k++) y[k] = to_bf16(from_bf16(x[k]) * by * wider[k]);
        else for (int64_t k = 0; k < cols; k++) y[k] = to_bf16(from_bf16(narrow[k]) * from_bf16(to_bf16(from_bf16(x[k]) * by)));
    }
}
#endif
