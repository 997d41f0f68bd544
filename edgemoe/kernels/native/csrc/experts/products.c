/* Quantization of activations, and products of one matrix of several experts with them. */
#include "products.h"

#include "../vectors/dot.h"
#include "../tiles/tiles.h"
#include "gemm.h"
#include "gemv.h"
#include "vnni.h"

#if COMPILED
enum { QUANTIZE_ROWS = 8 }; /* of a task of quantize_task */

/* 8 bf16 numbers times `by`, rounded to the nearest integers. */
INLINE __m256i eight_scaled(const uint16_t *x, __m256 by) { return _mm256_cvtps_epi32(_mm256_mul_ps(eight_from_bf16(x), by)); }

INLINE void quantize_chunk(const uint16_t *x, int64_t chunk, enum format format, int8_t *q, float *scale, float *sum) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
                                           0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    const float largest = max_magnitude(x, chunk), most = format == A8 ? A8_MAX : A14_MAX;
    const __m256 by = _mm256_set1_ps(by_largest(most, largest)); /* 0 for NaN, where `scale` carries the NaN */
    __m256i total = _mm256_setzero_si256();
    for (int64_t i = 0; i < chunk; i += 16) {
        const __m256i first = eight_scaled(x + i, by), last = eight_scaled(x + i + 8, by);
        total = _mm256_add_epi32(total, _mm256_add_epi32(first, last));
        __m256i v = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, last), 0xD8);
        v = _mm256_shuffle_epi8(v, order);
        if (format == A8) {
            v = _mm256_permute4x64_epi64(_mm256_packs_epi16(v, v), 0xD8);
            _mm_storeu_si128((__m128i *)(q + i), _mm256_castsi256_si128(v));
            continue;
        }
        const __m256i h = _mm256_srai_epi16(_mm256_add_epi16(v, _mm256_set1_epi16(64)), 7);
        const __m256i l = _mm256_sub_epi16(v, _mm256_slli_epi16(h, 7)), both = _mm256_packs_epi16(h, l);
        if (format == A14_HALVES) {
            const __m256i halves = _mm256_permute4x64_epi64(both, 0xD8);
            _mm_storeu_si128((__m128i *)(q + i), _mm256_castsi256_si128(halves));
            _mm_storeu_si128((__m128i *)(q + chunk + i), _mm256_extracti128_si256(halves, 1));
            continue;
        }
        if (format == A14_SPLIT) v = _mm256_shuffle_epi32(both, 0xD8);
        _mm256_storeu_si256((__m256i *)(q + 2 * i), v);
    }
    *scale = largest / most;
    *sum = (float)horizontal_sum_int(total) * *scale;
}

/* Index of an expert's first row of x. */
INLINE int64_t first_row(const product *job, const expert *e) { return job->rows_as_y ? e->y : e->x; }

INLINE int uses_gemv(const product *job, const expert *e) { return e->tokens == 1 && job->m->rows % BLOCK_ROWS == 0; }

static inline int64_t chunk_of(const matrix *m) { return min_of(m->group, CHUNK); }

/* The path of an expert's rows; one with tiles multiplies chunks of CHUNK columns only. */
INLINE enum path path_of_expert(const product *job, const expert *e) {
    const enum path path = path_of(level_of(job->m, e) == 8 ? WORK_EXPERTS_8 : WORK_EXPERTS, e->tokens);
    return uses_gemv(job, e) || job->chunk != CHUNK ? without_tiles(path) : path;
}

INLINE enum format format_of(const product *job, const expert *e) {
    if (level_of(job->m, e) < 8) return A8;
    return uses_gemv(job, e) ? A14_SPLIT : has_tiles(path_of_expert(job, e)) ? A14_HALVES : A14;
}

size_t product_scratch_bytes(const product *job, int64_t y_rows) {
    const matrix *m = job->m;
    const size_t of_factors = (size_t)(y_rows * job->ranks) * sizeof(float) + (size_t)job->compensated * sizeof(expert *);
    return (size_t)(job->rows * (3 * m->cols + 16 * (m->cols / chunk_of(m)) + 1)) + of_factors + 64;
}

INLINE const factors *factors_of(const product *job, const expert *e) { return e->compensator->of + job->projection; }

int product_factors_fit(product *job) {
    job->compensated = job->ranks = 0;
    for (int64_t i = 0; i < job->count; i++) {
        if (!job->experts[i].compensator) continue;
        const factors *f = job->experts[i].compensator->of + job->projection;
        int64_t rows = 0, ranks = 0;
        for (int64_t p = 0; p < job->projections; p++, f++) {
            const int present = f->rows > 0 && f->cols > 0 && f->v.codes && f->v.scales && f->u.codes && f->u.scales;
            if (f->rank < 0 || f->rows < 0 || f->cols > job->m->cols || (f->rank && !present)) return 0;
            rows += f->rows, ranks += f->rank;
        }
        if (rows > job->m->rows) return 0;
        job->compensated++;
        if (ranks > job->ranks) job->ranks = ranks;
    }
    return 1;
}

/* Lays out the scratch of factors, and finds the experts that have any. Returns its end. */
static uint8_t *prepare_factors(product *job, int64_t y_rows, uint8_t *at) {
    job->with_factors = (const expert **)at;
    job->t = (float *)(job->with_factors + job->compensated);
    for (int64_t i = 0, n = 0; i < job->count; i++)
        if (job->experts[i].compensator) job->with_factors[n++] = job->experts + i;
    return (uint8_t *)(job->t + y_rows * job->ranks);
}

AVX2 uint8_t *product_prepare(product *job, int64_t y_rows, uint8_t *at) {
    at = prepare_factors(job, y_rows, at);
    job->chunk = chunk_of(job->m);
    const int64_t numbers = job->rows * job->m->cols, chunks = numbers / job->chunk;
    float *of_chunks = (float *)at;
    int8_t *q = (int8_t *)(of_chunks + 4 * chunks);
    job->a14 = (activations){q, of_chunks, of_chunks + chunks};
    job->a8 = (activations){q + 2 * numbers, of_chunks + 2 * chunks, of_chunks + 3 * chunks};
    job->formats = (uint8_t *)q + 3 * numbers;
    memset(job->formats, 0, (size_t)job->rows);
    for (int64_t i = 0; i < job->count; i++) {
        const expert *e = job->experts + i;
        const enum format format = format_of(job, e);
        for (int64_t t = 0; t < e->tokens; t++) job->formats[first_row(job, e) + t] |= format;
    }
    return (uint8_t *)(((uintptr_t)job->formats + (uintptr_t)job->rows + 63) & ~(uintptr_t)63);
}

/* The layout of edgemoe_quantize_rows, of so many chunks in all rows. */
INLINE activations quantized_rows(int64_t chunks, uint8_t *at) {
    float *of_chunks = (float *)at;
    return (activations){(int8_t *)(of_chunks + 2 * chunks), of_chunks, of_chunks + chunks};
}

AVX2 int product_take_rows(product *job, const uint16_t *x, int64_t x_rows, const int64_t *row_of, int64_t count, uint8_t *quantized) {
    const int64_t chunks = job->m->cols / chunk_of(job->m);
    job->x = x, job->row_of = row_of, job->rows = row_of ? count : x_rows;
    if (quantized) job->quantized = quantized_rows(x_rows * chunks, quantized);
    for (int64_t i = 0; row_of && i < count; i++)
        if (row_of[i] < 0 || row_of[i] >= x_rows) return 0;
    return 1;
}

INLINE int64_t row_of_x(const product *job, int64_t row) { return job->row_of ? job->row_of[row] : row; }

/* Quantizes a chunk in A8. */
INLINE void quantize_a8(int wide, const uint16_t *x, int64_t chunk, int8_t *q, float *scale, float *sum) {
    if (COMPILED_AVX512 && wide) quantize_a8_avx512(x, q, scale, sum);
    else quantize_chunk(x, chunk, A8, q, scale, sum);
}

/* Whether rows are quantized with AVX-512. */
INLINE int quantizes_wide(int64_t chunk, int64_t rows) {
    const enum path path = path_of(WORK_EXPERTS, rows);
    return chunk == CHUNK && (path == PATH_AVX512_VNNI || path == PATH_AMX);
}

AVX2 void product_quantize(const product *job, int64_t row) {
    const int64_t cols = job->m->cols, chunk = job->chunk, from = row_of_x(job, row);
    const int wide = quantizes_wide(chunk, job->rows);
    for (int64_t c = 0; c < cols / chunk; c++) {
        const int64_t to = c * job->rows + row, at = from * (cols / chunk) + c;
        const uint16_t *x = job->x + at * chunk;
        const activations a = job->a14, b = job->a8;
        int8_t *q = a.q + 2 * to * chunk;
        if (job->formats[row] & A14_SPLIT) quantize_chunk(x, chunk, A14_SPLIT, q, a.scale + to, a.sum + to);
        if (job->formats[row] & A14) quantize_chunk(x, chunk, A14, q, a.scale + to, a.sum + to);
        if (job->formats[row] & A14_HALVES) quantize_chunk(x, chunk, A14_HALVES, q, a.scale + to, a.sum + to);
        if (!(job->formats[row] & A8)) continue;
        if (!job->quantized.q) {
            quantize_a8(wide, x, chunk, b.q + to * chunk, b.scale + to, b.sum + to);
            continue;
        }
        const activations once = job->quantized;
        if (chunk == CHUNK) memcpy(b.q + to * CHUNK, once.q + at * CHUNK, CHUNK); /* of a constant size it is one load */
        else memcpy(b.q + to * chunk, once.q + at * chunk, (size_t)chunk);
        b.scale[to] = once.scale[at], b.sum[to] = once.sum[at];
    }
}

typedef struct {
    const uint16_t *x;
    int64_t rows, cols, chunk;
    activations to;
} rows_job;

AVX2 static void rows_task(void *argument, int64_t task) {
    const rows_job *job = argument;
    const int64_t end = min_of((task + 1) * QUANTIZE_ROWS, job->rows), chunks = job->cols / job->chunk;
    const int wide = quantizes_wide(job->chunk, job->rows);
    for (int64_t i = task * QUANTIZE_ROWS * chunks; i < end * chunks; i++)
        quantize_a8(wide, job->x + i * job->chunk, job->chunk, job->to.q + i * job->chunk, job->to.scale + i, job->to.sum + i);
}

/* Quantizes rows of x [rows, m->cols], bf16, in A8: to [rows, chunks] scales, as many sums, both float32, and [rows, cols]
 * numbers. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
AVX2 int edgemoe_quantize_rows(pool *p, const matrix *m, const uint16_t *x, int64_t rows, int64_t x_cols, uint8_t *to) {
    if (!matrix_fits(m) || m->cols != x_cols || rows < 1) return WRONG_SHAPE;
    const int64_t chunk = chunk_of(m);
    rows_job job = {x, rows, x_cols, chunk, quantized_rows(rows * (x_cols / chunk), to)};
    if (!pool_acquire(p, 64)) return OUT_OF_MEMORY;
    pool_run(p, rows_task, &job, ceil_div(rows, QUANTIZE_ROWS));
    pool_release(p);
    return 0;
}

AVX2 static void quantize_task(void *argument, int64_t task) {
    const product *job = argument;
    const int64_t end = min_of((task + 1) * QUANTIZE_ROWS, job->rows);
    for (int64_t row = task * QUANTIZE_ROWS; row < end; row++) product_quantize(job, row);
}

/* Multiplies an expert's compensated rows of x with FACTOR_RANKS of a projection's ranks; t: the first rank's number of the first row. */
INLINE void project_few(const product *job, const expert *e, const factors *f, int64_t rank, float *t) {
    int64_t now;
    factors_prefetch(f, rank);
    for (int64_t n = 0; n < e->compensated; n += now) {
        now = min_of(e->compensated - n, FACTOR_TOKENS);
        const uint16_t *x[FACTOR_TOKENS];
        for (int64_t i = 0; i < now; i++) x[i] = job->x + row_of_x(job, first_row(job, e) + n + i) * job->m->cols;
        factors_project(f, rank, x, now, t + n * job->ranks, job->ranks);
    }
}

/* Calls of project_few for an expert. */
INLINE int64_t projects_of(const product *job, const expert *e) {
    int64_t calls = 0;
    for (int64_t p = 0; p < job->projections; p++) calls += ceil_div(factors_of(job, e)[p].rank, FACTOR_RANKS);
    return calls;
}

INLINE void project_part(const product *job, const expert *e, int64_t call) {
    const factors *f = factors_of(job, e);
    float *t = job->t + e->y * job->ranks;
    for (int64_t calls; call >= (calls = ceil_div(f->rank, FACTOR_RANKS)); f++) {
        call -= calls;
        t += f->rank;
    }
    project_few(job, e, f, call * FACTOR_RANKS, t + call * FACTOR_RANKS);
}

AVX2 void product_project(const product *job, const expert *e) {
    if (!e->compensator) return;
    for (int64_t call = projects_of(job, e) - 1; call >= 0; call--) project_part(job, e, call);
}

/* Quantizes rows, or multiplies one expert's with a few ranks. */
AVX2 static void start_task(void *argument, int64_t task) {
    const product *job = argument;
    const int64_t quantizing = ceil_div(job->rows, QUANTIZE_ROWS);
    if (task < quantizing) {
        quantize_task(argument, task);
        return;
    }
    task -= quantizing;
    for (int64_t i = 0, calls; i < job->compensated; i++, task -= calls)
        if (task < (calls = projects_of(job, job->with_factors[i]))) {
            project_part(job, job->with_factors[i], task);
            return;
        }
}

AVX2 void product_start(pool *p, product *job) {
    int64_t tasks = ceil_div(job->rows, QUANTIZE_ROWS);
    for (int64_t i = 0; i < job->compensated; i++) tasks += projects_of(job, job->with_factors[i]);
    pool_run(p, start_task, job, tasks);
}

/* Adds U t to the matrix's rows [first, end) of an expert's compensated rows of y. */
AVX2 static void add_factors(const product *job, const expert *e, int64_t first, int64_t end) {
    const factors *f = factors_of(job, e);
    uint16_t *y = job->y + e->y * job->m->rows;
    const float *t = job->t + e->y * job->ranks;
    for (int64_t p = 0; p < job->projections; p++, first -= f->rows, end -= f->rows, y += f->rows, t += f->rank, f++) {
        const int64_t from = first > 0 ? first : 0, to = min_of(end, f->rows);
        int64_t now;
        for (int64_t n = 0; f->rank && from < to && n < e->compensated; n += now) {
            now = min_of(e->compensated - n, FACTOR_TOKENS);
            factors_add(f, from, to, t + n * job->ranks, job->ranks, now, y + n * job->m->rows, job->m->rows);
        }
    }
}

/* Up to FEW_UP_TO tokens, a few at a time are faster with AVX-512 than all of them from joined codes. */
INLINE int uses_few(const product *job, const expert *e, enum path path) {
    return IS_AVX512(path) && level_of(job->m, e) < 8 && e->tokens > 1 && e->tokens <= FEW_UP_TO && job->m->rows % BLOCK_ROWS == 0;
}

/* Computes a block's rows of y, 32 or a matrix's last 16. */
AVX2 static void product_block(const product *job, const expert *e, int64_t block) {
    const matrix *m = job->m;
    const activations *a = level_of(job->m, e) == 8 ? &job->a14 : &job->a8;
    const enum path path = path_of_expert(job, e);
    const int few = uses_few(job, e, path);
    int64_t now;
    for (int64_t t = 0; t < e->tokens; t += now) {
        const int64_t row = first_row(job, e) + t, left = e->tokens - t;
        now = few ? left / ceil_div(left, FEW_TOKENS) : min_of(left, has_tiles(path) ? TILE_CALL_TOKENS : MAX_TOKENS);
        const int8_t *x = a->q + activation_bytes(level_of(job->m, e)) * row * job->chunk;
        const float *scale = a->scale + row, *sum = a->sum + row;
        uint16_t *y = job->y + (e->y + t) * m->rows + block * BLOCK_ROWS;
        if (has_tiles(path)) gemm_block_tiles(path, m, e, block, x, scale, sum, job->rows, now, y);
        else if (COMPILED_AVX512 && few) few_block_vnni(m, e, block, job->chunk, x, scale, sum, job->rows, now, y);
        else if (uses_gemv(job, e)) gemv_block(path, m, e, block, job->chunk, x, scale, sum, job->rows, y);
        else gemm_block(path, m, e, block, job->chunk, x, scale, sum, job->rows, now, y);
    }
}

AVX2 void product_run_task(const product *job, const expert *e, int64_t task) {
    const int64_t end = min_of((task + 1) * job->blocks_per_task, blocks_of(job->m));
    for (int64_t block = task * job->blocks_per_task; block < end; block++) product_block(job, e, block);
    if (e->compensator) add_factors(job, e, task * job->blocks_per_task * BLOCK_ROWS, end * BLOCK_ROWS);
}

AVX2 static void product_task(void *argument, int64_t task) {
    const product *job = argument;
    product_run_task(job, job->experts + task / tasks_of(job), task % tasks_of(job));
}

/* Each expert's rows of y [y_rows, y_cols] = its matrix, the first or the second, times its rows, both bf16; x, row_of and
 * quantized as of edgemoe_experts. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
AVX2 int edgemoe_expert_product(pool *p, const matrix *m, int second, const expert *experts, int64_t count,
                                const uint16_t *x, int64_t x_rows, int64_t x_cols, const int64_t *row_of,
                                uint8_t *quantized, uint16_t *y, int64_t y_rows, int64_t y_cols) {
    if (!matrix_fits(m) || m->cols != x_cols || m->rows != y_cols) return WRONG_SHAPE;
    product job = {.m = m, .experts = experts, .count = count, .y = y};
    if (!product_take_rows(&job, x, x_rows, row_of, y_rows, quantized)) return WRONG_SHAPE;
    if (!experts_fit(experts, count, job.rows, y_rows)) return WRONG_SHAPE;
    job.projection = second ? 2 : 0, job.projections = second ? 1 : 2;
    if (!product_factors_fit(&job)) return WRONG_SHAPE;
    uint8_t *scratch = pool_acquire(p, product_scratch_bytes(&job, y_rows));
    if (!scratch) return OUT_OF_MEMORY;
    product_prepare(&job, y_rows, scratch);
    product_start(p, &job);
    job.blocks_per_task = pool_units_per_task(p, count * blocks_of(m), MAX_TASK_BLOCKS);
    pool_run(p, product_task, &job, count * tasks_of(&job));
    pool_release(p);
    return 0;
}
#endif
