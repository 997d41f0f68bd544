/* The inner loops with vpdpbusd: four products of 8-bit numbers, added up in 32 bits by one instruction. The floating-point
 * operations and their order are those of dense_int8.c. */
#include "dense_vnni.h"

#include "../vectors/dot.h"
#include "../vectors/vnni.h"

#if defined(__x86_64__)
/* The sums of four vectors of 16. */
INLINE_VNNI __m128i horizontal_sums_512(const __m512i v[4]) {
    __m256i halves[4];
    for (int i = 0; i < 4; i++) halves[i] = _mm256_add_epi32(_mm512_castsi512_si256(v[i]), _mm512_extracti64x4_epi64(v[i], 1));
    return horizontal_sums_int(halves);
}

/* Bytes of a chunk's `columns` columns, 128 more each; bytes after them are weights of 0. */
INLINE_VNNI __m512i load_weights_512(const int8_t *w, int64_t columns) {
    const __m512i wide = columns >= DENSE_CHUNK ? _mm512_loadu_si512(w) : _mm512_maskz_loadu_epi8(((__mmask64)1 << columns) - 1, w);
    return _mm512_xor_si512(wide, _mm512_set1_epi8(-128));
}

VNNI void sums_of_row_vnni(const int8_t *w, int64_t columns, const int8_t *x, const int32_t *offset, int64_t chunks, float *to) {
    for (int64_t c = 0; c < chunks; c += 4) {
        __m512i sum[4];
        for (int64_t i = 0; i < 4; i++) {
            const int64_t k = (c + i) * DENSE_CHUNK;
            sum[i] = _mm512_setzero_si512();
            prefetch((const uint8_t *)w + k + PREFETCH_DISTANCE);
            if (k < columns) sum[i] = add_dot_bytes(sum[i], load_weights_512(w + k, columns - k), _mm512_loadu_si512(x + k));
        }
        const __m128i all = _mm_sub_epi32(horizontal_sums_512(sum), _mm_loadu_si128((const __m128i *)(offset + c)));
        _mm_storeu_ps(to + c, _mm_cvtepi32_ps(all));
    }
}

/* Transposes 16 rows of 16 numbers of 32 bits. */
INLINE_VNNI void transpose_512(__m512i v[16]) {
    __m512i w[16];
    for (int i = 0; i < 16; i += 2) w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(w[i + j], w[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(w[i + j], w[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            w[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0x88);
            w[i + j + 4] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        v[j] = _mm512_shuffle_i32x4(w[j], w[j + 8], 0x88);
        v[j + 8] = _mm512_shuffle_i32x4(w[j], w[j + 8], 0xdd);
    }
}

VNNI void dense_lay_out_vnni(const int8_t *w, int64_t cols, int64_t rows, int64_t columns, uint8_t *codes) {
    for (int64_t row = 0; row < BLOCK_ROWS; row += 16) {
        __m512i v[16];
        for (int64_t r = 0; r < 16; r++) v[r] = load_weights_512(w + min_of(row + r, rows - 1) * cols, columns);
        transpose_512(v);
        for (int i = 0; i < 16; i++) _mm512_store_si512(codes + i * 4 * BLOCK_ROWS + 4 * row, v[i]);
    }
}

/* Adds a strip's products with `tokens` tokens from t, a constant up to GEMM_TOKENS. */
INLINE_VNNI void strip_tokens_512(const dense_strip *s, int64_t t, int tokens, float *total) {
    for (int64_t c = 0; c < s->chunks; c++) {
        const int64_t at = c * s->x.tokens + t;
        __m512i sums[2][GEMM_TOKENS];
        for (int i = 0; i < tokens; i++) sums[0][i] = sums[1][i] = _mm512_set1_epi32(-s->x.offset[at + i]);
        add_fours(s->codes + c * DENSE_CHUNK * BLOCK_ROWS, 2, DENSE_CHUNK, s->x.q + at * DENSE_CHUNK, tokens, sums);
        for (int i = 0; i < tokens; i++)
            for (int h = 0; h < 2; h++) {
                float *into = total + (t + i) * BLOCK_ROWS + 16 * h;
                const __m512 numbers = _mm512_cvtepi32_ps(sums[h][i]);
                _mm512_store_ps(into, _mm512_fmadd_ps(numbers, _mm512_set1_ps(s->x.scale[at + i]), _mm512_load_ps(into)));
            }
    }
}

VNNI void dense_strip_vnni(const dense_strip *s, int64_t tokens, float *total) {
    int64_t t = 0;
    for (; t + 8 <= tokens; t += 8) strip_tokens_512(s, t, 8, total);
    if (tokens & 4) strip_tokens_512(s, t, 4, total), t += 4;
    if (tokens & 2) strip_tokens_512(s, t, 2, total), t += 2;
    if (tokens & 1) strip_tokens_512(s, t, 1, total);
}
#endif
