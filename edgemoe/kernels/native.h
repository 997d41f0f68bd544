/* What the files of the compiled kernel share: numbers in bf16, and threads. */
#ifndef EDGEMOE_NATIVE_H
#define EDGEMOE_NATIVE_H
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define INLINE static inline __attribute__((always_inline)) AVX2

typedef struct pool pool;
typedef void (*task_fn)(void *job, int64_t task);

/* Calls fn(job, task) for every task below `tasks`, on all threads of the pool, and waits for them. */
void edgemoe_run(pool *p, task_fn fn, void *job, int64_t tasks);

void edgemoe_rms_norm(const uint16_t *x, const uint16_t *weight, float epsilon, int64_t rows, int64_t cols, uint16_t *y);

INLINE float from_bf16(uint16_t bits) {
    union { uint32_t i; float f; } u = {(uint32_t)bits << 16};
    return u.f;
}

INLINE uint16_t to_bf16(float x) {
    union { float f; uint32_t i; } u = {x};
    const uint32_t rounded = (u.i + 0x7fff + (u.i >> 16 & 1)) >> 16, nan = u.i >> 16 | 0x40;
    return (uint16_t)((u.i & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

/* 8 bf16 numbers in float32. */
INLINE __m256 eight_from_bf16(const uint16_t *x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}

INLINE float added_up(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
#endif
#endif
