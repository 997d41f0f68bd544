/* One token through quantized rows, straight from the planes. */
#include "vnni.h"

#if defined(__x86_64__)
/* The columns of 4 numbers that `unpacked` has in each half. */
INLINE __m256i picked(const int8_t *x) {
    const __m256i pick = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1,
                                          2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
    return _mm256_shuffle_epi8(four_bytes(x), pick);
}

/* 16-bit sums of rows 0-7, 8-15, 16-23, 24-31, two columns' in each half: of coarse numbers, or of halves of fine ones. */
typedef struct { __m256i of[4]; } sums;

INLINE sums nothing(void) {
    const __m256i zero = _mm256_setzero_si256();
    return (sums){{zero, zero, zero, zero}};
}

INLINE sums plus_products(sums s, const __m256i w[4], __m256i x) {
    for (int r = 0; r < 4; r++) s.of[r] = _mm256_add_epi16(s.of[r], _mm256_maddubs_epi16(w[r], x));
    return s;
}

/* Adds 32-bit sums of 32 rows, 8 in each. */
INLINE void widen_coarse(sums s, __m256i out[4]) {
    for (int r = 0; r < 4; r++) {
        const __m256i lower = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(s.of[r]));
        const __m256i upper = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(s.of[r], 1));
        out[r] = _mm256_add_epi32(out[r], _mm256_add_epi32(lower, upper));
    }
}

INLINE void widen_fine(sums h, sums l, __m256i out[4]) {
    const __m256i weights = _mm256_set1_epi32(128 << 16 | 1);
    for (int r = 0; r < 4; r++) {
        const __m256i p = _mm256_madd_epi16(_mm256_unpacklo_epi16(l.of[r], h.of[r]), weights);
        const __m256i q = _mm256_madd_epi16(_mm256_unpackhi_epi16(l.of[r], h.of[r]), weights);
        const __m256i both = _mm256_add_epi32(_mm256_permute2x128_si256(p, q, 0x20), _mm256_permute2x128_si256(p, q, 0x31));
        out[r] = _mm256_add_epi32(out[r], both);
    }
}

/* A chunk's sums below level 8, of n times 4 columns, n a multiple of COARSE_STEPS. */
INLINE void code_sums_coarse(int with_d4, const expert *e, int64_t at, const int8_t *x, int64_t n, __m256i out[4]) {
    for (; n > 0; n -= COARSE_STEPS) {
        sums s = nothing();
        /* All of them unrolled would be added up in another order, for which there are too few registers. */
#pragma GCC unroll 2
        for (int i = 0; i < COARSE_STEPS; i++, at += 32, x += 4) {
            __m256i w[4];
            upper_nibbles(with_d4, e, at, w);
            s = plus_products(s, w, picked(x));
        }
        widen_coarse(s, out);
    }
}

/* Those of level 8, of the upper nibbles or of the lower ones. */
INLINE void code_sums_fine(int lower, const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n, __m256i out[4]) {
    sums h = nothing(), l = nothing();
    for (; n > 0; n--, at += 32, x += 8) {
        __m256i w[4];
        if (lower) lower_nibbles(m, e, at, w);
        else upper_nibbles(1, e, at, w);
        h = plus_products(h, w, picked(x));
        l = plus_products(l, w, picked(x + 4));
    }
    widen_fine(h, l, out);
}

/* A chunk's sums. */
INLINE void code_sums(const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n, __m256i out[4]) {
    for (int r = 0; r < 4; r++) out[r] = _mm256_setzero_si256();
    if (e->level == 2) code_sums_coarse(0, e, at, x, n, out);
    else if (e->level == 4) code_sums_coarse(1, e, at, x, n, out);
    else {
        code_sums_fine(0, m, e, at, x, n, out);
        for (int r = 0; r < 4; r++) out[r] = _mm256_slli_epi32(out[r], 4);
        code_sums_fine(1, m, e, at, x, n, out);
    }
}

AVX2 void rows_of_one_token(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                            const float *scale, const float *sum, int64_t stride, uint16_t *y) {
    if (use_vnni) {
        rows_of_one_token_vnni(m, e, block, chunk, x, scale, sum, stride, y);
        return;
    }
    const float unit = e->level == 8 ? 1 / 16.0f : 1, zero = zero_of(e->level);
    const __m256i upper = _mm256_set1_epi32((int32_t)0xFFFF0000);
    const int64_t at = m->codes_at + block * m->cols * 8, width = width_at(e->level);
    __m256 total[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t c = 0; c < m->cols / chunk; c++) {
        __m256i codes[4];
        code_sums(m, e, at + c * chunk * 8, x + width * c * chunk * stride, chunk / 4, codes);
        const uint8_t *pairs = pairs_of(m, e, block, c, chunk);
        ask_for_pairs(m, e, block, c, chunk);
        const __m256 by = _mm256_set1_ps(unit * scale[c * stride]), all = _mm256_set1_ps(sum[c * stride]);
        const __m256 shift = _mm256_set1_ps(zero * sum[c * stride]);
        for (int r = 0; r < 4; r++) {
            const __m256i pair = _mm256_loadu_si256((const __m256i *)(pairs + 32 * r));
            const __m256 step = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
            const __m256 centre = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
            total[r] = _mm256_fmadd_ps(step, _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes[r]), by, shift), total[r]);
            total[r] = _mm256_fmadd_ps(centre, all, total[r]);
        }
    }
    float out[32];
    for (int r = 0; r < 4; r++) _mm256_storeu_ps(out + 8 * r, total[r]);
    for (int r = 0; r < 32; r++) y[r] = to_bf16(out[r]);
}
#endif
