/* Rows of keys and values as they are stored (edgemoe/kv/formats.py): bf16, or the bf16 scales of blocks of 32 numbers and
 * then their codes, a byte each or 16 in 8 bytes. A code times its scale is exact in float32. */
#pragma once
#include "../vectors/bf16.h"

#if COMPILED
enum { KV_BF16, KV_Q8_0, KV_Q4_0, KV_FORMATS };
enum { KV_BLOCK = 32, KV_MOST_DIM = 1024 }; /* numbers of a block; largest size of a head */

/* Bytes of a row of `dim` numbers; dim % 16 == 0. */
static inline int64_t kv_row_bytes(int64_t format, int64_t dim) {
    const int64_t scales = 2 * ceil_div(dim, KV_BLOCK);
    return format == KV_BF16 ? 2 * dim : format == KV_Q8_0 ? scales + dim : scales + dim / 2;
}

/* Numbers [i, i + 16) of a row; i % 16 == 0. */
INLINE void kv_sixteen(const int format, const uint8_t *row, int64_t dim, int64_t i, __m256 wide[2]) {
    const uint16_t *halves = (const uint16_t *)row;
    if (format == KV_BF16) {
        wide[0] = eight_from_bf16(halves + i);
        wide[1] = eight_from_bf16(halves + i + 8);
        return;
    }
    const uint8_t *codes = row + 2 * ceil_div(dim, KV_BLOCK);
    const __m256 scale = _mm256_set1_ps(from_bf16(halves[i / KV_BLOCK]));
    __m256i low, high;
    if (format == KV_Q8_0) {
        low = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        high = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i + 8)));
    } else {
        const __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i / 2)));
        low = _mm256_sub_epi32(_mm256_and_si256(pairs, _mm256_set1_epi32(15)), _mm256_set1_epi32(8));
        high = _mm256_sub_epi32(_mm256_srli_epi32(pairs, 4), _mm256_set1_epi32(8));
    }
    wide[0] = _mm256_mul_ps(_mm256_cvtepi32_ps(low), scale);
    wide[1] = _mm256_mul_ps(_mm256_cvtepi32_ps(high), scale);
}

/* Rows of a format, one after another, as bf16 [rows, dim]: in their place, or rounded into `to`. */
const uint16_t *kv_bf16(int64_t format, const uint8_t *from, int64_t rows, int64_t dim, uint16_t *to);

/* Stores x [dim] as a row; dim % 16 == 0, at most KV_MOST_DIM. The bf16 numbers are multiplied by the Hadamard matrix of
 * `rotation` numbers first; 0: not. */
void kv_store(int64_t format, const uint16_t *x, int64_t dim, int64_t rotation, uint8_t *row);

/* Multiplies each run of `size` numbers of x [count], a power of two that divides count, with the Hadamard matrix over
 * sqrt(size); 0: x stays as it is. */
void kv_rotate(float *x, int64_t count, int64_t size);
#endif
