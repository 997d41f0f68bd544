/* Sums of products of small integers in 256 bits, by one instruction or by several. The asm takes no target of its own,
 * so that one function, with a constant `dot`, becomes each path's. */
#pragma once
#include "bf16.h"
#include "paths.h"

#if defined(__x86_64__)
/* Assembly: with the intrinsics GCC copies sums between registers where many are live. */
#if COMPILED_AVX_VNNI
#define VEX "%{vex%} "
#else
#define VEX "" /* never run: edgemoe_paths does not offer it */
#endif

/* Adds to each of 8 sums the products of four numbers from 0 to 255 with four from -128 to 127. */
INLINE __m256i add_bytes(enum dot dot, __m256i sum, __m256i of_0_to_255, __m256i others) {
    if (dot == DOT_VEX) __asm__(VEX "vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(of_0_to_255), "x"(others));
    else __asm__("vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(of_0_to_255), "x"(others));
    return sum;
}

/* Adds to each of 8 sums the products of two pairs of 16-bit numbers. */
INLINE __m256i add_words(enum dot dot, __m256i sum, __m256i a, __m256i b) {
    if (dot == DOT_AVX2) return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    if (dot == DOT_VEX) __asm__(VEX "vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    else __asm__("vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

INLINE int32_t horizontal_sum_int(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
}

/* The sums of four vectors of 8. */
INLINE __m128i horizontal_sums_int(const __m256i v[4]) {
    const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}
#endif
