/* The functions of block.h in 512 bits: by float32, and by VDPBF16PS. */
#include "block_avx512.h"

#include "block_256.h"

#if COMPILED_AVX512
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")))

#define BITS 512
#define VECTOR __m512
#define INTEGERS __m512i
#define NAME(name) name##_512
#define TARGET AVX512
#define INLINE_VECTOR static inline __attribute__((always_inline)) AVX512
#define NEAREST(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define AS_FLOATS(x) _mm512_castsi512_ps(x)
#define AS_INTEGERS(x) _mm512_castps_si512(x)
#include "../vectors/exponential.h"

INLINE_VECTOR __m512 hide(__m512 score, __m512i key, __m512i at, __m512i first) {
    return _mm512_mask_mov_ps(score, _mm512_cmpgt_epi32_mask(key, at) | _mm512_cmpgt_epi32_mask(first, key), _mm512_set1_ps(MASKED));
}

INLINE_VECTOR __m512 unless_masked(__m512 score, __m512 weight) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, _mm512_set1_ps(MASKED), _CMP_NEQ_UQ), weight);
}

#define SOFTMAX softmax_512
#define LOAD_INTEGERS(from) _mm512_loadu_si512(from)
#define HIDE hide
#define UNLESS_MASKED unless_masked
#include "softmax.h"

/* softmax_head_256 with the same bits. */
AVX512 float softmax_head_512(const float *const scores[2], float scaling, int64_t low, int64_t high, float *largest, float *total,
                              uint16_t *weights) {
    const __m512 masked = _mm512_set1_ps(MASKED), before = _mm512_set1_ps(*largest);
    __m512 score[KEYS / 16], most = before;
    for (int i = 0; i < KEYS / 16; i++) {
        const __m512 all = _mm512_mul_ps(_mm512_loadu_ps(scores[i / 2] + i % 2 * 16), _mm512_set1_ps(scaling));
        const int64_t from = low - 16 * i, to = high - 16 * i; /* of the keys that the head sees */
        const uint32_t begin = from <= 0 ? 0xffff : from >= 16 ? 0 : 0xffffu << from, end = to >= 16 ? 0xffff : to <= 0 ? 0 : (1u << to) - 1;
        score[i] = _mm512_mask_mov_ps(masked, (__mmask16)(begin & end), all);
        most = _mm512_max_ps(most, score[i]);
    }
    *largest = _mm512_reduce_max_ps(most);
    most = _mm512_set1_ps(*largest);
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < KEYS / 16; i++) {
        const __m512 weight = unless_masked(score[i], rounded_to_bf16_512(exponential_512(_mm512_sub_ps(score[i], most))));
        _mm256_storeu_si256((__m256i *)(weights + 16 * i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(weight), 16)));
        sum = _mm256_add_ps(_mm256_add_ps(sum, _mm512_castps512_ps256(weight)), _mm512_extractf32x8_ps(weight, 1));
    }
    const float factor = _mm512_cvtss_f32(exponential_512(_mm512_sub_ps(before, most)));
    *total = __builtin_fmaf(*total, factor, horizontal_sum(sum));
    return factor;
}

enum { ROWS = 4 }; /* of a tile of LANES columns: sums, and sums of even and odd index, in 24 registers */

/* Adds a number of A, or a pair, times 16 lanes. Assembly: with the intrinsic GCC copies sums between registers. */
INLINE_VECTOR __m512 add_product(int pairs, __m512 sum, __m512 x, __m512 lanes) {
    if (!pairs) return _mm512_fmadd_ps(x, lanes, sum);
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(lanes));
    return sum;
}

INLINE_VECTOR void tile_512(int pairs, int rows, const float *a, operand of, const float *b, int64_t step,
                                                                  int64_t depth, const float *factor, float *c) {
    const int numbers = pairs ? DEPTH / 2 : DEPTH;
    __m512 sum[ROWS][2];
    for (int i = 0; i < rows; i++)
        for (int h = 0; h < 2; h++)
            sum[i][h] = factor ? _mm512_mul_ps(_mm512_loadu_ps(c + i * LANES + 16 * h), _mm512_loadu_ps(factor + 16 * h)) : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += DEPTH, a += numbers * of.step, b += numbers * step) {
        __m512 part[2][ROWS][2];
        for (int odd = 0; odd < 2; odd++)
            for (int i = 0; i < rows; i++) part[odd][i][0] = part[odd][i][1] = _mm512_setzero_ps();
        for (int j = 0; j < numbers; j += 2)
            for (int odd = 0; odd < 2; odd++) {
                const __m512 low = _mm512_loadu_ps(b + (j + odd) * step), high = _mm512_loadu_ps(b + (j + odd) * step + 16);
                for (int i = 0; i < rows; i++) {
                    const __m512 x = _mm512_set1_ps(a[i * of.row + (j + odd) * of.step]);
                    part[odd][i][0] = add_product(pairs, part[odd][i][0], x, low);
                    part[odd][i][1] = add_product(pairs, part[odd][i][1], x, high);
                }
            }
        for (int i = 0; i < rows; i++)
            for (int h = 0; h < 2; h++) sum[i][h] = _mm512_add_ps(sum[i][h], _mm512_add_ps(part[0][i][h], part[1][i][h]));
    }
    for (int i = 0; i < rows; i++)
        for (int h = 0; h < 2; h++) _mm512_storeu_ps(c + i * LANES + 16 * h, sum[i][h]);
}

AVX512 static void multiply(operand a, const float *b, int64_t step, int64_t rows, int64_t depth, const float *factor, float *c) {
    if (rows == 1) tile_512(0, 1, (const float *)a.at, a, b, step, depth, factor, c);
    for (int64_t r = 0; rows > 1 && r < rows; r += ROWS) tile_512(0, ROWS, (const float *)a.at + r * a.row, a, b, step, depth, factor, c + r * LANES);
}

BF16 static void multiply_pairs(operand a, const float *b, int64_t step, int64_t rows, int64_t depth, const float *factor, float *c) {
    if (rows == 1) tile_512(1, 1, (const float *)a.at, a, b, step, depth, factor, c);
    for (int64_t r = 0; rows > 1 && r < rows; r += ROWS) tile_512(1, ROWS, (const float *)a.at + r * a.row, a, b, step, depth, factor, c + r * LANES);
}

static const pair_order UPPER_FIRST = {{0, 1}, {2, 3}};

BF16 static void lanes(float *x, int64_t depth) { pair_lanes(x, depth, UPPER_FIRST); }

/* 16 codes of a row as float32, times their scale. */
static inline __attribute__((always_inline)) BF16 __m512 sixteen_of(int64_t format, const uint8_t *codes, int64_t i, __m512 scale) {
    __m128i bytes;
    if (format == KV_Q8_0) bytes = _mm_loadu_si128((const __m128i *)(codes + i));
    else {
        const __m128i pairs = _mm_loadl_epi64((const __m128i *)(codes + i / 2)), low = _mm_set1_epi8(15);
        bytes = _mm_unpacklo_epi64(_mm_and_si128(pairs, low), _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
        bytes = _mm_sub_epi8(bytes, _mm_set1_epi8(8));
    }
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
}

static inline __attribute__((always_inline)) BF16 void round_row(int64_t format, const uint8_t *row, int64_t dim, uint16_t *to) {
    const uint8_t *codes = row + 2 * ceil_div(dim, KV_BLOCK);
    for (int64_t i = 0; i < dim; i += KV_BLOCK) {
        const __m512 scale = _mm512_set1_ps(from_bf16(((const uint16_t *)row)[i / KV_BLOCK])), low = sixteen_of(format, codes, i, scale);
        if (dim - i < KV_BLOCK) _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh(low));
        else _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(sixteen_of(format, codes, i + 16, scale), low));
    }
}

/* kv_bf16 with VCVTNE2PS2BF16. */
BF16 static const uint16_t *round_rows(int64_t format, const uint8_t *from, int64_t rows, int64_t dim, uint16_t *to) {
    if (format == KV_BF16) return (const uint16_t *)from;
    const int64_t stride = kv_row_bytes(format, dim);
    for (int64_t r = 0; r < rows; r++) {
        if (format == KV_Q8_0) round_row(KV_Q8_0, from + r * stride, dim, to + r * dim);
        else round_row(KV_Q4_0, from + r * stride, dim, to + r * dim);
    }
    return to;
}

/* Numbers 2, 0, 3, 1 of each four of a row. */
AVX512 static operand rows_of(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to) {
    const uint16_t *from = round_rows(format, x, count, dim, scratch);
    const int64_t width = padded(dim);
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(4, 5, 0, 1, 6, 7, 2, 3, 12, 13, 8, 9, 14, 15, 10, 11));
    for (int64_t r = 0; r < count; r++, from += dim)
        for (int64_t c = 0; c < width; c += DEPTH) {
            const __m512i numbers = _mm512_maskz_loadu_epi16(dim - c >= DEPTH ? ~0u : (1u << (dim - c)) - 1, from + c);
            _mm512_storeu_si512(to + (r * width + c) / 2, _mm512_shuffle_epi8(numbers, order));
        }
    return (operand){to, width / 2, 1};
}

/* Pairs of rows 0 and 2 of each four, and of 1 and 3: 32 columns of two rows, of which zeros follow the last. */
INLINE_VECTOR void interleave(__m512i upper, __m512i lower, uint32_t *to) {
    const __m512i half = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(lower, half, upper));
    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(lower, _mm512_add_epi16(half, _mm512_set1_epi16(16)), upper));
}

AVX512 static operand columns_of(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to) {
    const uint16_t *from = round_rows(format, x, count, dim, scratch);
    const int64_t width = padded(dim);
    for (int64_t r = 0; r < padded(count); r += 4, from += 4 * dim)
        for (int64_t c = 0; c < width; c += DEPTH) {
            const __mmask32 columns = dim - c >= DEPTH ? ~0u : (1u << (dim - c)) - 1;
            __m512i row[4];
            for (int i = 0; i < 4; i++) row[i] = _mm512_maskz_loadu_epi16(r + i < count ? columns : 0, from + i * dim + c);
            for (int i = 0; i < 2; i++) interleave(row[i], row[i + 2], to + (r / 2 + i) * width + c);
        }
    return (operand){to, 1, width};
}

const block_path block_avx512 = {wide_rows, wide_columns, NULL, multiply, softmax_512, softmax_head_512};
const block_path block_avx512_bf16 = {rows_of, columns_of, lanes, multiply_pairs, softmax_512, softmax_head_512};
#endif
