/* Activations as integers, and products of one matrix of several experts with them. */
#include "products.h"

#if defined(__x86_64__)
enum { MOST_BLOCKS = 16 }; /* of a task */

enum { FINE = 8191, COARSE = 127 }; /* largest numbers; FINE is |128 h + l|, with |h| <= 64 and -64 <= l <= 63 */

/* 8 bf16 numbers times `by`, each rounded to the nearest integer. */
INLINE __m256i scaled(const uint16_t *x, __m256 by) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)), by));
}

INLINE int32_t integers_added_up(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
}

INLINE void quantize_chunk(const uint16_t *x, int64_t chunk, enum form form, int8_t *q, float *scale, float *sum) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
                                           0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    const float largest = magnitude(x, chunk), most = form == BYTES ? COARSE : FINE;
    const __m256 by = _mm256_set1_ps(largest > 0 ? most / largest : 0); /* of NaN: 0, and the numbers do not matter */
    __m256i total = _mm256_setzero_si256();
    for (int64_t i = 0; i < chunk; i += 16) {
        const __m256i first = scaled(x + i, by), last = scaled(x + i + 8, by);
        total = _mm256_add_epi32(total, _mm256_add_epi32(first, last));
        __m256i v = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, last), 0xD8);
        v = _mm256_shuffle_epi8(v, order);
        if (form == BYTES) {
            v = _mm256_permute4x64_epi64(_mm256_packs_epi16(v, v), 0xD8);
            _mm_storeu_si128((__m128i *)(q + i), _mm256_castsi256_si128(v));
            continue;
        }
        if (form == HALVES) {
            const __m256i h = _mm256_srai_epi16(_mm256_add_epi16(v, _mm256_set1_epi16(64)), 7);
            const __m256i l = _mm256_sub_epi16(v, _mm256_slli_epi16(h, 7));
            v = _mm256_shuffle_epi32(_mm256_packs_epi16(h, l), 0xD8);
        }
        _mm256_storeu_si256((__m256i *)(q + 2 * i), v);
    }
    *scale = largest / most;
    *sum = (float)integers_added_up(total) * *scale;
}

INLINE int64_t first_of(const product *job, const expert *e) { return job->inner ? e->y : e->x; }

INLINE int alone(const product *job, const expert *e) { return e->tokens == 1 && job->m->rows % 32 == 0; }

size_t product_scratch(const matrix *m, int64_t rows) {
    const int64_t chunk = m->group < CHUNK ? m->group : CHUNK;
    return (size_t)(rows * (3 * m->cols + 16 * (m->cols / chunk) + 1));
}

AVX2 uint8_t *product_prepare(product *job, uint8_t *at) {
    job->chunk = job->m->group < CHUNK ? job->m->group : CHUNK;
    const int64_t cols = job->m->cols, chunks = cols / job->chunk;
    float *of_chunks = (float *)at;
    int8_t *q = (int8_t *)(of_chunks + 4 * job->rows * chunks);
    job->fine = (numbers){q, of_chunks, of_chunks + job->rows * chunks};
    job->coarse = (numbers){q + 2 * job->rows * cols, of_chunks + 2 * job->rows * chunks, of_chunks + 3 * job->rows * chunks};
    job->forms = (uint8_t *)q + 3 * job->rows * cols;
    memset(job->forms, 0, (size_t)job->rows);
    for (int64_t i = 0; i < job->count; i++) {
        const expert *e = job->experts + i;
        const enum form form = e->level < 8 ? BYTES : alone(job, e) ? HALVES : WIDE;
        for (int64_t t = 0; t < e->tokens; t++) job->forms[first_of(job, e) + t] |= form;
    }
    return (uint8_t *)(((uintptr_t)job->forms + (uintptr_t)job->rows + 63) & ~(uintptr_t)63);
}

AVX2 void product_quantize(const product *job, int64_t row) {
    const int64_t cols = job->m->cols, chunk = job->chunk;
    for (int64_t c = 0; c < cols / chunk; c++) {
        const int64_t to = c * job->rows + row;
        const uint16_t *x = job->x + row * cols + c * chunk;
        const numbers *fine = &job->fine, *coarse = &job->coarse;
        if (job->forms[row] & HALVES) quantize_chunk(x, chunk, HALVES, fine->q + 2 * to * chunk, fine->scale + to, fine->sum + to);
        if (job->forms[row] & WIDE) quantize_chunk(x, chunk, WIDE, fine->q + 2 * to * chunk, fine->scale + to, fine->sum + to);
        if (job->forms[row] & BYTES) quantize_chunk(x, chunk, BYTES, coarse->q + to * chunk, coarse->scale + to, coarse->sum + to);
    }
}

enum { QUANTIZED_TOGETHER = 8 };

AVX2 static void quantize_task(void *argument, int64_t task) {
    const product *job = argument;
    const int64_t from = task * QUANTIZED_TOGETHER;
    const int64_t end = from + QUANTIZED_TOGETHER < job->rows ? from + QUANTIZED_TOGETHER : job->rows;
    for (int64_t row = from; row < end; row++) product_quantize(job, row);
}

void product_quantize_all(pool *p, product *job) {
    pool_run(p, quantize_task, job, (job->rows + QUANTIZED_TOGETHER - 1) / QUANTIZED_TOGETHER);
}

/* 32 rows of y, or a matrix's last 16. */
AVX2 static void product_block(const product *job, const expert *e, int64_t block) {
    const matrix *m = job->m;
    const numbers *n = e->level == 8 ? &job->fine : &job->coarse;
    for (int64_t t = 0; t < e->tokens; t += TOKENS) {
        const int64_t row = first_of(job, e) + t, now = e->tokens - t < TOKENS ? e->tokens - t : TOKENS;
        const int8_t *x = n->q + width_at(e->level) * row * job->chunk;
        uint16_t *y = job->y + (e->y + t) * m->rows + block * 32;
        if (alone(job, e)) rows_of_one_token(m, e, block, job->chunk, x, n->scale + row, n->sum + row, job->rows, y);
        else rows_of_tokens(m, e, block, job->chunk, x, n->scale + row, n->sum + row, job->rows, now, y);
    }
}

int64_t product_together(const pool *p, int64_t blocks) { return pool_together(p, blocks, MOST_BLOCKS); }

AVX2 void product_of_task(const product *job, const expert *e, int64_t task) {
    const int64_t from = task * job->together, blocks = blocks_of(job->m);
    for (int64_t block = from; block < from + job->together && block < blocks; block++) product_block(job, e, block);
}

AVX2 static void product_task(void *argument, int64_t task) {
    const product *job = argument;
    product_of_task(job, job->experts + task / tasks_of(job), task % tasks_of(job));
}

/* Each expert's rows of y [.., rows] = its matrix times its rows of x [rows, cols], both bf16.
 * Returns 0, or -1 where there is no memory. */
AVX2 int edgemoe_expert_product(pool *p, const matrix *m, const expert *experts, int64_t count, const uint16_t *x,
                                int64_t rows, uint16_t *y) {
    uint8_t *scratch = pool_take(p, product_scratch(m, rows) + 64);
    if (!scratch) return -1;
    product job = {.m = m, .experts = experts, .count = count, .rows = rows, .x = x, .y = y};
    product_prepare(&job, scratch);
    product_quantize_all(p, &job);
    job.together = product_together(p, count * blocks_of(m));
    pool_run(p, product_task, &job, count * tasks_of(&job));
    pool_give_back(p);
    return 0;
}
#endif
