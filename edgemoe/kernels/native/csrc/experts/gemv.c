/* One token through a block of quantized rows, straight from the planes. */
#include "gemv.h"

#include "../vectors/dot.h"
#include "vnni.h"

#if COMPILED
/* Spreads 4 activations to the column order of unpack_nibbles: the first two in the lower half, the last two in the
 * upper one. */
INLINE __m256i spread_four(const int8_t *x) {
    const __m256i order = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1,
                                           2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
    return _mm256_shuffle_epi8(broadcast_four(x), order);
}

/* 16-bit sums of rows 0-7, 8-15, 16-23 and 24-31, two columns' in each half. */
typedef struct { __m256i of[4]; } sums;

INLINE sums zero_sums(void) {
    const __m256i zero = _mm256_setzero_si256();
    return (sums){{zero, zero, zero, zero}};
}

INLINE sums add_products(sums s, const __m256i w[4], __m256i x) {
    for (int r = 0; r < 4; r++) s.of[r] = _mm256_add_epi16(s.of[r], _mm256_maddubs_epi16(w[r], x));
    return s;
}

/* Adds A8 sums to 32-bit sums of 32 rows, 8 in each. */
INLINE void widen_a8(sums s, __m256i out[4]) {
    for (int r = 0; r < 4; r++) {
        const __m256i lower = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(s.of[r]));
        const __m256i upper = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(s.of[r], 1));
        out[r] = _mm256_add_epi32(out[r], _mm256_add_epi32(lower, upper));
    }
}

/* Adds A14 sums, 128 h + l. */
INLINE void widen_a14(sums h, sums l, __m256i out[4]) {
    const __m256i weights = _mm256_set1_epi32(128 << 16 | 1);
    for (int r = 0; r < 4; r++) {
        const __m256i p = _mm256_madd_epi16(_mm256_unpacklo_epi16(l.of[r], h.of[r]), weights);
        const __m256i q = _mm256_madd_epi16(_mm256_unpackhi_epi16(l.of[r], h.of[r]), weights);
        const __m256i both = _mm256_add_epi32(_mm256_permute2x128_si256(p, q, 0x20), _mm256_permute2x128_si256(p, q, 0x31));
        out[r] = _mm256_add_epi32(out[r], both);
    }
}

/* Adds the sums of a chunk of 4 n columns at a level below 8; n is a multiple of a8_steps. */
INLINE void chunk_sums_a8(int64_t level, const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n, __m256i out[4]) {
    for (; n > 0; n -= a8_steps(level)) {
        sums s = zero_sums();
        /* A full unroll would reorder the sums to more than there are registers for. */
#pragma GCC unroll 2
        for (int i = 0; i < a8_steps(level); i++, at += 32, x += 4) {
            __m256i w[4];
            unpack_codes(level, m, e, at, w);
            s = add_products(s, w, spread_four(x));
        }
        widen_a8(s, out);
    }
}

/* Adds the sums of a chunk at level 8: of the codes' upper nibbles or of their lower ones. */
INLINE void chunk_sums_a14(int lower, const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n, __m256i out[4]) {
    sums h = zero_sums(), l = zero_sums();
    for (; n > 0; n--, at += 32, x += 8) {
        __m256i w[4];
        if (lower) lower_nibbles(m, e, at, w);
        else upper_nibbles(1, e, at, w);
        h = add_products(h, w, spread_four(x));
        l = add_products(l, w, spread_four(x + 4));
    }
    widen_a14(h, l, out);
}

/* Four columns of a row in each dword: of 8 columns of 8 rows, unpacked by fours in a and b, rows 0-3 in out[0] and 4-7 in
 * out[1], the even columns in the lower half and the odd ones in the upper. */
INLINE void join_eights(__m256i a, __m256i b, __m256i out[2]) {
    out[0] = _mm256_unpacklo_epi16(a, b);
    out[1] = _mm256_unpackhi_epi16(a, b);
}

/* Spreads 8 activations, each four's in the order 0 2 1 3, to the column order of join_eights. */
INLINE __m256i spread_eight(const int8_t *first, const int8_t *last) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 0, 1, 4, 5, 0, 1, 4, 5, 0, 1, 4, 5,
                                           2, 3, 6, 7, 2, 3, 6, 7, 2, 3, 6, 7, 2, 3, 6, 7);
    return _mm256_shuffle_epi8(_mm256_unpacklo_epi32(broadcast_four(first), broadcast_four(last)), order);
}

/* The sums of rows 0-7 of join_eights' products. */
INLINE __m256i fold_lanes(__m256i first, __m256i last) {
    return _mm256_add_epi32(_mm256_permute2x128_si256(first, last, 0x20), _mm256_permute2x128_si256(first, last, 0x31));
}

/* chunk_sums with four products an instruction. n % 2 == 0. */
INLINE void chunk_sums_vnni(enum dot dot, int64_t level, const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n,
                            __m256i out[4]) {
    __m256i high[4][2], low[4][2]; /* level 8: the sum is 128 high + low; others: low */
    for (int r = 0; r < 4; r++) high[r][0] = high[r][1] = low[r][0] = low[r][1] = _mm256_setzero_si256();
    for (const int64_t step = level == 8 ? 8 : 4; n > 0; n -= 2, at += 64, x += 2 * step) {
        __m256i a[4], b[4], c[4], d[4], rows[2];
        unpack_codes(level < 8 ? level : 4, m, e, at, a);
        unpack_codes(level < 8 ? level : 4, m, e, at + 32, b);
        if (level == 8) {
            lower_nibbles(m, e, at, c);
            lower_nibbles(m, e, at + 32, d);
        }
        const __m256i v = spread_eight(x, x + step), l = level == 8 ? spread_eight(x + 4, x + 12) : v;
        for (int r = 0; r < 4; r++) {
            if (level == 8) a[r] = _mm256_or_si256(_mm256_slli_epi16(a[r], 4), c[r]), b[r] = _mm256_or_si256(_mm256_slli_epi16(b[r], 4), d[r]);
            join_eights(a[r], b[r], rows);
            for (int i = 0; i < 2; i++) {
                if (level == 8) high[r][i] = add_bytes(dot, 1, high[r][i], rows[i], v);
                low[r][i] = add_bytes(dot, level == 8, low[r][i], rows[i], l);
            }
        }
    }
    for (int r = 0; r < 4; r++) {
        out[r] = fold_lanes(low[r][0], low[r][1]);
        if (level == 8) out[r] = _mm256_add_epi32(out[r], _mm256_slli_epi32(fold_lanes(high[r][0], high[r][1]), 7));
    }
}

INLINE void chunk_sums(enum dot dot, int64_t level, const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n,
                       __m256i out[4]) {
    if (dot != DOT_PLAIN) {
        chunk_sums_vnni(dot, level, m, e, at, x, n, out);
        return;
    }
    for (int r = 0; r < 4; r++) out[r] = _mm256_setzero_si256();
    if (level < 8) chunk_sums_a8(level, m, e, at, x, n, out);
    else {
        chunk_sums_a14(0, m, e, at, x, n, out);
        for (int r = 0; r < 4; r++) out[r] = _mm256_slli_epi32(out[r], 4);
        chunk_sums_a14(1, m, e, at, x, n, out);
    }
}

INLINE void gemv_at_level(enum dot dot, int64_t level, const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                          const float *scale, const float *sum, int64_t stride, uint16_t *y) {
    const float unit = code_unit(level), zero = zero_point(level);
    const int64_t at = m->codes_at + block * m->cols * 8, bytes = activation_bytes(level);
    __m256 total[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t c = 0; c < m->cols / chunk; c++) {
        __m256i codes[4];
        chunk_sums(dot, level, m, e, at + c * chunk * 8, x + bytes * c * chunk * stride, chunk / 4, codes);
        const uint8_t *scales = scales_of(m, e, block, c, chunk);
        prefetch_scales(m, e, block, c, chunk);
        const __m256 by = _mm256_set1_ps(unit * scale[c * stride]), all = _mm256_set1_ps(sum[c * stride]);
        const __m256 shift = _mm256_set1_ps(zero * sum[c * stride]);
        for (int r = 0; r < 4; r++) {
            const affine a = affine_of(scales + 32 * r);
            total[r] = _mm256_fmadd_ps(a.scale, _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes[r]), by, shift), total[r]);
            total[r] = _mm256_fmadd_ps(a.centre, all, total[r]);
        }
    }
    float out[32];
    for (int r = 0; r < 4; r++) _mm256_storeu_ps(out + 8 * r, total[r]);
    for (int r = 0; r < 32; r++) y[r] = to_bf16(out[r]);
}

AVX2 void gemv_block(enum path path, const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                     const float *scale, const float *sum, int64_t stride, uint16_t *y) {
    const enum dot dot = dot_of(path);
#define AT_LEVEL(dot, level) gemv_at_level(dot, level, m, e, block, chunk, x, scale, sum, stride, y)
#define ANY_LEVEL(dot) \
    do { \
        switch (level_of(m, e)) { \
        case 2: AT_LEVEL(dot, 2); break; \
        case 4: AT_LEVEL(dot, 4); break; \
        case 5: AT_LEVEL(dot, 5); break; \
        case 6: AT_LEVEL(dot, 6); break; \
        default: AT_LEVEL(dot, 8); \
        } \
    } while (0)
    if (IS_AVX512(path)) gemv_block_vnni(m, e, block, chunk, x, scale, sum, stride, y);
    else if (dot == DOT_PLAIN) ANY_LEVEL(DOT_PLAIN);
    else BY_ONE_INSTRUCTION(dot, ANY_LEVEL);
#undef ANY_LEVEL
#undef AT_LEVEL
}
#endif
