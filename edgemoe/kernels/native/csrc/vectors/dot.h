/* Sums of products of small integers in 256 bits, by one instruction or by several. The asm takes no target of its own,
 * so that one function, with a constant `dot`, becomes the function of each path. */
#pragma once
#include "bf16.h"
#include "../paths.h"

#if COMPILED
/* Whether a dot multiplies numbers from 0 to 255 with signed ones, so that signed weights have 128 added to them. */
INLINE int takes_unsigned(enum dot dot) { return dot == DOT_VEX || dot == DOT_EVEX || dot == DOT_USDOT; }

INLINE __m256i weights_for(enum dot dot, __m256i w) {
    return takes_unsigned(dot) ? _mm256_xor_si256(w, _mm256_set1_epi8(-128)) : w;
}
#endif

#if defined(__x86_64__)
/* Calls f with the constant of a dot that is one instruction. */
#define BY_ONE_INSTRUCTION(dot, f) \
    do { \
        if ((dot) == DOT_VEX) f(DOT_VEX); \
        else f(DOT_EVEX); \
    } while (0)

/* Assembly: with the intrinsics GCC copies sums between registers where many are live. */
#if COMPILED_AVX_VNNI
#define VEX "%{vex%} "
#else
#define VEX "" /* never run: edgemoe_paths does not offer it */
#endif

/* Adds to each of 8 sums the products of four numbers from 0 to 255, or to 127 unless `wide`, with four from -128 to 127. */
INLINE __m256i add_bytes(enum dot dot, int wide, __m256i sum, __m256i of_0_to_255, __m256i others) {
    (void)wide;
    if (dot == DOT_VEX) __asm__(VEX "vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(of_0_to_255), "x"(others));
    else __asm__("vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(of_0_to_255), "x"(others));
    return sum;
}

/* Adds to each of 8 sums the products of four numbers from -127 to 127, weights_for(dot, w), with four of x. */
INLINE __m256i add_weights(enum dot dot, __m256i sum, __m256i w, __m256i x) {
    if (dot != DOT_PLAIN) return add_bytes(dot, 1, sum, w, x);
    /* Pairs fit into 16 bits: 2 * 127 * 127. */
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* Adds to each of 8 sums the products of two pairs of 16-bit numbers. */
INLINE __m256i add_words(enum dot dot, __m256i sum, __m256i a, __m256i b) {
    if (dot == DOT_PLAIN) return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    if (dot == DOT_VEX) __asm__(VEX "vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    else __asm__("vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}
#elif COMPILED
#define BY_ONE_INSTRUCTION(dot, f) \
    do { \
        if ((dot) == DOT_USDOT) f(DOT_USDOT); \
        else f(DOT_SDOT); \
    } while (0)

/* SDOT and USDOT as numbers, with those of their registers: an assembler takes their names for some processors only, and the
 * functions around them are compiled for all. */
__asm__(".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n\t"
        ".set .Lregister_v\\n, \\n\n\t.endr");
#define NEON_DOT(instruction, sum, a, b) \
    __asm__(".inst " instruction " | (.Lregister_%2 << 16) | (.Lregister_%1 << 5) | .Lregister_%0" : "+w"(sum) : "w"(a), "w"(b))
#define SDOT "0x4e809400"
#define USDOT "0x4e809c00"

/* Adds to each of 8 sums the products of four numbers from 0 to 255, or to 127 unless `wide`, with four from -128 to 127.
 * SDOT takes wide ones less 128, and then twice 64 in their place. */
INLINE __m256i add_bytes(enum dot dot, int wide, __m256i sum, __m256i of_0_to_255, __m256i others) {
    const __m256i of_sdot = wide ? _mm256_xor_si256(of_0_to_255, _mm256_set1_epi8(-128)) : of_0_to_255;
    const __m256i half = _mm256_set1_epi8(64);
    for (int i = 0; i < 2; i++) {
        if (dot == DOT_USDOT) {
            NEON_DOT(USDOT, sum.of[i], of_0_to_255.of[i], others.of[i]);
            continue;
        }
        NEON_DOT(SDOT, sum.of[i], of_sdot.of[i], others.of[i]);
        for (int twice = 0; wide && twice < 2; twice++) NEON_DOT(SDOT, sum.of[i], half.of[i], others.of[i]);
    }
    return sum;
}

/* Adds to each of 8 sums the products of four numbers from -127 to 127, weights_for(dot, w), with four of x. */
INLINE __m256i add_weights(enum dot dot, __m256i sum, __m256i w, __m256i x) {
    for (int i = 0; i < 2; i++) {
        if (dot == DOT_USDOT) NEON_DOT(USDOT, sum.of[i], w.of[i], x.of[i]);
        else if (dot == DOT_SDOT) NEON_DOT(SDOT, sum.of[i], w.of[i], x.of[i]);
        else {
            const int8x16_t a = (int8x16_t)w.of[i], b = (int8x16_t)x.of[i];
            const int16x8_t first = vmull_s8(vget_low_s8(a), vget_low_s8(b)), last = vmull_high_s8(a, b);
            sum.of[i] = vaddq_s32(sum.of[i], vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(last)));
        }
    }
    return sum;
}

/* Adds to each of 8 sums the products of two pairs of 16-bit numbers, for which NEON has no such instruction. */
INLINE __m256i add_words(enum dot dot, __m256i sum, __m256i a, __m256i b) {
    (void)dot;
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
#endif

#if COMPILED
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
