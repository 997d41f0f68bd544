/* Eight rows of a column in a vector. A strip's rows go through all columns of the call before the next strip's, in a buffer
 * that stays in the first-level cache. Every number is rounded where torch's operations round it. */
#include "columns.h"

#include "../paths.h"
#include "../pool.h"

#if COMPILED
enum { STRIP_VECTORS = 4, VECTOR_ROWS = 8, PLACES = 16 };

typedef struct {
    const int64_t *levels;
    const float *importance;
    int64_t count;
    float unit, rest;
} coded_levels;

/* The value in steps that a level has where the code's upper four bits are `place`. */
INLINE float middle_of(int64_t level, int64_t place) {
    return level == 2 ? 64.0f * (float)(place / 4) + 31.5f : 16.0f * (float)place + 7.5f;
}

/* The place of the least weighted sum of the levels' squared distances, of two the lower one. */
INLINE __m256i least_place(const coded_levels *of, const __m256 wanted[MOST_LEVELS_CODED]) {
    __m256i least = _mm256_setzero_si256();
    for (int64_t place = 0; place < PLACES; place++) {
        __m256 cost = _mm256_setzero_ps();
        for (int64_t i = 0; i < of->count; i++) {
            __m256 off = _mm256_sub_ps(wanted[i], _mm256_set1_ps(middle_of(of->levels[i], place)));
            if (of->levels[i] > 4) {
                off = _mm256_sub_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), off), _mm256_set1_ps(7.5f));
                off = _mm256_max_ps(off, _mm256_setzero_ps());
            }
            const __m256 part = _mm256_mul_ps(_mm256_mul_ps(off, off), _mm256_set1_ps(of->importance[i]));
            cost = i ? _mm256_add_ps(cost, part) : part;
        }
        const __m256i bits = _mm256_and_si256(_mm256_castps_si256(cost), _mm256_set1_epi32(-PLACES));
        const __m256i key = _mm256_or_si256(bits, _mm256_set1_epi32((int32_t)place));
        if (!place) least = key;
        else {
            const __m256 lower = _mm256_castsi256_ps(_mm256_cmpgt_epi32(least, key));
            least = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(least), _mm256_castsi256_ps(key), lower));
        }
    }
    return _mm256_and_si256(least, _mm256_set1_epi32(PLACES - 1));
}

/* Codes a column of 8 rows; returns each level's value in steps. */
INLINE void code_rows(const coded_levels *of, const __m256 wanted[MOST_LEVELS_CODED], uint8_t *made, __m256 values[MOST_LEVELS_CODED]) {
    const __m256i place = least_place(of, wanted);
    const __m256 top = _mm256_mul_ps(_mm256_set1_ps(16), _mm256_cvtepi32_ps(place));
    const __m256 quarter = _mm256_cvtepi32_ps(_mm256_srli_epi32(place, 2));
    __m256 code = top;
    for (int64_t i = 0; i < of->count; i++) {
        if (of->levels[i] == 4) values[i] = _mm256_add_ps(top, _mm256_set1_ps(7.5f));
        else if (of->levels[i] == 2) values[i] = _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(64), quarter), _mm256_set1_ps(31.5f));
        else {
            const __m256 unit = _mm256_set1_ps(of->unit), rest = _mm256_set1_ps(of->rest);
            __m256 low = _mm256_div_ps(_mm256_sub_ps(_mm256_sub_ps(wanted[i], top), rest), unit);
            low = _mm256_round_ps(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            low = _mm256_min_ps(_mm256_max_ps(low, _mm256_setzero_ps()), _mm256_set1_ps(16 / of->unit - 1));
            code = values[i] = _mm256_add_ps(top, _mm256_add_ps(_mm256_mul_ps(low, unit), rest));
        }
    }
    float codes[VECTOR_ROWS];
    _mm256_storeu_ps(codes, code);
    for (int r = 0; r < VECTOR_ROWS; r++) made[r] = (uint8_t)codes[r];
}

typedef struct {
    const float *upper, *steps, *centres;
    int64_t columns, rows, start, end;
    uint8_t *made;
    float *errors;
} coded_columns;

/* Codes all columns of `vectors` times 8 rows from `row` on; `left` is their buffer. */
INLINE void code_strip(const coded_levels *of, const coded_columns *job, int64_t row, int64_t vectors,
                       __m256 left[MOST_LEVELS_CODED][MOST_COLUMNS_CODED][STRIP_VECTORS]) {
    const int64_t count = job->end - job->start;
    for (int64_t j = 0; j < count; j++) {
        const float *reach = job->upper + (job->start + j) * job->columns + job->start;
        const int64_t at = (job->start + j) * job->rows + row;
        __m256 error[MOST_LEVELS_CODED][STRIP_VECTORS];
        for (int64_t v = 0; v < vectors; v++) {
            const __m256 step = _mm256_loadu_ps(job->steps + at + VECTOR_ROWS * v), middle = _mm256_set1_ps(135.5f);
            const __m256 centre = _mm256_loadu_ps(job->centres + at + VECTOR_ROWS * v);
            __m256 wanted[MOST_LEVELS_CODED], values[MOST_LEVELS_CODED];
            for (int64_t i = 0; i < of->count; i++)
                wanted[i] = _mm256_add_ps(_mm256_div_ps(_mm256_sub_ps(left[i][j][v], centre), step), middle);
            code_rows(of, wanted, job->made + at + VECTOR_ROWS * v, values);
            for (int64_t i = 0; i < of->count; i++) {
                const __m256 value = _mm256_add_ps(_mm256_mul_ps(_mm256_sub_ps(values[i], middle), step), centre);
                error[i][v] = _mm256_div_ps(_mm256_sub_ps(left[i][j][v], value), _mm256_set1_ps(reach[j]));
                _mm256_storeu_ps(job->errors + (i * count + j) * job->rows + row + VECTOR_ROWS * v, error[i][v]);
            }
        }
        for (int64_t i = 0; i < of->count; i++)
            for (int64_t k = j + 1; k < count; k++)
                for (int64_t v = 0; v < vectors; v++)
                    left[i][k][v] = _mm256_sub_ps(left[i][k][v], _mm256_mul_ps(_mm256_set1_ps(reach[k]), error[i][v]));
    }
}

AVX2 int edgemoe_code_columns(float rest, const float *left, const float *upper, const float *steps, const float *centres,
                              int64_t columns, int64_t rows, int64_t start, int64_t end, const int64_t *levels,
                              const float *importance, int64_t count, int64_t unit, uint8_t *made, float *errors) {
    if (rows % VECTOR_ROWS || count < 1 || count > MOST_LEVELS_CODED || unit < 1) return WRONG_SHAPE;
    if (start < 0 || start >= end || end > columns || end - start > MOST_COLUMNS_CODED) return WRONG_SHAPE;
    const coded_levels of = {levels, importance, count, (float)unit, rest};
    const coded_columns job = {upper, steps, centres, columns, rows, start, end, made, errors};
    __m256 buffer[MOST_LEVELS_CODED][MOST_COLUMNS_CODED][STRIP_VECTORS];
    for (int64_t row = 0, vectors; row < rows; row += VECTOR_ROWS * vectors) {
        vectors = min_of((rows - row) / VECTOR_ROWS, STRIP_VECTORS);
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = start; j < end; j++)
                for (int64_t v = 0; v < vectors; v++)
                    buffer[i][j - start][v] = _mm256_loadu_ps(left + (i * columns + j) * rows + row + VECTOR_ROWS * v);
        code_strip(&of, &job, row, vectors, buffer);
    }
    return 0;
}
#endif
