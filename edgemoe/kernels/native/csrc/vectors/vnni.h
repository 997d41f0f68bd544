/* Sums of products of small integers in 512 bits, by AVX-512 with VNNI. */
#pragma once
#include "../block_rows.h"
#include "bf16.h"

#if defined(__x86_64__)
#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))
#define INLINE_VNNI static inline __attribute__((always_inline)) VNNI

/* Assembly: with the intrinsics GCC copies sums between registers where many are live. */
INLINE_VNNI __m512i add_dot_bytes(__m512i sum, __m512i of_0_to_255, __m512i others) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(of_0_to_255), "v"(others));
    return sum;
}

INLINE_VNNI __m512i add_dot_words(__m512i sum, __m512i a, __m512i b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

INLINE_VNNI int32_t four_bytes(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return four;
}

enum { GEMM_TOKENS = 8 }; /* tokens whose sums with 32 rows fit into registers */

/* Adds the sums of a chunk laid out by fours, of `halves` times 16 rows and `tokens` tokens, at most GEMM_TOKENS. */
INLINE_VNNI void add_fours(const uint8_t *tile, int halves, int64_t chunk, const int8_t *x, int tokens, __m512i sums[2][GEMM_TOKENS]) {
    for (int64_t i = 0; i < chunk / 4; i++, tile += 4 * BLOCK_ROWS, x += 4) {
        __m512i rows[2];
        for (int h = 0; h < halves; h++) rows[h] = _mm512_load_si512((const __m512i *)tile + h);
        for (int t = 0; t < tokens; t++) {
            const __m512i v = _mm512_set1_epi32(four_bytes(x + t * chunk));
            for (int h = 0; h < halves; h++) sums[h][t] = add_dot_bytes(sums[h][t], rows[h], v);
        }
    }
}
#endif
