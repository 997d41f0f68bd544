/* Products with dense int8 or bf16 weights, and norms. */
#include "experts/vnni.h"

#if defined(__x86_64__)
typedef struct {
    const void *weight;
    const uint16_t *row_scale; /* bf16, of int8 rows; NULL: the weight is bf16 */
    int64_t rows, cols, tokens;
    const uint16_t *x; /* bf16 [tokens, cols] */
    void *prepared;    /* x as int16 with x_scale, for an int8 weight; as float for a bf16 weight without use_bf16 */
    float *x_scale;    /* [tokens, chunks] */
    uint16_t *y;
    int64_t rows_per_task, threads;
} dense_job;

enum {
    TASK_ROWS = 32,     /* rows of a task; up to MAX_UNITS times as many for a single token */
    MAX_UNITS = 4,
    BATCH_TOKENS = 64,  /* tokens per read of the weight */
    PREPARE_TOKENS = 8, /* tokens of a task of prepare_task */
};

/* Rounds to nearest without a call; exact for |x| < 2^22. */
INLINE int32_t nearest(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    union { float f; int32_t i; } u = {x + shift}, zero = {shift};
    return u.i - zero.i;
}

/* Quantizes a row of x to int16 with a scale per DENSE_CHUNK columns. */
AVX2 static void quantize_dense(const uint16_t *x, int64_t cols, int16_t *q, float *scale) {
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK) {
        const int64_t end = min_of(from + DENSE_CHUNK, cols);
        const float largest = max_magnitude(x + from, end - from);
        const float inverse = largest > 0 ? 32767 / largest : 0;
        *scale++ = largest / 32767;
        for (int64_t i = from; i < end; i++) q[i] = (int16_t)nearest(from_bf16(x[i]) * inverse);
    }
}

AVX2 static void prepare_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t cols = job->cols, chunks = ceil_div(cols, DENSE_CHUNK);
    for (int64_t t = task * PREPARE_TOKENS; t < (task + 1) * PREPARE_TOKENS && t < job->tokens; t++)
        if (job->row_scale) quantize_dense(job->x + t * cols, cols, (int16_t *)job->prepared + t * cols, job->x_scale + t * chunks);
        else for (int64_t i = 0; i < cols; i++) ((float *)job->prepared)[t * cols + i] = from_bf16(job->x[t * cols + i]);
}

INLINE __m256i int8_products(const int8_t *w, const int16_t *x) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
    return _mm256_madd_epi16(wide, _mm256_loadu_si256((const __m256i *)x));
}

INLINE float int8_row(const int8_t *w, const int16_t *x, const float *scale, int64_t cols) {
    __m256 total = _mm256_setzero_ps();
    float rest = 0;
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = min_of(from + DENSE_CHUNK, cols);
        __m256i a = _mm256_setzero_si256(), b = a;
        int64_t k = from;
        for (; k + 64 <= end; k += 64) {
            prefetch((const uint8_t *)w + k + PREFETCH_DISTANCE);
            a = _mm256_add_epi32(a, int8_products(w + k, x + k));
            b = _mm256_add_epi32(b, int8_products(w + k + 16, x + k + 16));
            a = _mm256_add_epi32(a, int8_products(w + k + 32, x + k + 32));
            b = _mm256_add_epi32(b, int8_products(w + k + 48, x + k + 48));
        }
        for (; k + 16 <= end; k += 16) a = _mm256_add_epi32(a, int8_products(w + k, x + k));
        total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(a, b)), _mm256_set1_ps(*scale), total);
        int32_t left = 0;
        for (; k < end; k++) left += w[k] * x[k];
        rest += (float)left * *scale;
    }
    return horizontal_sum(total) + rest;
}

/* 2 rows times 4 tokens, whose numbers and scales lie `cols` and `chunks` apart; widens each weight once. Gives the
 * bits of int8_row. cols % 16 == 0. */
AVX2 static void int8_tile(const int8_t *w, const int16_t *x, const float *scale, int64_t cols, int64_t chunks,
                           float out[2][4]) {
    __m256 total[2][4];
    for (int t = 0; t < 4; t++) total[0][t] = total[1][t] = _mm256_setzero_ps();
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = min_of(from + DENSE_CHUNK, cols);
        __m256i sum[2][4];
        for (int t = 0; t < 4; t++) sum[0][t] = sum[1][t] = _mm256_setzero_si256();
        for (int64_t k = from; k < end; k += 16) {
            const __m256i upper = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + k)));
            const __m256i lower = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + cols + k)));
            for (int t = 0; t < 4; t++) {
                const __m256i v = _mm256_loadu_si256((const __m256i *)(x + t * cols + k));
                sum[0][t] = _mm256_add_epi32(sum[0][t], _mm256_madd_epi16(upper, v));
                sum[1][t] = _mm256_add_epi32(sum[1][t], _mm256_madd_epi16(lower, v));
            }
        }
        for (int t = 0; t < 4; t++)
            for (int r = 0; r < 2; r++)
                total[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][t]), _mm256_set1_ps(scale[t * chunks]), total[r][t]);
    }
    for (int t = 0; t < 4; t++)
        for (int r = 0; r < 2; r++) out[r][t] = horizontal_sum(total[r][t]);
}

/* out[token] of a row, for `tokens`, a constant: 4, with cols % 16 == 0, or 1. Both give the same bits. */
INLINE void bf16_tile(int tokens, const uint16_t *w, const float *x, int64_t cols, float out[4]) {
    __m256 a[4], b[4];
    float rest = 0;
    for (int t = 0; t < tokens; t++) a[t] = b[t] = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 16 <= cols; k += 16) {
        prefetch((const uint8_t *)(w + k) + PREFETCH_DISTANCE);
        const __m256 first = eight_from_bf16(w + k), last = eight_from_bf16(w + k + 8);
        for (int t = 0; t < tokens; t++) {
            a[t] = _mm256_fmadd_ps(first, _mm256_loadu_ps(x + t * cols + k), a[t]);
            b[t] = _mm256_fmadd_ps(last, _mm256_loadu_ps(x + t * cols + k + 8), b[t]);
        }
    }
    for (; k < cols; k++) rest += from_bf16(w[k]) * x[k];
    for (int t = 0; t < tokens; t++) out[t] = horizontal_sum(_mm256_add_ps(a[t], b[t])) + (tokens == 1 ? rest : 0);
}

/* Computes y for `rows` rows from `row` and `tokens` tokens from t: 4 or 2 rows times 4 tokens, or 1 times 1. */
INLINE void int8_outputs(const dense_job *job, int64_t row, int64_t rows, int64_t t, int64_t tokens) {
    const int64_t cols = job->cols, chunks = ceil_div(cols, DENSE_CHUNK);
    const int8_t *w = (const int8_t *)job->weight + row * cols;
    const int16_t *x = (const int16_t *)job->prepared + t * cols;
    const float *x_scale = job->x_scale + t * chunks;
    float out[4][4];
    if (rows == 4) int8_tile_vnni(w, x, x_scale, cols, chunks, out);
    else if (rows == 2) int8_tile(w, x, x_scale, cols, chunks, out);
    else if (use_vnni && cols % 16 == 0) out[0][0] = int8_row_vnni(w, x, x_scale, cols);
    else out[0][0] = int8_row(w, x, x_scale, cols);
    for (int64_t i = 0; i < rows; i++) {
        const float scale = from_bf16(job->row_scale[row + i]);
        for (int64_t j = 0; j < tokens; j++) job->y[(t + j) * job->rows + row + i] = to_bf16(scale * out[i][j]);
    }
}

INLINE void bf16_outputs(const dense_job *job, int64_t row, int64_t t, int64_t tokens) {
    const uint16_t *w = (const uint16_t *)job->weight + row * job->cols;
    const float *x = (const float *)job->prepared + t * job->cols;
    float out[4];
    if (tokens == 4) bf16_tile(4, w, x, job->cols, out);
    else bf16_tile(1, w, x, job->cols, out);
    for (int64_t j = 0; j < tokens; j++) job->y[(t + j) * job->rows + row] = to_bf16(out[j]);
}

INLINE void outputs(const dense_job *job, int64_t row, int64_t rows, int64_t t, int64_t tokens) {
    if (job->row_scale) int8_outputs(job, row, rows, t, tokens);
    else bf16_outputs(job, row, t, tokens);
}

AVX2 static void dense_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t place = contiguous_per_thread(task, ceil_div(job->rows, job->rows_per_task), job->threads);
    const int64_t from = place * job->rows_per_task, end = min_of(from + job->rows_per_task, job->rows);
    if (!job->row_scale && use_bf16) {
        const uint16_t *weight = (const uint16_t *)job->weight + from * job->cols;
        dense_bf16(weight, end - from, job->cols, job->x, job->tokens, job->rows, job->y + from);
        return;
    }
    /* Tiles span 4 tokens, and with an int8 weight 2 or 4 rows; the rest goes one by one. */
    const int64_t tokens = job->cols % 16 ? 0 : job->tokens / 4 * 4, tile_rows = !job->row_scale ? 1 : use_vnni ? 4 : 2;
    const int64_t rows = from + (end - from) / tile_rows * tile_rows;
    for (int64_t t = 0; t < tokens; t += 4)
        for (int64_t row = from; row < rows; row += tile_rows) outputs(job, row, tile_rows, t, 4);
    for (int64_t row = from; row < end; row++)
        for (int64_t t = row < rows ? tokens : 0; t < job->tokens; t++) outputs(job, row, 1, t, 1);
}

AVX2 int edgemoe_dense_product(pool *p, const void *weight, const uint16_t *row_scale, int64_t rows, int64_t cols,
                               const uint16_t *x, int64_t tokens, int64_t x_cols, uint16_t *y, int64_t y_cols) {
    if (x_cols != cols || y_cols != rows) return WRONG_SHAPE;
    const int direct = !row_scale && use_bf16; /* computes from x itself */
    const int64_t chunks = ceil_div(cols, DENSE_CHUNK), most = direct ? tokens : min_of(tokens, BATCH_TOKENS);
    const int64_t copied = direct ? 0 : most;
    float *prepared = pool_acquire(p, (size_t)copied * 4 * (size_t)(cols + chunks)), *scale = prepared + copied * cols;
    if (!prepared) return OUT_OF_MEMORY;
    const int64_t units = pool_units_per_task(p, rows / TASK_ROWS, tokens == 1 ? MAX_UNITS : 1);
    for (int64_t now; tokens > 0; tokens -= now, x += now * cols, y += now * rows) {
        now = min_of(tokens, most);
        dense_job job = {weight, row_scale, rows, cols, now, x, prepared, scale, y, TASK_ROWS * units, pool_threads(p)};
        if (!direct) pool_run(p, prepare_task, &job, ceil_div(now, PREPARE_TOKENS));
        pool_run(p, dense_task, &job, ceil_div(rows, job.rows_per_task));
    }
    pool_release(p);
    return 0;
}

AVX2 void edgemoe_rms_norm(const uint16_t *x, const uint16_t *weight, float epsilon, int64_t rows, int64_t cols,
                           uint16_t *y) {
    for (; rows-- > 0; x += cols, y += cols) {
        float lanes[8] = {0};
        int64_t k = 0;
        for (; k + 8 <= cols; k += 8)
            for (int j = 0; j < 8; j++) lanes[j] += from_bf16(x[k + j]) * from_bf16(x[k + j]);
        for (; k < cols; k++) lanes[0] += from_bf16(x[k]) * from_bf16(x[k]);
        const float sum = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
        const float by = 1 / __builtin_sqrtf(sum / (float)cols + epsilon);
        for (k = 0; k < cols; k++) y[k] = to_bf16(from_bf16(weight[k]) * from_bf16(to_bf16(from_bf16(x[k]) * by)));
    }
}
#endif
