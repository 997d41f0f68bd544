/* Products with dense int8 or bf16 weights, and norms. */
#include "dense.h"
#include "../dot.h"
#include "../experts/vnni.h"
#include "../tiles/tiles.h"

#if COMPILED
typedef struct {
    const void *weight;
    const uint16_t *row_scale; /* bf16, of int8 rows; NULL: the weight is bf16 */
    int64_t rows, cols, tokens;
    const uint16_t *x; /* bf16 [tokens, cols] */
    void *prepared;    /* x as int16 with x_scale, for an int8 weight; as float for a bf16 weight without use_bf16 */
    float *x_scale;    /* [tokens, chunks] */
    uint16_t *y;
    int64_t rows_per_task, threads;
    enum path path;     /* of an int8 weight, one without tiles */
    dense_tiles tiles;  /* of x for a path with tiles; its product is NULL otherwise */
} dense_job;

enum {
    TASK_ROWS = 32,     /* rows of a task; up to MAX_UNITS times as many for a single token */
    MAX_UNITS = 4,
    BATCH_TOKENS = 64,  /* tokens per read of the weight */
    PREPARE_TOKENS = 8, /* tokens of a task of prepare_task */
};

/* Quantizes a row of x to int16 with a scale per DENSE_CHUNK columns. */
AVX2 static void quantize_dense(const uint16_t *x, int64_t cols, int16_t *q, float *scale) {
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK) {
        const int64_t end = min_of(from + DENSE_CHUNK, cols);
        const float largest = max_magnitude(x + from, end - from);
        const float inverse = largest > 0 ? 32767 / largest : 0;
        *scale++ = largest / 32767;
        const __m256 by = _mm256_set1_ps(inverse);
        int64_t i = from;
        for (; i + 16 <= end; i += 16) {
            const __m256i first = _mm256_cvtps_epi32(_mm256_mul_ps(eight_from_bf16(x + i), by));
            const __m256i last = _mm256_cvtps_epi32(_mm256_mul_ps(eight_from_bf16(x + i + 8), by));
            _mm256_storeu_si256((__m256i *)(q + i), _mm256_permute4x64_epi64(_mm256_packs_epi32(first, last), 0xD8));
        }
        for (; i < end; i++) q[i] = (int16_t)_mm_cvtss_si32(_mm_set_ss(from_bf16(x[i]) * inverse));
    }
}

AVX2 static void prepare_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t cols = job->cols, chunks = ceil_div(cols, DENSE_CHUNK);
    for (int64_t t = task * PREPARE_TOKENS; t < (task + 1) * PREPARE_TOKENS && t < job->tokens; t++) {
        int16_t *q = (int16_t *)job->prepared + t * cols;
        if (job->row_scale) quantize_dense(job->x + t * cols, cols, q, job->x_scale + t * chunks);
        else for (int64_t i = 0; i < cols; i++) ((float *)job->prepared)[t * cols + i] = from_bf16(job->x[t * cols + i]);
        if (job->tiles.product) dense_tiles_set(&job->tiles, t, q, job->x_scale + t * chunks);
    }
}

INLINE __m256i sixteen_from_int8(const int8_t *w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w)); }

INLINE __m256i load_words(const int16_t *x) { return _mm256_loadu_si256((const __m256i *)x); }

/* A row times a token. A chunk's sum is an exact integer, and chunks are added in their order: every path gives the
 * same bits. */
INLINE float int8_row(enum dot dot, const int8_t *w, const int16_t *x, const float *scale, int64_t cols) {
    float total = 0;
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = min_of(from + DENSE_CHUNK, cols);
        __m256i sum[4];
        for (int i = 0; i < 4; i++) sum[i] = _mm256_setzero_si256();
        int64_t k = from;
        for (; k + 64 <= end; k += 64) {
            prefetch((const uint8_t *)w + k + PREFETCH_DISTANCE);
            for (int i = 0; i < 4; i++) sum[i] = add_words(dot, sum[i], sixteen_from_int8(w + k + 16 * i), load_words(x + k + 16 * i));
        }
        for (; k + 16 <= end; k += 16) sum[0] = add_words(dot, sum[0], sixteen_from_int8(w + k), load_words(x + k));
        int32_t all = horizontal_sum_int(_mm256_add_epi32(_mm256_add_epi32(sum[0], sum[1]), _mm256_add_epi32(sum[2], sum[3])));
        for (; k < end; k++) all += w[k] * x[k];
        total = __builtin_fmaf((float)all, *scale, total);
    }
    return total;
}

/* 2 rows times 4 tokens, whose numbers and scales lie `cols` and `chunks` apart; widens each weight once. cols % 16 == 0. */
INLINE void int8_tile(enum dot dot, const int8_t *w, const int16_t *x, const float *scale, int64_t cols, int64_t chunks,
                      float out[4][4]) {
    __m128 total[2] = {_mm_setzero_ps(), _mm_setzero_ps()};
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = min_of(from + DENSE_CHUNK, cols);
        __m256i sum[2][4];
        for (int t = 0; t < 4; t++) sum[0][t] = sum[1][t] = _mm256_setzero_si256();
        for (int64_t k = from; k < end; k += 16) {
            const __m256i upper = sixteen_from_int8(w + k), lower = sixteen_from_int8(w + cols + k);
            for (int t = 0; t < 4; t++) {
                const __m256i v = load_words(x + t * cols + k);
                sum[0][t] = add_words(dot, sum[0][t], upper, v);
                sum[1][t] = add_words(dot, sum[1][t], lower, v);
            }
        }
        const __m128 by = _mm_setr_ps(scale[0], scale[chunks], scale[2 * chunks], scale[3 * chunks]);
        for (int r = 0; r < 2; r++) total[r] = _mm_fmadd_ps(_mm_cvtepi32_ps(horizontal_sums_int(sum[r])), by, total[r]);
    }
    for (int r = 0; r < 2; r++) _mm_storeu_ps(out[r], total[r]);
}

AVX2 static float int8_row_256(const int8_t *w, const int16_t *x, const float *scale, int64_t cols, enum dot dot) {
#define ROW(dot) return int8_row(dot, w, x, scale, cols)
    if (dot == DOT_PLAIN) ROW(DOT_PLAIN);
    BY_ONE_INSTRUCTION(dot, ROW);
#undef ROW
}

AVX2 static void int8_tile_256(const int8_t *w, const int16_t *x, const float *scale, int64_t cols, int64_t chunks,
                               float out[4][4], enum dot dot) {
#define TILE(dot) int8_tile(dot, w, x, scale, cols, chunks, out)
    if (dot == DOT_PLAIN) TILE(DOT_PLAIN);
    else BY_ONE_INSTRUCTION(dot, TILE);
#undef TILE
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
    for (; k < cols; k++) rest = __builtin_fmaf(from_bf16(w[k]), x[k], rest);
    for (int t = 0; t < tokens; t++) out[t] = horizontal_sum(_mm256_add_ps(a[t], b[t])) + (tokens == 1 ? rest : 0);
}

/* Computes y for `rows` rows from `row` and `tokens` tokens from t: 4 or 2 rows times 4 tokens, or 1 times 1. */
INLINE void int8_outputs(const dense_job *job, int64_t row, int64_t rows, int64_t t, int64_t tokens) {
    const int64_t cols = job->cols, chunks = ceil_div(cols, DENSE_CHUNK);
    const int8_t *w = (const int8_t *)job->weight + row * cols;
    const int16_t *x = (const int16_t *)job->prepared + t * cols;
    const float *x_scale = job->x_scale + t * chunks;
    const enum dot dot = dot_of(job->path);
    float out[4][4];
    if (COMPILED_AVX512 && rows == 4) int8_tile_vnni(w, x, x_scale, cols, chunks, out);
    else if (rows == 2) int8_tile_256(w, x, x_scale, cols, chunks, out, dot);
    else if (IS_AVX512(job->path) && cols % 16 == 0) out[0][0] = int8_row_vnni(w, x, x_scale, cols);
    else out[0][0] = int8_row_256(w, x, x_scale, cols, dot);
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

/* Rows [from, end) of y for all tokens. Small tiles span 4 tokens, and with an int8 weight 2 or 4 rows; the rest goes one
 * by one. */
AVX2 static void all_tokens(const dense_job *job, int64_t from, int64_t end) {
    const int64_t tokens = job->cols % 16 ? 0 : job->tokens / 4 * 4;
    const int64_t tile_rows = !job->row_scale ? 1 : IS_AVX512(job->path) ? 4 : 2;
    const int64_t rows = from + (end - from) / tile_rows * tile_rows;
    for (int64_t t = 0; t < tokens; t += 4)
        for (int64_t row = from; row < rows; row += tile_rows) outputs(job, row, tile_rows, t, 4);
    for (int64_t row = from; row < end; row++)
        for (int64_t t = row < rows ? tokens : 0; t < job->tokens; t++) outputs(job, row, 1, t, 1);
}

AVX2 static void dense_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t place = contiguous_per_thread(task, ceil_div(job->rows, job->rows_per_task), job->threads);
    const int64_t from = place * job->rows_per_task, end = min_of(from + job->rows_per_task, job->rows);
    if (COMPILED_AVX512 && !job->row_scale && use_bf16) {
        const uint16_t *weight = (const uint16_t *)job->weight + from * job->cols;
        dense_bf16(weight, end - from, job->cols, job->x, job->tokens, job->rows, job->y + from);
        return;
    }
    int64_t row = from;
    for (; job->tiles.product && row + DENSE_TILE_ROWS <= end; row += DENSE_TILE_ROWS)
        job->tiles.product(&job->tiles, (const int8_t *)job->weight + row * job->cols, job->row_scale + row, job->tokens,
                           job->y + row, job->rows);
    all_tokens(job, row, end);
}

AVX2 int edgemoe_dense_product(pool *p, const void *weight, const uint16_t *row_scale, int64_t rows, int64_t cols,
                               const uint16_t *x, int64_t tokens, int64_t x_cols, uint16_t *y, int64_t y_cols) {
    if (x_cols != cols || y_cols != rows) return WRONG_SHAPE;
    const int direct = !row_scale && use_bf16; /* computes from x itself */
    const int64_t chunks = ceil_div(cols, DENSE_CHUNK), most = direct ? tokens : min_of(tokens, BATCH_TOKENS);
    const int64_t copied = direct ? 0 : most;
    const enum path path = path_of(WORK_DENSE, tokens);
    dense_tiles tiles = {.product = row_scale ? dense_tiles_product(path, cols) : NULL};
    const size_t plain = ((size_t)copied * 4 * (size_t)(cols + chunks) + 63) & ~(size_t)63;
    float *prepared = pool_acquire(p, plain + (tiles.product ? dense_tiles_bytes(most, cols) : 0)), *scale = prepared + copied * cols;
    if (!prepared) return OUT_OF_MEMORY;
    if (tiles.product) dense_tiles_place(&tiles, (uint8_t *)prepared + plain, most, cols);
    const int64_t units = pool_units_per_task(p, rows / TASK_ROWS, tokens == 1 ? MAX_UNITS : 1);
    for (int64_t now; tokens > 0; tokens -= now, x += now * cols, y += now * rows) {
        now = min_of(tokens, most);
        dense_job job = {weight, row_scale, rows, cols, now, x, prepared, scale, y, TASK_ROWS * units, pool_threads(p),
                         without_tiles(path), tiles};
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
            for (int j = 0; j < 8; j++) lanes[j] = __builtin_fmaf(from_bf16(x[k + j]), from_bf16(x[k + j]), lanes[j]);
        for (; k < cols; k++) lanes[0] = __builtin_fmaf(from_bf16(x[k]), from_bf16(x[k]), lanes[0]);
        const float sum = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
        const float by = 1 / __builtin_sqrtf(sum / (float)cols + epsilon);
        for (k = 0; k < cols; k++) y[k] = to_bf16(from_bf16(weight[k]) * from_bf16(to_bf16(from_bf16(x[k]) * by)));
    }
}
#endif
