/* The functions of block.h in 256 bits: AVX2, and NEON by vectors/neon.h. */
#include "block_256.h"

#if COMPILED
#define BITS 256
#define VECTOR __m256
#define INTEGERS __m256i
#define NAME(name) name
#define INLINE_VECTOR INLINE
#define TARGET AVX2
#define SOFTMAX softmax_256
#define LOAD_INTEGERS(from) _mm256_loadu_si256((const __m256i *)(from))

INLINE __m256 hide(__m256 score, __m256i key, __m256i at, __m256i first) {
    const __m256i hidden = _mm256_or_si256(_mm256_cmpgt_epi32(key, at), _mm256_cmpgt_epi32(first, key));
    return _mm256_blendv_ps(score, _mm256_set1_ps(MASKED), _mm256_castsi256_ps(hidden));
}

INLINE __m256 unless_masked(__m256 score, __m256 weight) {
    return _mm256_andnot_ps(_mm256_cmp_ps(score, _mm256_set1_ps(MASKED), _CMP_EQ_OQ), weight);
}

#define HIDE hide
#define UNLESS_MASKED unless_masked
#include "softmax.h"

/* Eight keys lie in lanes; they are summed up in the order of sum_of_eight. */
AVX2 float softmax_head_256(const float *const scores[2], float scaling, int64_t low, int64_t high, float *largest, float *total,
                            uint16_t *weights) {
    static const int32_t EIGHT[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const __m256i from = _mm256_set1_epi32((int32_t)low), to = _mm256_set1_epi32((int32_t)high);
    const __m256 masked = _mm256_set1_ps(MASKED), before = _mm256_set1_ps(*largest);
    __m256i key = _mm256_loadu_si256((const __m256i *)EIGHT);
    __m256 score[KEYS / 8], most = before, sum = _mm256_setzero_ps();
    for (int i = 0; i < KEYS / 8; i++, key = _mm256_add_epi32(key, _mm256_set1_epi32(8))) {
        const __m256 all = _mm256_mul_ps(_mm256_loadu_ps(scores[i * 8 / LANES] + i * 8 % LANES), _mm256_set1_ps(scaling));
        const __m256i seen = _mm256_andnot_si256(_mm256_cmpgt_epi32(from, key), _mm256_cmpgt_epi32(to, key));
        score[i] = _mm256_blendv_ps(masked, all, _mm256_castsi256_ps(seen));
        most = _mm256_max_ps(most, score[i]);
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, most);
    for (int i = 0; i < 8; i++) *largest = lanes[i] > *largest ? lanes[i] : *largest;
    most = _mm256_set1_ps(*largest);
    for (int i = 0; i < KEYS / 8; i++) {
        const __m256 weight = unless_masked(score[i], rounded_to_bf16(exponential(_mm256_sub_ps(score[i], most))));
        _mm_storeu_si128((__m128i *)(weights + 8 * i), eight_to_bf16(weight));
        sum = _mm256_add_ps(sum, weight);
    }
    _mm256_storeu_ps(lanes, exponential(_mm256_sub_ps(before, most)));
    *total = __builtin_fmaf(*total, lanes[0], horizontal_sum(sum));
    return lanes[0];
}

/* Rows of a format, rounded to bf16, as float32 [count, padded(dim)]. */
INLINE void widen(const int format, const uint8_t *x, int64_t count, int64_t dim, float *to) {
    const int64_t width = padded(dim), stride = kv_row_bytes(format, dim);
    for (int64_t r = 0; r < count; r++, x += stride, to += width) {
        for (int64_t c = 0; c < dim; c += 16) {
            __m256 wide[2];
            kv_sixteen(format, x, dim, c, wide);
            for (int h = 0; h < 2; h++) _mm256_storeu_ps(to + c + 8 * h, format == KV_BF16 ? wide[h] : rounded_to_bf16(wide[h]));
        }
        memset(to + dim, 0, sizeof *to * (size_t)(width - dim));
    }
}

AVX2 operand wide_rows(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to) {
    (void)scratch;
    if (format == KV_BF16) widen(KV_BF16, x, count, dim, (float *)to);
    else if (format == KV_Q8_0) widen(KV_Q8_0, x, count, dim, (float *)to);
    else widen(KV_Q4_0, x, count, dim, (float *)to);
    return (operand){to, padded(dim), 1};
}

operand wide_columns(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to) {
    wide_rows(format, x, count, dim, scratch, to);
    memset(to + count * padded(dim), 0, sizeof *to * (size_t)((padded(count) - count) * padded(dim)));
    return (operand){to, 1, padded(dim)};
}

enum { ROWS = 4, WIDE = 16 }; /* of a tile, whose sums lie in eight registers */

/* Sums of every second of DEPTH products, from the first one on. */
INLINE void add_every_second(int rows, const float *a, operand of, const float *b, int64_t step, __m256 sum[ROWS][2]) {
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm256_setzero_ps();
    for (int j = 0; j < DEPTH; j += 2, a += 2 * of.step, b += 2 * step) {
        const __m256 low = _mm256_loadu_ps(b), high = _mm256_loadu_ps(b + 8);
        for (int i = 0; i < rows; i++) {
            const __m256 x = _mm256_set1_ps(a[i * of.row]);
            sum[i][0] = _mm256_fmadd_ps(x, low, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(x, high, sum[i][1]);
        }
    }
}

INLINE void tile_256(int rows, const float *a, operand of, const float *b, int64_t step, int64_t depth, const float *factor, float *c) {
    for (int64_t k = 0; k < depth; k += DEPTH, a += DEPTH * of.step, b += DEPTH * step) {
        __m256 even[ROWS][2], odd[ROWS][2];
        add_every_second(rows, a, of, b, step, even);
        add_every_second(rows, a + of.step, of, b + step, step, odd);
        for (int i = 0; i < rows; i++)
            for (int h = 0; h < 2; h++) {
                float *to = c + i * LANES + 8 * h;
                __m256 before = k || factor ? _mm256_loadu_ps(to) : _mm256_setzero_ps();
                if (!k && factor) before = _mm256_mul_ps(before, _mm256_loadu_ps(factor + 8 * h));
                _mm256_storeu_ps(to, _mm256_add_ps(before, _mm256_add_ps(even[i][h], odd[i][h])));
            }
    }
}

AVX2 static void multiply(operand a, const float *b, int64_t step, int64_t rows, int64_t depth, const float *factor, float *c) {
    for (int64_t l = 0; l < LANES; l += WIDE) {
        const float *by = factor ? factor + l : NULL;
        if (rows == 1) tile_256(1, (const float *)a.at, a, b + l, step, depth, by, c + l);
        for (int64_t r = 0; rows > 1 && r < rows; r += ROWS)
            tile_256(ROWS, (const float *)a.at + r * a.row, a, b + l, step, depth, by, c + r * LANES + l);
    }
}

const block_path block_256 = {wide_rows, wide_columns, NULL, multiply, softmax_256, softmax_head_256};
#endif
