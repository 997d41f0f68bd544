/* Products with dense weights of 8 or 16 bits, and norms. */
#include "dense.h"
#include "experts/vnni.h"

#if defined(__x86_64__)
typedef struct {
    const void *weight;
    const uint16_t *row_scale; /* bf16, of int8 rows; NULL: the weight is bf16 */
    int64_t rows, cols, tokens;
    const uint16_t *from;
    void *x; /* the same as int16 of quantize_dense, or as float */
    float *x_scale;
    uint16_t *y;
    int64_t part, threads; /* rows of a task; that there are */
} dense_job;

/* Rows of a task, and how many times as many of a single token; tokens of a pass, and of a task before it. */
enum { DENSE_ROWS = 32, MOST_PARTS = 4, DENSE_TOKENS = 64, PREPARED = 8 };

/* Round to nearest without a call: exact for |x| < 2^22. */
INLINE int32_t nearest(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    union { float f; int32_t i; } u = {x + shift}, zero = {shift};
    return u.i - zero.i;
}

/* One row of x as 16-bit numbers with a scale per DENSE_CHUNK columns. */
AVX2 static void quantize_dense(const uint16_t *x, int64_t cols, int16_t *q, float *scale) {
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK) {
        const int64_t end = from + DENSE_CHUNK < cols ? from + DENSE_CHUNK : cols;
        const float largest = magnitude(x + from, end - from);
        const float inverse = largest > 0 ? 32767 / largest : 0;
        *scale++ = largest / 32767;
        for (int64_t i = from; i < end; i++) q[i] = (int16_t)nearest(from_bf16(x[i]) * inverse);
    }
}

AVX2 static void prepare_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t cols = job->cols, chunks = (cols + DENSE_CHUNK - 1) / DENSE_CHUNK;
    for (int64_t t = task * PREPARED; t < (task + 1) * PREPARED && t < job->tokens; t++)
        if (job->row_scale) quantize_dense(job->from + t * cols, cols, (int16_t *)job->x + t * cols, job->x_scale + t * chunks);
        else for (int64_t i = 0; i < cols; i++) ((float *)job->x)[t * cols + i] = from_bf16(job->from[t * cols + i]);
}

INLINE __m256i int8_products(const int8_t *w, const int16_t *x) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
    return _mm256_madd_epi16(wide, _mm256_loadu_si256((const __m256i *)x));
}

INLINE float int8_row(const int8_t *w, const int16_t *x, const float *scale, int64_t cols) {
    __m256 total = _mm256_setzero_ps();
    float rest = 0;
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = from + DENSE_CHUNK < cols ? from + DENSE_CHUNK : cols;
        __m256i a = _mm256_setzero_si256(), b = a;
        int64_t k = from;
        for (; k + 64 <= end; k += 64) {
            prefetch((const uint8_t *)w + k + AHEAD);
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
    return added_up(total) + rest;
}

INLINE float bf16_row(const uint16_t *w, const float *x, int64_t cols) {
    __m256 a = _mm256_setzero_ps(), b = a;
    int64_t k = 0;
    for (; k + 16 <= cols; k += 16) {
        prefetch((const uint8_t *)(w + k) + AHEAD);
        const __m256i w0 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k)));
        const __m256i w1 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k + 8)));
        a = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w0, 16)), _mm256_loadu_ps(x + k), a);
        b = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w1, 16)), _mm256_loadu_ps(x + k + 8), b);
    }
    float rest = 0;
    for (; k < cols; k++) rest += from_bf16(w[k]) * x[k];
    return added_up(_mm256_add_ps(a, b)) + rest;
}

/* 2 rows times 4 tokens, whose numbers and scales lie `cols` and `chunks` apart: what int8_row gives for each, bit for
 * bit, with the rows' numbers widened once. cols % 16 == 0. */
AVX2 static void int8_tile(const int8_t *w, const int16_t *x, const float *scale, int64_t cols, int64_t chunks,
                           float out[2][4]) {
    __m256 total[2][4];
    for (int t = 0; t < 4; t++) total[0][t] = total[1][t] = _mm256_setzero_ps();
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = from + DENSE_CHUNK < cols ? from + DENSE_CHUNK : cols;
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
        for (int r = 0; r < 2; r++) out[r][t] = added_up(total[r][t]);
}

/* A row times 4 tokens, bit for bit what bf16_row gives for each. cols % 16 == 0. */
AVX2 static void bf16_tile(const uint16_t *w, const float *x, int64_t cols, float out[4]) {
    __m256 a[4], b[4];
    for (int t = 0; t < 4; t++) a[t] = b[t] = _mm256_setzero_ps();
    for (int64_t k = 0; k < cols; k += 16) {
        prefetch((const uint8_t *)(w + k) + AHEAD);
        const __m256i w0 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k)));
        const __m256i w1 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k + 8)));
        const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(w0, 16));
        const __m256 last = _mm256_castsi256_ps(_mm256_slli_epi32(w1, 16));
        for (int t = 0; t < 4; t++) {
            a[t] = _mm256_fmadd_ps(first, _mm256_loadu_ps(x + t * cols + k), a[t]);
            b[t] = _mm256_fmadd_ps(last, _mm256_loadu_ps(x + t * cols + k + 8), b[t]);
        }
    }
    for (int t = 0; t < 4; t++) out[t] = added_up(_mm256_add_ps(a[t], b[t]));
}

INLINE void int8_products_of(const dense_job *job, int64_t row, int64_t rows, int64_t t, int64_t tokens) {
    const int64_t cols = job->cols, chunks = (cols + DENSE_CHUNK - 1) / DENSE_CHUNK;
    const int8_t *w = (const int8_t *)job->weight + row * cols;
    const int16_t *x = (const int16_t *)job->x + t * cols;
    float out[4][4];
    if (rows == 4) int8_tile_vnni(w, x, job->x_scale + t * chunks, cols, chunks, out);
    else if (rows == 2) int8_tile(w, x, job->x_scale + t * chunks, cols, chunks, out);
    else if (use_vnni && cols % 16 == 0) out[0][0] = int8_row_vnni(w, x, job->x_scale + t * chunks, cols);
    else out[0][0] = int8_row(w, x, job->x_scale + t * chunks, cols);
    for (int64_t i = 0; i < rows; i++) {
        const float scale = from_bf16(job->row_scale[row + i]);
        for (int64_t j = 0; j < tokens; j++) job->y[(t + j) * job->rows + row + i] = to_bf16(scale * out[i][j]);
    }
}

INLINE void bf16_products_of(const dense_job *job, int64_t row, int64_t t, int64_t tokens) {
    const uint16_t *w = (const uint16_t *)job->weight + row * job->cols;
    const float *x = (const float *)job->x + t * job->cols;
    float out[4];
    if (tokens == 4) bf16_tile(w, x, job->cols, out);
    else out[0] = bf16_row(w, x, job->cols);
    for (int64_t j = 0; j < tokens; j++) job->y[(t + j) * job->rows + row] = to_bf16(out[j]);
}

AVX2 static void dense_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t place = in_runs(task, (job->rows + job->part - 1) / job->part, job->threads);
    const int64_t from = place * job->part, end = from + job->part < job->rows ? from + job->part : job->rows;
    /* What goes four tokens, and of int8 two or four rows, at a time. */
    const int64_t tokens = job->cols % 16 ? 0 : job->tokens / 4 * 4, together = !job->row_scale ? 1 : use_vnni ? 4 : 2;
    const int64_t rows = from + (end - from) / together * together;
    for (int64_t t = 0; t < tokens; t += 4)
        for (int64_t row = from; row < rows; row += together)
            if (job->row_scale) int8_products_of(job, row, together, t, 4);
            else bf16_products_of(job, row, t, 4);
    for (int64_t row = from; row < end; row++)
        for (int64_t t = row < rows ? tokens : 0; t < job->tokens; t++)
            if (job->row_scale) int8_products_of(job, row, 1, t, 1);
            else bf16_products_of(job, row, t, 1);
}

AVX2 int edgemoe_dense_product(pool *p, const void *weight, const uint16_t *row_scale, int64_t rows, int64_t cols,
                               const uint16_t *x, int64_t tokens, uint16_t *y) {
    const int64_t chunks = (cols + DENSE_CHUNK - 1) / DENSE_CHUNK, most = tokens < DENSE_TOKENS ? tokens : DENSE_TOKENS;
    float *scale = pool_take(p, (size_t)most * 4 * (size_t)(chunks + cols));
    if (!scale) return -1;
    void *q = scale + most * chunks;
    const int64_t part = DENSE_ROWS * pool_together(p, rows / DENSE_ROWS, tokens == 1 ? MOST_PARTS : 1);
    for (int64_t now; tokens > 0; tokens -= now, x += now * cols, y += now * rows) {
        now = tokens < most ? tokens : most;
        dense_job job = {weight, row_scale, rows, cols, now, x, q, scale, y, part, pool_threads(p)};
        if (now > PREPARED) pool_run(p, prepare_task, &job, (now + PREPARED - 1) / PREPARED);
        else prepare_task(&job, 0);
        pool_run(p, dense_task, &job, (rows + part - 1) / part);
    }
    pool_give_back(p);
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
