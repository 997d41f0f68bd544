/* One token through quantized rows, straight from the planes. */
#include "planes.h"

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

/* Adds n times 4 columns of 32 rows. */
INLINE sums coarse_steps(enum kind kind, const uint8_t *base, const uint8_t *d4, const int8_t *x, int64_t n, sums s) {
    for (int64_t i = 0; i < n; i++) {
        __m256i w[4];
        ask_ahead(kind, base + 64 * i, d4 + 64 * i);
        unpacked(kind, base, d4, 64 * i, w);
        s = plus_products(s, w, picked(x + 4 * i));
    }
    return s;
}

INLINE void fine_steps(enum kind kind, const uint8_t *base, const uint8_t *d4, const int8_t *x, int64_t n, sums *high, sums *low) {
    sums h = *high, l = *low;
    for (int64_t i = 0; i < n; i++) {
        __m256i w[4];
        ask_ahead(kind, base + 64 * i, d4 + 64 * i);
        unpacked(kind, base, d4, 64 * i, w);
        h = plus_products(h, w, picked(x + 8 * i));
        l = plus_products(l, w, picked(x + 8 * i + 4));
    }
    *high = h;
    *low = l;
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

/* The two kinds that a stretch of nibbles [at, at + bytes) is made of, and where the first ends. */
INLINE int64_t low_part(const matrix *m, int64_t at, int64_t bytes) {
    const int64_t low = m->half - at;
    return low < 0 ? 0 : low > bytes ? bytes : low;
}

/* Adds a chunk's sums below level 8, of n times 4 columns. */
INLINE void code_sums_coarse(enum kind kind, const uint8_t *base, const uint8_t *d4, const int8_t *x, int64_t n, __m256i out[4]) {
    for (; n >= COARSE_STEPS; n -= COARSE_STEPS, base += 64 * COARSE_STEPS, d4 += 64 * COARSE_STEPS, x += 4 * COARSE_STEPS)
        widen_coarse(coarse_steps(kind, base, d4, x, COARSE_STEPS, nothing()), out);
    if (n) widen_coarse(coarse_steps(kind, base, d4, x, n, nothing()), out);
}

INLINE void code_sums_fine(const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n, __m256i out[4]) {
    sums h = nothing(), l = nothing();
    const int64_t low = low_part(m, at, 64 * n) / 64, past = at - m->half + 64 * low;
    if (low) fine_steps(BOTH_LOW, e->base + at, e->d4 + at, x, low, &h, &l);
    if (low < n) fine_steps(BOTH_HIGH, e->base + past, e->d4 + past, x + 8 * low, n - low, &h, &l);
    widen_fine(h, l, out);
    for (int r = 0; r < 4; r++) out[r] = _mm256_slli_epi32(out[r], 4);
    h = l = nothing();
    fine_steps(PLAIN, e->d8 + at, NULL, x, n, &h, &l);
    widen_fine(h, l, out);
}

/* A chunk's sums, of n times 4 columns. */
INLINE void code_sums(const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n, __m256i out[4]) {
    for (int r = 0; r < 4; r++) out[r] = _mm256_setzero_si256();
    if (e->level == 8) {
        code_sums_fine(m, e, at, x, n, out);
        return;
    }
    const int64_t low = low_part(m, at, 64 * n) / 64, past = at - m->half + 64 * low;
    if (e->level == 2) {
        if (low) code_sums_coarse(BASE_LOW, e->base + at, NULL, x, low, out);
        if (low < n) code_sums_coarse(BASE_HIGH, e->base + past, NULL, x + 4 * low, n - low, out);
    } else {
        if (low) code_sums_coarse(BOTH_LOW, e->base + at, e->d4 + at, x, low, out);
        if (low < n) code_sums_coarse(BOTH_HIGH, e->base + past, e->d4 + past, x + 4 * low, n - low, out);
    }
}

AVX2 void rows_of_one_token(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                            const float *scale, const float *sum, int64_t stride, uint16_t *y) {
    const float unit = e->level == 8 ? 1 / 16.0f : 1, zero = zero_of(e->level);
    const __m256i upper = _mm256_set1_epi32((int32_t)0xFFFF0000);
    const int64_t at = m->codes_at + block * m->cols * 16, width = width_at(e->level);
    __m256 total[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t c = 0; c < m->cols / chunk; c++) {
        __m256i codes[4];
        code_sums(m, e, at + c * chunk * 16, x + width * c * chunk * stride, chunk / 4, codes);
        const uint8_t *pairs = e->parameters + m->parameters_at + (c * chunk / m->group * m->rows + block * 32) * 4;
        prefetch(pairs + 2 * m->rows * 4); /* two groups on, in another page */
        prefetch(pairs + 2 * m->rows * 4 + 64);
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
