/* Sums and norms of many rows, on all threads. */
#include "rows.h"

#include "dense/dense.h"

#if COMPILED
enum { SLICE = 256, NORM_ROWS = 16, AHEAD = 2 }; /* columns, and rows, of a task; rows from one to the one prefetched */

typedef struct {
    const uint16_t *rows;
    const int64_t *tokens;
    const float *weights;
    int64_t count, cols;
    float *sums;
} add_job;

/* One slice of columns of all rows: a token's rows are added by one thread, in their order. */
AVX2 static void add_task(void *of, int64_t task) {
    const add_job *job = of;
    const int64_t first = task * SLICE, end = first + SLICE < job->cols ? first + SLICE : job->cols;
    for (int64_t i = 0; i < job->count; i++) {
        const uint16_t *row = job->rows + i * job->cols;
        float *sum = job->sums + job->tokens[i] * job->cols;
        const __m256 weight = _mm256_set1_ps(job->weights[i]);
        /* Tokens lie far apart, where no hardware prefetches. */
        const float *ahead = job->sums + job->tokens[min_of(i + AHEAD, job->count - 1)] * job->cols;
        for (int64_t k = first; k < end; k += 16) prefetch((const uint8_t *)(ahead + k));
        int64_t k = first;
        for (; k + 8 <= end; k += 8)
            _mm256_storeu_ps(sum + k, _mm256_fmadd_ps(weight, eight_from_bf16(row + k), _mm256_loadu_ps(sum + k)));
        for (; k < end; k++) sum[k] = __builtin_fmaf(job->weights[i], from_bf16(row[k]), sum[k]);
    }
}

AVX2 int edgemoe_add_rows(pool *p, const uint16_t *rows, const int64_t *tokens, const float *weights, int64_t count,
                          int64_t cols, float *sums) {
    add_job job = {rows, tokens, weights, count, cols, sums};
    if (!pool_acquire(p, 64)) return OUT_OF_MEMORY;
    pool_run(p, add_task, &job, (cols + SLICE - 1) / SLICE);
    pool_release(p);
    return 0;
}

typedef struct {
    const uint16_t *x;
    const void *weight;
    int wide;
    float epsilon;
    int64_t rows, cols;
    uint16_t *y;
} norm_job;

AVX2 static void norm_task(void *of, int64_t task) {
    const norm_job *job = of;
    const int64_t first = task * NORM_ROWS, left = job->rows - first, at = first * job->cols;
    edgemoe_rms_norm(job->x + at, job->weight, job->wide, job->epsilon, left < NORM_ROWS ? left : NORM_ROWS, job->cols, job->y + at);
}

AVX2 int edgemoe_norm_rows(pool *p, const uint16_t *x, const void *weight, int wide, float epsilon, int64_t rows, int64_t cols,
                           uint16_t *y) {
    norm_job job = {x, weight, wide, epsilon, rows, cols, y};
    if (!pool_acquire(p, 64)) return OUT_OF_MEMORY;
    pool_run(p, norm_task, &job, (rows + NORM_ROWS - 1) / NORM_ROWS);
    pool_release(p);
    return 0;
}
#endif
