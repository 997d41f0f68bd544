/* bf16 conversions, primitives in 256 bits and prefetching, for every file of the compiled kernel. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Whether the architecture has code: x86-64, and aarch64 under Linux, where neon.h gives AVX2's operations. */
#if defined(__x86_64__) || (defined(__aarch64__) && defined(__linux__))
#define COMPILED 1
#else
#define COMPILED 0
#endif

#if COMPILED
#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma")))
#else
#define AVX2
#endif
#define INLINE static inline __attribute__((always_inline)) AVX2
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include "neon.h"
#endif

/* Before a loop none of whose iterations reads what another one writes. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE float from_bf16(uint16_t bits) {
    union { uint32_t i; float f; } u = {(uint32_t)bits << 16};
    return u.f;
}

/* Rounds to nearest even; NaN stays NaN. */
INLINE uint16_t to_bf16(float x) {
    union { float f; uint32_t i; } u = {x};
    const uint32_t rounded = (u.i + 0x7fff + (u.i >> 16 & 1)) >> 16, nan = u.i >> 16 | 0x40;
    return (uint16_t)((u.i & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

/* 8 bf16 numbers as float32. */
INLINE __m256 eight_from_bf16(const uint16_t *x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}

/* to_bf16 of 8 numbers, with the same bits. */
INLINE __m128i eight_to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even);
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i chosen = _mm256_or_si256(_mm256_and_si256(nan, quiet), _mm256_andnot_si256(nan, rounded));
    const __m256i words = _mm256_srai_epi32(chosen, 16); /* signed, so that packing does not clamp them */
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packs_epi32(words, words), 0xD8));
}

/* 8 float32 numbers rounded to bf16; NaN stays NaN where its last 16 bits are zeros, as those of a bf16 number's products are. */
INLINE __m256 eight_rounded(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even);
    return _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32((int32_t)0xffff0000)));
}

INLINE __m256i broadcast_four(const int8_t *x) { return _mm256_castps_si256(_mm256_broadcast_ss((const float *)x)); }

INLINE __m256i load_bytes(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

INLINE float horizontal_sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

#define BITS 256
#define VECTOR __m256
#define INTEGERS __m256i
#define NAME(name) name
#define INLINE_VECTOR INLINE
#define NEAREST(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define AS_FLOATS(x) _mm256_castsi256_ps(x)
#define AS_INTEGERS(x) _mm256_castps_si256(x)
#include "exponential.h"
#undef BITS
#undef VECTOR
#undef INTEGERS
#undef NAME
#undef INLINE_VECTOR
#undef NEAREST
#undef AS_FLOATS
#undef AS_INTEGERS

/* Bytes between a load of weights and its prefetch: hardware prefetching stops at every page boundary. */
enum { PREFETCH_DISTANCE = 1024 };

/* Into the second-level cache: so many lines on their way into the first would leave no place there for the loads. */
INLINE void prefetch(const uint8_t *line) { _mm_prefetch((const char *)line, _MM_HINT_T1); }

/* The largest magnitude of n bf16 numbers; NaN if any is NaN or infinite, so that every result becomes NaN. */
INLINE float max_magnitude(const uint16_t *x, int64_t n) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t bits = x[i] & 0x7fff;
        largest = bits > largest ? bits : largest;
    }
    return from_bf16(largest < 0x7f80 ? largest : 0x7fc0);
}

/* What numbers up to `largest` are multiplied by to become integers up to `most`; 0, which makes them zeros, where that is no
 * finite number. */
INLINE float by_largest(float most, float largest) {
    const float by = most / largest;
    return by <= 3.4e38f ? by : 0;
}
#endif
