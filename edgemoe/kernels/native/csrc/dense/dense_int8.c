/* Products with dense int8 weights. Activations are 8-bit numbers with a scale per DENSE_CHUNK columns (docs/decisions/0044).
 * A chunk's sum is an exact integer, and chunks are added in their order: every path gives the same bits.
 *
 * A single token waits for memory: it is multiplied with the weights as they lie, one row after another. For more tokens the
 * bytes of 32 rows are laid out once as the planes of experts are, in fours of columns, so that a vector's lane is a row. */
#include "dense_int8.h"

#include "../tiles/tiles.h"
#include "../vectors/dot.h"
#include "dense_vnni.h"
#include "strip.h"

#if COMPILED
typedef struct {
    const int8_t *weight;
    const uint16_t *row_scale; /* bf16 */
    int64_t rows, cols, chunks;
    const uint16_t *x; /* bf16 [tokens, cols] */
    dense_rows q;      /* x in 8 bits */
    uint16_t *y;
    int64_t rows_per_task, threads;
    enum path path;
} int8_job;

enum {
    TASK_ROWS = 32,     /* rows of a task, and of a layout; up to MAX_UNITS times as many for a single token */
    MAX_UNITS = 4,
    BATCH_TOKENS = 256, /* tokens per read of the weight */
    PREPARE_TOKENS = 8, /* tokens of a task of prepare_task */
    SUMMED = 256,       /* chunks of a row whose sums exist at once. Rows are read whole: a jump to the next row ends the hardware's prefetch */
    TILE_TOKENS = 4,    /* tokens whose sums with 16 rows fit into registers of 256 bits */
};

/* The least magnitude whose inverse is a number; a chunk below counts as zeros. */
#define LEAST 1e-36f

/* Quantizes a row of x. */
AVX2 static void quantize(const uint16_t *x, int64_t cols, const dense_rows *to, int64_t t) {
    for (int64_t c = 0; c * DENSE_CHUNK < cols; c++, x += DENSE_CHUNK) {
        const int64_t n = min_of(cols - c * DENSE_CHUNK, DENSE_CHUNK), at = c * to->tokens + t;
        int8_t *q = to->q + at * DENSE_CHUNK;
        const float largest = max_magnitude(x, n), inverse = largest >= LEAST ? 127 / largest : 0;
        const __m256 by = _mm256_set1_ps(inverse);
        __m256i sum = _mm256_setzero_si256();
        int32_t rest = 0;
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) {
            const __m256i first = _mm256_cvtps_epi32(_mm256_mul_ps(eight_from_bf16(x + i), by));
            const __m256i last = _mm256_cvtps_epi32(_mm256_mul_ps(eight_from_bf16(x + i + 8), by));
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(first, last));
            const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, last), 0xD8);
            const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0xD8);
            _mm_storeu_si128((__m128i *)(q + i), _mm256_castsi256_si128(bytes));
        }
        for (; i < n; i++) {
            const int32_t number = _mm_cvtss_si32(_mm_set_ss(from_bf16(x[i]) * inverse));
            q[i] = (int8_t)number;
            rest += q[i];
        }
        memset(q + n, 0, (size_t)(DENSE_CHUNK - n));
        to->scale[at] = largest / 127;
        /* Without a carry out of 32 bits where a NaN gave large numbers. */
        to->offset[at] = (int32_t)(128u * ((uint32_t)horizontal_sum_int(sum) + (uint32_t)rest));
    }
}

AVX2 static void prepare_task(void *argument, int64_t task) {
    const int8_job *job = argument;
    const int64_t end = min_of((task + 1) * PREPARE_TOKENS, job->q.tokens);
    for (int64_t t = task * PREPARE_TOKENS; t < end; t++) quantize(job->x + t * job->cols, job->cols, &job->q, t);
}

/* A chunk's bytes of a row; of a shorter last one in `copy`, followed by zeros. */
INLINE const int8_t *chunk_of_row(const int8_t *w, int64_t columns, int8_t *copy) {
    if (columns >= DENSE_CHUNK) return w;
    memset(copy, 0, DENSE_CHUNK);
    memcpy(copy, w, (size_t)columns);
    return copy;
}

INLINE __m256i load_weights(enum dot dot, const int8_t *w) {
    return weights_for(dot, _mm256_loadu_si256((const __m256i *)w));
}

/* Sums of `chunks` chunks of a row with one token, up to a multiple of four of them; `columns` are left of the row. */
INLINE void sums_of_row(enum dot dot, const int8_t *w, int64_t columns, const int8_t *x, const int32_t *offset, int64_t chunks, float *to) {
    for (int64_t c = 0; c < chunks; c += 4) {
        __m256i sum[4];
        for (int64_t i = 0; i < 4; i++) {
            const int64_t k = (c + i) * DENSE_CHUNK;
            int8_t copy[DENSE_CHUNK];
            sum[i] = _mm256_setzero_si256();
            if (k >= columns) continue;
            const int8_t *at = chunk_of_row(w + k, columns - k, copy);
            for (int64_t half = 0; half < DENSE_CHUNK; half += 32)
                sum[i] = add_weights(dot, sum[i], load_weights(dot, at + half), _mm256_loadu_si256((const __m256i *)(x + k + half)));
        }
        const __m128 sums = _mm_cvtepi32_ps(horizontal_sums_int(sum));
        _mm_storeu_ps(to + c, takes_unsigned(dot) ? _mm_sub_ps(sums, _mm_cvtepi32_ps(_mm_loadu_si128((const __m128i *)(offset + c)))) : sums);
    }
}

AVX2 static void sums_of_row_256(enum dot dot, const int8_t *w, int64_t columns, const int8_t *x, const int32_t *offset, int64_t chunks, float *to) {
#define SUMS(dot) sums_of_row(dot, w, columns, x, offset, chunks, to)
    if (dot == DOT_PLAIN) SUMS(DOT_PLAIN);
    else BY_ONE_INSTRUCTION(dot, SUMS);
#undef SUMS
}

/* Four rows' products with one token; `at` has where they start. Rows are read one after another, as hardware prefetches them;
 * the sums of their chunks, which are exact, are then added chunk by chunk. */
AVX2 static void four_rows(const int8_job *job, const int8_t *const at[4], float out[4]) {
    const dense_rows *x = &job->q;
    float sums[4][SUMMED];
    __m128 total = _mm_setzero_ps();
    for (int64_t first = 0; first < job->chunks; first += SUMMED) {
        const int64_t some = min_of(job->chunks - first, SUMMED), k = first * DENSE_CHUNK;
        for (int r = 0; r < 4; r++) {
            if (IS_AVX512(job->path) && COMPILED_AVX512) sums_of_row_vnni(at[r] + k, job->cols - k, x->q + k, x->offset + first, some, sums[r]);
            else sums_of_row_256(dot_of(job->path), at[r] + k, job->cols - k, x->q + k, x->offset + first, some, sums[r]);
        }
        for (int64_t c = 0; c < some; c += 4) {
            __m128 v[4];
            for (int r = 0; r < 4; r++) v[r] = _mm_loadu_ps(sums[r] + c);
            _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
            for (int64_t i = 0; i < min_of(some - c, 4); i++) {
                const float scale = x->scale[first + c + i];
                total = _mm_fmadd_ps(v[i], _mm_setr_ps(scale, scale, scale, scale), total);
            }
        }
    }
    _mm_storeu_ps(out, total);
}

/* Rows [from, end) of y for one token. Beyond the end the last row is multiplied again. */
AVX2 static void one_token(const int8_job *job, int64_t from, int64_t end) {
    for (int64_t row = from; row < end; row += 4) {
        const int8_t *at[4];
        float out[4];
        for (int64_t r = 0; r < 4; r++) at[r] = job->weight + min_of(row + r, end - 1) * job->cols;
        four_rows(job, at, out);
        for (int64_t r = 0; r < min_of(end - row, 4); r++) job->y[row + r] = to_bf16(from_bf16(job->row_scale[row + r]) * out[r]);
    }
}

/* Lays 4 rows times 16 columns out: of each 4 columns the rows side by side, 4 BLOCK_ROWS bytes apart. */
INLINE void lay_out_four(const int8_t *const at[4], uint8_t *tile) {
    __m128 rows[4];
    for (int r = 0; r < 4; r++) rows[r] = _mm_loadu_ps((const float *)(const void *)at[r]);
    _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
    for (int i = 0; i < 4; i++) _mm_storeu_ps((float *)(void *)(tile + i * 4 * BLOCK_ROWS), rows[i]);
}

/* Lays a chunk of `columns` columns of 32 rows out; beyond `rows` the last one is repeated. */
AVX2 static void lay_out(const int8_t *w, int64_t cols, int64_t rows, int64_t columns, int for_unsigned, uint8_t *tile) {
    for (int64_t row = 0; row < BLOCK_ROWS; row += 4) {
        int8_t copies[4][DENSE_CHUNK];
        const int8_t *at[4];
        for (int64_t r = 0; r < 4; r++) at[r] = chunk_of_row(w + min_of(row + r, rows - 1) * cols, columns, copies[r]);
        for (int64_t k = 0; k < DENSE_CHUNK; k += 16) {
            const int8_t *of_16[4] = {at[0] + k, at[1] + k, at[2] + k, at[3] + k};
            lay_out_four(of_16, tile + k * BLOCK_ROWS + 4 * row);
        }
    }
    for (int64_t i = 0; for_unsigned && i < DENSE_CHUNK * BLOCK_ROWS; i++) tile[i] ^= 0x80;
}

/* Adds a chunk's products of 16 rows and `tokens` tokens, a constant up to TILE_TOKENS. */
INLINE void sixteen_rows(enum dot dot, const uint8_t *tile, const int8_t *x, const float *scale, const int32_t *offset, int tokens,
                         float *total) {
    __m256i sum[2][TILE_TOKENS];
    for (int t = 0; t < tokens; t++) sum[0][t] = sum[1][t] = _mm256_set1_epi32(takes_unsigned(dot) ? -offset[t] : 0);
    for (int i = 0; i < DENSE_CHUNK / 4; i++, tile += 4 * BLOCK_ROWS, x += 4) {
        const __m256i upper = load_bytes(tile), lower = load_bytes(tile + 32);
        for (int t = 0; t < tokens; t++) {
            const __m256i v = broadcast_four(x + t * DENSE_CHUNK);
            sum[0][t] = add_weights(dot, sum[0][t], upper, v);
            sum[1][t] = add_weights(dot, sum[1][t], lower, v);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < 2; r++) {
            float *into = total + t * BLOCK_ROWS + 8 * r;
            const __m256 numbers = _mm256_cvtepi32_ps(sum[r][t]);
            _mm256_storeu_ps(into, _mm256_fmadd_ps(numbers, _mm256_set1_ps(scale[t]), _mm256_loadu_ps(into)));
        }
}

/* Adds a strip's products to total [tokens, BLOCK_ROWS]. */
INLINE void strip_256(enum dot dot, const dense_strip *s, int64_t tokens, float *total) {
    int64_t now;
    for (int64_t t = 0; t < tokens; t += now) {
        const int64_t left = tokens - t;
        now = left / ceil_div(left, TILE_TOKENS);
        for (int64_t c = 0; c < s->chunks; c++)
            for (int64_t r = 0; r < BLOCK_ROWS; r += 16) {
                const int64_t at = c * s->x.tokens + t;
#define ROWS(n) \
    sixteen_rows(dot, s->codes + c * DENSE_CHUNK * BLOCK_ROWS + 4 * r, s->x.q + at * DENSE_CHUNK, s->x.scale + at, \
                 s->x.offset + at, n, total + t * BLOCK_ROWS + r)
                /* One loop for each count, which has its sums in registers. */
                switch (now) {
                case 1: ROWS(1); break;
                case 2: ROWS(2); break;
                case 3: ROWS(3); break;
                default: ROWS(4);
                }
#undef ROWS
            }
    }
}

AVX2 static void dense_strip_256(const dense_strip *s, int64_t tokens, float *total, enum dot dot) {
#define STRIP(dot) strip_256(dot, s, tokens, total)
    if (dot == DOT_PLAIN) STRIP(DOT_PLAIN);
    else BY_ONE_INSTRUCTION(dot, STRIP);
#undef STRIP
}

/* Up to 32 rows of y for all tokens. */
AVX2 static void several_tokens(const int8_job *job, int64_t row, int64_t rows) {
    _Alignas(64) uint8_t codes[DENSE_STRIP * DENSE_CHUNK * BLOCK_ROWS];
    _Alignas(64) float total[BATCH_TOKENS * BLOCK_ROWS];
    const int64_t tokens = job->q.tokens;
    const enum dot dot = dot_of(job->path);
    memset(total, 0, sizeof *total * (size_t)(tokens * BLOCK_ROWS));
    for (int64_t first = 0; first < job->chunks; first += DENSE_STRIP) {
        const int64_t at = first * tokens;
        const dense_strip s = {codes, min_of(job->chunks - first, DENSE_STRIP),
                               {job->q.q + at * DENSE_CHUNK, job->q.scale + at, job->q.offset + at, tokens}};
        for (int64_t c = 0; c < s.chunks; c++) {
            const int64_t from = (first + c) * DENSE_CHUNK;
            const int8_t *w = job->weight + row * job->cols + from;
            uint8_t *tile = codes + c * DENSE_CHUNK * BLOCK_ROWS;
            if (IS_AVX512(job->path) && COMPILED_AVX512) dense_lay_out_vnni(w, job->cols, rows, job->cols - from, tile);
            else lay_out(w, job->cols, rows, job->cols - from, takes_unsigned(dot), tile);
        }
        if (has_tiles(job->path)) dense_strip_tiles(job->path, &s, tokens, total);
        else if (IS_AVX512(job->path) && COMPILED_AVX512) dense_strip_vnni(&s, tokens, total);
        else dense_strip_256(&s, tokens, total, dot);
    }
    float scale[BLOCK_ROWS];
    for (int64_t r = 0; r < rows; r++) scale[r] = from_bf16(job->row_scale[row + r]);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) job->y[t * job->rows + row + r] = to_bf16(scale[r] * total[t * BLOCK_ROWS + r]);
}

AVX2 static void int8_task(void *argument, int64_t task) {
    const int8_job *job = argument;
    const int64_t place = contiguous_per_thread(task, ceil_div(job->rows, job->rows_per_task), job->threads);
    const int64_t from = place * job->rows_per_task, end = min_of(from + job->rows_per_task, job->rows);
    if (job->q.tokens == 1) one_token(job, from, end);
    else
        for (int64_t row = from; row < end; row += BLOCK_ROWS) several_tokens(job, row, min_of(end - row, BLOCK_ROWS));
}

int dense_int8(pool *p, const int8_t *weight, const uint16_t *row_scale, int64_t rows, int64_t cols, const uint16_t *x,
               int64_t tokens, uint16_t *y) {
    const int64_t chunks = ceil_div(cols, DENSE_CHUNK), most = min_of(tokens, BATCH_TOKENS);
    const int64_t units = pool_units_per_task(p, rows / TASK_ROWS, tokens == 1 ? MAX_UNITS : 1);
    const enum path path = path_of(WORK_DENSE, tokens);
    float *scratch = pool_acquire(p, (size_t)(most * chunks) * (2 * sizeof(float) + DENSE_CHUNK));
    if (!scratch) return OUT_OF_MEMORY;
    int32_t *offset = (int32_t *)(scratch + most * chunks);
    for (int64_t now; tokens > 0; tokens -= now, x += now * cols, y += now * rows) {
        now = min_of(tokens, most);
        int8_job job = {weight, row_scale, rows, cols, chunks, x, {(int8_t *)(offset + most * chunks), scratch, offset, now}, y,
                        TASK_ROWS * units, pool_threads(p), now == 1 ? without_tiles(path) : path};
        pool_run(p, prepare_task, &job, ceil_div(now, PREPARE_TOKENS));
        pool_run(p, int8_task, &job, ceil_div(rows, job.rows_per_task));
    }
    pool_release(p);
    return 0;
}
#endif
