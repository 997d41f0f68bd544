/* One token's product with an expert's matrix in layout cuda (storage/layout.py), for experts that a device leaves to the
 * CPU.
 *
 * A row's part of a slab is a run of 16 bytes in each plane (8 where slabs have 32 columns), followed by the next row's;
 * byte j has column j of each of the slab's four quarters. Activations are 14-bit numbers, split into 128 h + l, with a
 * scale per slab (A14_SPLIT in planes.h). Sums over a slab are exact integers and slabs are added up in ascending order,
 * so a row's result depends on the row and the token only.
 */
#include "../pool.h"
#include "planes.h"

#if defined(__x86_64__)
#include <math.h>

enum { TASK_ROWS = 64 };

typedef struct {
    int64_t rows, cols, group; /* padded: rows % 16 == 0, cols % 32 == 0, cols % group == 0, group % 32 == 0 */
    const uint8_t *parameters; /* bf16 [cols / group, rows, 2]: 16 scale and centre */
    const uint8_t *base, *d4;  /* [slabs, rows, run] */
    const uint8_t *even, *odd; /* d8, likewise: nibbles of the quarters 0 and 2, and of 1 and 3 */
    int64_t level;             /* 8, 4 or 2: planes above it may be NULL */
} slab_matrix;

typedef struct {
    const slab_matrix *m;
    int64_t run;        /* columns of a quarter: 16 or 8 */
    const int8_t *q;    /* [slabs, 2, 4 run]: h, then l */
    const float *scale; /* [slabs] */
    const float *sum;   /* [slabs, 2]: of the activations in each half of a slab */
    uint16_t *y;
} slab_job;

/* Quantizes a slab's activations: h and l, the scale, and the sums of both halves. scale and sum are NaN if an activation
 * is NaN or infinite. */
AVX2 static void quantize(const uint16_t *x, int64_t run, int8_t *q, float *scale, float *sum) {
    const float largest = max_magnitude(x, 4 * run), by = largest > 0 ? A14_MAX / largest : 0;
    *scale = largest / A14_MAX;
    for (int64_t half = 0; half < 2; half++) {
        int32_t total = 0;
        for (int64_t i = 2 * run * half; i < 2 * run * (half + 1); i++) {
            const int32_t v = by > 0 ? (int32_t)lrintf(from_bf16(x[i]) * by) : 0, h = (v + 64) >> 7;
            q[i] = (int8_t)h, q[4 * run + i] = (int8_t)(v - 128 * h);
            total += v;
        }
        sum[half] = (float)total * *scale;
    }
}

/* Moves a quarter's two bits of 32 bytes to bits 2 and 3. */
INLINE __m256i upper_bits(__m256i b, int quarter) {
    const __m256i mask = _mm256_set1_epi8(0x0C);
    return _mm256_and_si256(quarter ? _mm256_srli_epi16(b, 2 * (quarter - 1)) : _mm256_slli_epi16(b, 2), mask);
}

/* Moves them to bits 0 and 1. */
INLINE __m256i lower_bits(__m256i b, int quarter) {
    return _mm256_and_si256(_mm256_srli_epi16(b, 2 * quarter), _mm256_set1_epi8(0x03));
}

/* A quarter's codes in 32 bytes: nibbles, or whole codes at level 8. */
INLINE __m256i codes_of(const slab_matrix *m, int64_t at, __m256i b, __m256i d, int quarter, int level) {
    const __m256i top = upper_bits(b, quarter), nibble = _mm256_set1_epi8(15);
    if (level == 2) return _mm256_or_si256(top, _mm256_set1_epi8(1));
    const __m256i high = _mm256_or_si256(top, lower_bits(d, quarter));
    if (level == 4) return high;
    const __m256i low = load_bytes((quarter % 2 ? m->odd : m->even) + at);
    const __m256i shifted = quarter < 2 ? low : _mm256_srli_epi16(low, 4);
    return _mm256_or_si256(_mm256_slli_epi16(high, 4), _mm256_and_si256(shifted, nibble));
}

/* Repeats a quarter's 16 or 8 activations for every row in a register. */
INLINE __m256i repeat(const int8_t *q, int64_t run) {
    if (run == 16) return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)q));
    int64_t eight;
    memcpy(&eight, q, 8);
    return _mm256_set1_epi64x(eight);
}

/* Adds a slab's products of the rows from `row` to `total`, where each row has 4 lanes, or 2. */
INLINE __m256 add_slab(const slab_job *job, int64_t index, int64_t row, int64_t run, int level, __m256 total) {
    const slab_matrix *m = job->m;
    const int64_t at = (index * m->rows + row) * run;
    const __m256i b = load_bytes(m->base + at), d = level > 2 ? load_bytes(m->d4 + at) : b;
    const __m256i ones = _mm256_set1_epi16(1), high = _mm256_set1_epi32((int32_t)0xFFFF0000);
    const __m256i lanes = run == 16 ? _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1) : _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    /* A row's constant terms are added in its first lane. */
    const __m256 first = run == 16 ? _mm256_setr_ps(1, 0, 0, 0, 1, 0, 0, 0) : _mm256_setr_ps(1, 0, 1, 0, 1, 0, 1, 0);
    const float unit = code_unit(level), zero = level == 8 ? 8.46875f : level == 4 ? 8.0f : 7.5f;
    const int8_t *h = job->q + index * 8 * run, *l = h + 4 * run;
    const int64_t parts = m->group < 4 * run ? 2 : 1; /* groups per slab */
    for (int64_t part = 0; part < parts; part++) {
        __m256i whole = _mm256_setzero_si256();
        for (int quarter = (int)(4 / parts * part); quarter < 4 / parts * (part + 1); quarter++) {
            const __m256i c = codes_of(m, at, b, d, quarter, level);
            const __m256i hs = _mm256_madd_epi16(_mm256_maddubs_epi16(c, repeat(h + quarter * run, run)), ones);
            const __m256i ls = _mm256_madd_epi16(_mm256_maddubs_epi16(c, repeat(l + quarter * run, run)), ones);
            whole = _mm256_add_epi32(whole, _mm256_add_epi32(_mm256_slli_epi32(hs, 7), ls));
        }
        const int64_t pair = ((index * 4 * run + part * m->group) / m->group * m->rows + row) * 4;
        const __m128i loaded = _mm_loadu_si128((const __m128i *)(m->parameters + pair));
        const __m256i both = _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(loaded), lanes);
        const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        const __m256 centre = _mm256_castsi256_ps(_mm256_and_si256(both, high));
        const float sum = parts == 2 ? job->sum[2 * index + part] : job->sum[2 * index] + job->sum[2 * index + 1];
        const __m256 numbers = _mm256_mul_ps(_mm256_cvtepi32_ps(whole), _mm256_set1_ps(unit * job->scale[index]));
        const __m256 sums = _mm256_mul_ps(first, _mm256_set1_ps(sum));
        const __m256 centred = _mm256_fnmadd_ps(sums, _mm256_set1_ps(zero), numbers);
        total = _mm256_fmadd_ps(centre, sums, _mm256_fmadd_ps(scale, centred, total));
    }
    return total;
}

/* Computes the rows [from, to) of y. */
INLINE void compute_rows(const slab_job *job, int64_t from, int64_t to, int64_t run, int level) {
    const int64_t side = 32 / run, slabs = job->m->cols / (4 * run);
    __m256 total[TASK_ROWS / 2];
    for (int i = 0; i < TASK_ROWS / 2; i++) total[i] = _mm256_setzero_ps();
    for (int64_t index = 0; index < slabs; index++)
        for (int64_t row = from; row < to; row += side) {
            const int64_t i = (row - from) / side;
            total[i] = add_slab(job, index, row, run, level, total[i]);
        }
    for (int64_t row = from; row < to; row += side) {
        float lanes[8];
        _mm256_storeu_ps(lanes, total[(row - from) / side]);
        for (int64_t r = 0; r < side; r++) {
            float sum = 0;
            for (int64_t i = 0; i < 8 / side; i++) sum += lanes[r * (8 / side) + i];
            job->y[row + r] = to_bf16(sum);
        }
    }
}

AVX2 static void slab_task(void *argument, int64_t task) {
    const slab_job *job = argument;
    const int64_t from = task * TASK_ROWS, to = min_of(from + TASK_ROWS, job->m->rows), level = job->m->level;
    /* One loop for each constant run and level. */
    if (job->run == 16 && level == 2) compute_rows(job, from, to, 16, 2);
    else if (job->run == 16 && level == 4) compute_rows(job, from, to, 16, 4);
    else if (job->run == 16) compute_rows(job, from, to, 16, 8);
    else if (level == 2) compute_rows(job, from, to, 8, 2);
    else if (level == 4) compute_rows(job, from, to, 8, 4);
    else compute_rows(job, from, to, 8, 8);
}

/* y [y_cols] = the matrix times x [x_cols], both bf16. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_slab_product(pool *p, const slab_matrix *m, const uint16_t *x, int64_t x_cols, uint16_t *y, int64_t y_cols) {
    if (m->cols != x_cols || m->rows != y_cols || m->cols < 1 || m->cols % 32 || m->rows < 1) return WRONG_SHAPE;
    const int64_t run = m->cols % 64 ? 8 : 16, slabs = m->cols / (4 * run);
    float *scale = pool_acquire(p, (size_t)(2 * m->cols) + (size_t)(3 * slabs) * sizeof(float));
    if (!scale) return OUT_OF_MEMORY;
    float *sum = scale + slabs;
    int8_t *q = (int8_t *)(sum + 2 * slabs);
    for (int64_t i = 0; i < slabs; i++) quantize(x + i * 4 * run, run, q + i * 8 * run, scale + i, sum + 2 * i);
    slab_job job = {m, run, q, scale, sum, y};
    pool_run(p, slab_task, &job, ceil_div(m->rows, TASK_ROWS));
    pool_release(p);
    return 0;
}

/* Bytes of the structure that structures.py builds. */
const int64_t edgemoe_slab_size = sizeof(slab_matrix);
#endif
