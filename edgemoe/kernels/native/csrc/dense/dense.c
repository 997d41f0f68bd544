/* Products with dense bf16 and float32 weights, and norms. */
#include "dense.h"

#include <stdatomic.h>

#include "../paths.h"
#include "dense_bf16.h"
#include "dense_int8.h"
#include "dense_planes.h"

#if COMPILED
typedef struct {
    numbers_matrix weight;
    const uint16_t *x; /* bf16, a token's numbers after another's */
    int64_t x_cols, tokens;
    float *wide;       /* [tokens, cols]: x as float, without use_bf16 */
    uint16_t *y;
    int64_t y_cols, rows_per_task, threads;
} dense_job;

enum {
    TASK_ROWS = 32,     /* rows of a task; up to MAX_UNITS times as many for a single token */
    MAX_UNITS = 4,
    BATCH_TOKENS = 64,  /* tokens per read of the weight */
    HEAD_TOKENS = 128,  /* the same of a head's matrix, where heads alone keep all threads busy */
    PREPARE_TOKENS = 8, /* tokens of a task of prepare_task */
    FEW_TOKENS = 6,     /* most tokens for which int8 matrices of heads are converted as they are read */
};

/* Converts tokens [from, end) of x. */
AVX2 static void widen(const dense_job *job, int64_t from, int64_t end) {
    const int64_t cols = job->weight.cols;
    for (int64_t t = from; t < end; t++)
        for (int64_t k = 0; k < cols; k++) job->wide[t * cols + k] = from_bf16(job->x[t * job->x_cols + k]);
}

AVX2 static void prepare_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    widen(job, task * PREPARE_TOKENS, min_of((task + 1) * PREPARE_TOKENS, job->tokens));
}

/* A row of W. */
typedef struct {
    const void *at;
    const uint16_t *scale; /* BY_ROW: its own; BY_COLUMN: the columns' */
} number_row;

INLINE number_row row_of(const numbers_matrix *w, int64_t row) {
    const int64_t bytes = w->numbers == BF16_NUMBERS ? 2 : w->numbers == FLOAT32_NUMBERS ? 4 : 1;
    return (number_row){(const uint8_t *)w->at + row * w->cols * bytes, w->numbers == BY_ROW ? w->scale + row : w->scale};
}

/* Numbers [k, k + 8) of a row. */
INLINE __m256 eight_of(enum numbers numbers, number_row w, int64_t k) {
    if (numbers == FLOAT32_NUMBERS) return _mm256_loadu_ps((const float *)w.at + k);
    if (numbers == BF16_NUMBERS) return eight_from_bf16((const uint16_t *)w.at + k);
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)((const int8_t *)w.at + k));
    const __m256 by = numbers == BY_ROW ? _mm256_set1_ps(from_bf16(*w.scale)) : eight_from_bf16(w.scale + k);
    return eight_rounded(_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), by));
}

INLINE float one_of(enum numbers numbers, number_row w, int64_t k) {
    if (numbers == FLOAT32_NUMBERS) return ((const float *)w.at)[k];
    if (numbers == BF16_NUMBERS) return from_bf16(((const uint16_t *)w.at)[k]);
    return from_bf16(to_bf16((float)((const int8_t *)w.at)[k] * from_bf16(w.scale[numbers == BY_ROW ? 0 : k])));
}

/* out[token] of a row, for `tokens`, a constant: 4, with cols % 16 == 0, or 1. Both give the same bits. */
INLINE void tile(enum numbers numbers, int tokens, number_row w, const float *x, int64_t cols, float out[4]) {
    __m256 a[4], b[4];
    float rest = 0;
    for (int t = 0; t < tokens; t++) a[t] = b[t] = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 16 <= cols; k += 16) {
        prefetch((const uint8_t *)w.at + (numbers == FLOAT32_NUMBERS ? 4 : numbers == BF16_NUMBERS ? 2 : 1) * k + PREFETCH_DISTANCE);
        const __m256 first = eight_of(numbers, w, k), last = eight_of(numbers, w, k + 8);
        for (int t = 0; t < tokens; t++) {
            a[t] = _mm256_fmadd_ps(first, _mm256_loadu_ps(x + t * cols + k), a[t]);
            b[t] = _mm256_fmadd_ps(last, _mm256_loadu_ps(x + t * cols + k + 8), b[t]);
        }
    }
    for (; k < cols; k++) rest = __builtin_fmaf(one_of(numbers, w, k), x[k], rest);
    for (int t = 0; t < tokens; t++) out[t] = horizontal_sum(_mm256_add_ps(a[t], b[t])) + (tokens == 1 ? rest : 0);
}

/* y of rows [from, end) for all tokens, by AVX2. */
INLINE void product_rows_256(enum numbers numbers, const dense_job *job, int64_t from, int64_t end) {
    const int64_t cols = job->weight.cols, by_fours = cols % 16 ? 0 : job->tokens / 4 * 4;
    float out[4];
    for (int64_t t = 0; t < job->tokens; t += t < by_fours ? 4 : 1)
        for (int64_t row = from; row < end; row++) {
            const int64_t some = t < by_fours ? 4 : 1;
            const number_row w = row_of(&job->weight, row);
            if (some == 4) tile(numbers, 4, w, job->wide + t * cols, cols, out);
            else tile(numbers, 1, w, job->wide + t * cols, cols, out);
            for (int64_t j = 0; j < some; j++) job->y[(t + j) * job->y_cols + row] = to_bf16(out[j]);
        }
}

/* y of rows [from, end) for all tokens. */
AVX2 static void product_rows(const dense_job *job, int64_t from, int64_t end) {
    if (COMPILED_AVX512 && use_bf16) {
        const number_row first = row_of(&job->weight, from);
        const numbers_matrix some = {first.at, first.scale, job->weight.numbers, end - from, job->weight.cols};
        dense_bf16(&some, job->x, job->x_cols, job->tokens, job->y_cols, job->y + from);
    } else if (job->weight.numbers == BY_ROW) product_rows_256(BY_ROW, job, from, end);
    else if (job->weight.numbers == BY_COLUMN) product_rows_256(BY_COLUMN, job, from, end);
    else product_rows_256(BF16_NUMBERS, job, from, end);
}

AVX2 static void dense_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t place = contiguous_per_thread(task, ceil_div(job->weight.rows, job->rows_per_task), job->threads);
    product_rows(job, place * job->rows_per_task, min_of((place + 1) * job->rows_per_task, job->weight.rows));
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
        dense_job job = {{w->weight, NULL, BF16_NUMBERS, rows, cols}, x, cols, now, wide, y, rows, TASK_ROWS * units, pool_threads(p)};
        if (!use_bf16) pool_run(p, prepare_task, &job, ceil_div(now, PREPARE_TOKENS));
        pool_run(p, dense_task, &job, ceil_div(rows, job.rows_per_task));
    }
    pool_release(p);
    return 0;
}

/* Products of several heads; a task is `batch` tokens of one. */
typedef struct {
    const dense_heads *heads;
    int64_t batch;
    dense_job each;      /* a head's, with all tokens */
    uint16_t *converted; /* [threads, rows, cols], of int8 weights that more than FEW_TOKENS tokens are multiplied by */
    int64_t tasks;
    _Atomic int64_t next;
} heads_job;

/* to = bf16(w * scale) of an int8 matrix. */
INLINE void convert(enum numbers numbers, const numbers_matrix *w, uint16_t *to) {
    for (int64_t row = 0; row < w->rows; row++, to += w->cols) {
        const number_row from = row_of(w, row);
        int64_t k = 0;
        for (; k + 8 <= w->cols; k += 8) _mm_storeu_si128((__m128i *)(to + k), eight_to_bf16(eight_of(numbers, from, k)));
        for (; k < w->cols; k++) to[k] = to_bf16(one_of(numbers, from, k));
    }
}

AVX2 static void heads_thread(void *argument, int64_t thread) {
    heads_job *job = argument;
    const dense_heads *h = job->heads;
    const int64_t batches = job->tasks / h->heads;
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < job->tasks;) {
        const int64_t head = task / batches, from = task % batches * job->batch;
        dense_job one = job->each;
        const numbers_matrix *w = &one.weight;
        one.weight.at = (const uint8_t *)h->weight + head * h->stride * (h->scale ? 1 : 2);
        if (h->scale) one.weight.scale = h->scale + head * h->scale_stride;
        if (job->converted) {
            uint16_t *converted = job->converted + thread * h->rows * h->cols;
            if (h->by_column) convert(BY_COLUMN, w, converted);
            else convert(BY_ROW, w, converted);
            one.weight.at = converted, one.weight.numbers = BF16_NUMBERS;
        }
        one.tokens = min_of(job->batch, one.tokens - from);
        one.x += head * h->x_stride + from * h->x_cols;
        one.y += head * h->y_stride + from * h->y_cols;
        one.wide += use_bf16 ? 0 : thread * job->batch * h->cols;
        if (!use_bf16) widen(&one, 0, one.tokens);
        product_rows(&one, 0, h->rows);
    }
}

/* Whether rows of `cols` numbers of heads and tokens lie apart, whichever are next to each other. */
static int apart(int64_t heads, int64_t stride, int64_t tokens, int64_t next, int64_t cols) {
    return (next >= cols && stride >= (tokens - 1) * next + cols) || (stride >= cols && next >= (heads - 1) * stride + cols);
}

AVX2 int edgemoe_dense_heads(pool *p, const dense_heads *h, const uint16_t *x, int64_t tokens, uint16_t *y) {
    if (h->heads < 1 || tokens < 1 || h->stride < h->rows * h->cols) return WRONG_SHAPE;
    if (!apart(h->heads, h->x_stride, tokens, h->x_cols, h->cols) || !apart(h->heads, h->y_stride, tokens, h->y_cols, h->rows)) return WRONG_SHAPE;
    const int threads = pool_threads(p), many = h->scale && tokens > FEW_TOKENS;
    const enum numbers numbers = !h->scale ? BF16_NUMBERS : h->by_column ? BY_COLUMN : BY_ROW;
    const int64_t batch = h->heads < 4 * threads ? BATCH_TOKENS : HEAD_TOKENS;
    const int64_t wide = use_bf16 ? 0 : threads * batch * h->cols, converted = many ? threads * h->rows * h->cols : 0;
    float *scratch = pool_acquire(p, (size_t)wide * sizeof(float) + (size_t)converted * sizeof(uint16_t));
    if (!scratch) return OUT_OF_MEMORY;
    heads_job job = {.heads = h, .batch = batch, .converted = many ? (uint16_t *)(scratch + wide) : NULL, .tasks = h->heads * ceil_div(tokens, batch)};
    job.each = (dense_job){{h->weight, h->scale, numbers, h->rows, h->cols}, x, h->x_cols, tokens, scratch, y, h->y_cols, h->rows, threads};
    pool_run(p, heads_thread, &job, threads);
    pool_release(p);
    return 0;
}

typedef struct {
    numbers_matrix weight; /* float32 or bf16 */
    const float *x;
    int64_t tokens;
    float *y;
} wide_job;

enum { WIDE_ROWS = 8 }; /* of a task */

INLINE void wide_rows(enum numbers numbers, const wide_job *job, int64_t from, int64_t end) {
    const int64_t rows = job->weight.rows, cols = job->weight.cols, by_fours = cols % 16 ? 0 : job->tokens / 4 * 4;
    float out[4];
    for (int64_t t = 0; t < job->tokens; t += t < by_fours ? 4 : 1)
        for (int64_t row = from; row < end; row++) {
            const number_row w = row_of(&job->weight, row);
            const float *x = job->x + t * cols;
            if (t < by_fours) tile(numbers, 4, w, x, cols, out);
            else tile(numbers, 1, w, x, cols, out);
            for (int64_t j = 0; j < (t < by_fours ? 4 : 1); j++) job->y[(t + j) * rows + row] = out[j];
        }
}

AVX2 static void wide_task(void *argument, int64_t task) {
    const wide_job *job = argument;
    const int64_t from = task * WIDE_ROWS, end = min_of(from + WIDE_ROWS, job->weight.rows);
    if (job->weight.numbers == FLOAT32_NUMBERS) wide_rows(FLOAT32_NUMBERS, job, from, end);
    else wide_rows(BF16_NUMBERS, job, from, end);
}

AVX2 int edgemoe_wide_product(pool *p, const float *weight, int64_t rows, int64_t cols, const float *x, int64_t tokens,
                              float *y) {
    if (!pool_acquire(p, 0)) return OUT_OF_MEMORY;
    wide_job job = {{weight, NULL, FLOAT32_NUMBERS, rows, cols}, x, tokens, y};
    pool_run(p, wide_task, &job, ceil_div(rows, WIDE_ROWS));
    pool_release(p);
    return 0;
}

AVX2 int edgemoe_precise_product(pool *p, const void *weight, int wide_weight, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens,
                                 float *y) {
    const int64_t most = min_of(tokens, BATCH_TOKENS);
    float *wide = pool_acquire(p, (size_t)(most * cols) * sizeof *wide);
    if (!wide) return OUT_OF_MEMORY;
    for (int64_t now; tokens > 0; tokens -= now, x += now * cols, y += now * rows) {
        now = min_of(tokens, most);
        for (int64_t i = 0; i < now * cols; i++) wide[i] = from_bf16(x[i]);
        wide_job job = {{weight, NULL, wide_weight ? FLOAT32_NUMBERS : BF16_NUMBERS, rows, cols}, wide, now, y};
        pool_run(p, wide_task, &job, ceil_div(rows, WIDE_ROWS));
    }
    pool_release(p);
    return 0;
}

/* The sum of eight lanes. */
AVX2 static float sum_of(const float *lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

AVX2 float edgemoe_rms_factor(const uint16_t *x, int64_t cols, float epsilon) {
    float lanes[8] = {0};
    int64_t k = 0;
    for (; k + 8 <= cols; k += 8)
        for (int j = 0; j < 8; j++) lanes[j] = __builtin_fmaf(from_bf16(x[k + j]), from_bf16(x[k + j]), lanes[j]);
    for (; k < cols; k++) lanes[0] = __builtin_fmaf(from_bf16(x[k]), from_bf16(x[k]), lanes[0]);
    return 1 / __builtin_sqrtf(sum_of(lanes) / (float)cols + epsilon);
}

AVX2 static float mean_of(const uint16_t *x, int64_t cols) {
    float lanes[8] = {0};
    int64_t k = 0;
    for (; k + 8 <= cols; k += 8)
        for (int j = 0; j < 8; j++) lanes[j] += from_bf16(x[k + j]);
    for (; k < cols; k++) lanes[0] += from_bf16(x[k]);
    return sum_of(lanes) / (float)cols;
}

/* 1 / sqrt(mean((x - mean)^2) + epsilon). */
AVX2 static float centred_factor(const uint16_t *x, float mean, int64_t cols, float epsilon) {
    float lanes[8] = {0};
    int64_t k = 0;
    for (; k + 8 <= cols; k += 8)
        for (int j = 0; j < 8; j++) {
            const float part = from_bf16(x[k + j]) - mean;
            lanes[j] = __builtin_fmaf(part, part, lanes[j]);
        }
    for (; k < cols; k++) lanes[0] = __builtin_fmaf(from_bf16(x[k]) - mean, from_bf16(x[k]) - mean, lanes[0]);
    return 1 / __builtin_sqrtf(sum_of(lanes) / (float)cols + epsilon);
}

/* y = weight (x - mean(x)) / sqrt(variance(x) + epsilon) + added, of one row; rounded once. */
AVX2 static void centred_norm(const uint16_t *x, const float *weight, float epsilon, int64_t cols, uint16_t *y) {
    const float mean = mean_of(x, cols), by = centred_factor(x, mean, cols, epsilon), *added = weight + cols;
    for (int64_t k = 0; k < cols; k++) y[k] = to_bf16((from_bf16(x[k]) - mean) * by * weight[k] + added[k]);
}

AVX2 void edgemoe_rms_norm(const uint16_t *x, const void *weight, int wide, float epsilon, int64_t rows, int64_t cols,
                           uint16_t *y) {
    for (; rows-- > 0; x += cols, y += cols) {
        if (wide == CENTRED_NORM) {
            centred_norm(x, weight, epsilon, cols, y);
            continue;
        }
        const float by = edgemoe_rms_factor(x, cols, epsilon), *wider = weight;
        const uint16_t *narrow = weight;
        if (wide) for (int64_t k = 0; k < cols; k++) y[k] = to_bf16(from_bf16(x[k]) * by * wider[k]);
        else for (int64_t k = 0; k < cols; k++) y[k] = to_bf16(from_bf16(narrow[k]) * from_bf16(to_bf16(from_bf16(x[k]) * by)));
    }
}
#endif
