/* Rows of keys and values: stored, rotated, read as bf16; the bits of edgemoe/kv/formats.py. */
#include "kv_rows.h"

#if COMPILED
#include <math.h>

AVX2 void kv_rotate(float *x, int64_t count, int64_t size) {
    if (!size) return;
    for (int64_t step = 1; step < size; step *= 2)
        for (int64_t from = 0; from < count; from += 2 * step)
            for (int64_t i = from; i < from + step; i++) {
                const float a = x[i], b = x[i + step];
                x[i] = a + b;
                x[i + step] = a - b;
            }
    const float by = (float)(1 / sqrt((double)size));
    for (int64_t i = 0; i < count; i++) x[i] *= by;
}

/* The number of larger magnitude, or the same, that is a bf16. */
static uint16_t away_from_zero(float x) {
    union { float f; uint32_t i; } u = {x};
    return (uint16_t)((u.i + 0xffff) >> 16);
}

/* Codes of a block of `count` numbers, -127 to 127 or -8 to 7; returns the bits of its scale. */
AVX2 static uint16_t quantize(int64_t format, const float *x, int64_t count, int8_t *codes) {
    float high = 0, low = 0;
    int finite = 1;
    for (int64_t i = 0; i < count; i++) {
        finite &= isfinite(x[i]) != 0;
        high = x[i] > high ? x[i] : high;
        low = x[i] < low ? x[i] : low;
    }
    const float largest = high > -low ? high : -low;
    const uint16_t bits = away_from_zero(format == KV_Q8_0 ? largest / 127 : (-low > high ? low : high) / -8);
    const float by = from_bf16(bits);
    memset(codes, 0, (size_t)count);
    if (!finite || by == 0) return finite ? 0 : 0x7fc0;
    const float lowest = format == KV_Q8_0 ? -127 : -8, highest = format == KV_Q8_0 ? 127 : 7;
    for (int64_t i = 0; i < count; i++) {
        const float code = rintf(x[i] / by);
        codes[i] = (int8_t)(code < lowest ? lowest : code > highest ? highest : code);
    }
    return bits;
}

AVX2 void kv_store(int64_t format, const uint16_t *x, int64_t dim, int64_t rotation, uint8_t *row) {
    if (format == KV_BF16) {
        memcpy(row, x, (size_t)dim * 2);
        return;
    }
    float wide[KV_MOST_DIM];
    int8_t codes[KV_MOST_DIM];
    uint16_t *scales = (uint16_t *)row;
    uint8_t *to = row + 2 * ceil_div(dim, KV_BLOCK);
    for (int64_t i = 0; i < dim; i++) wide[i] = from_bf16(x[i]);
    kv_rotate(wide, dim, rotation);
    for (int64_t i = 0; i < dim; i += KV_BLOCK)
        scales[i / KV_BLOCK] = quantize(format, wide + i, min_of(KV_BLOCK, dim - i), codes + i);
    if (format == KV_Q8_0) memcpy(to, codes, (size_t)dim);
    else
        for (int64_t i = 0; i < dim / 2; i++) {
            const int8_t *pair = codes + i / 8 * 16 + i % 8;
            to[i] = (uint8_t)((pair[0] + 8) | (pair[8] + 8) << 4);
        }
}

INLINE void round_rows(const int format, const uint8_t *from, int64_t rows, int64_t dim, uint16_t *to) {
    const int64_t stride = kv_row_bytes(format, dim);
    for (; rows-- > 0; from += stride, to += dim)
        for (int64_t i = 0; i < dim; i += 16) {
            __m256 wide[2];
            kv_sixteen(format, from, dim, i, wide);
            for (int h = 0; h < 2; h++) {
                const __m256i words = _mm256_srai_epi32(_mm256_castps_si256(rounded_to_bf16(wide[h])), 16);
                const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(words, words), 0xD8);
                _mm_storeu_si128((__m128i *)(to + i + 8 * h), _mm256_castsi256_si128(packed));
            }
        }
}

AVX2 const uint16_t *kv_bf16(int64_t format, const uint8_t *from, int64_t rows, int64_t dim, uint16_t *to) {
    if (format == KV_BF16) return (const uint16_t *)from;
    if (format == KV_Q8_0) round_rows(KV_Q8_0, from, rows, dim, to);
    else round_rows(KV_Q4_0, from, rows, dim, to);
    return to;
}
#endif
