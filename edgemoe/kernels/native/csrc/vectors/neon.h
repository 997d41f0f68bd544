/* The vector operations of the sources on aarch64: AVX2's names over pairs of NEON's 128-bit vectors, with AVX2's bits.
 *
 * Most operations of AVX2 are two of 128 bits, a half each, and so are these. Where the instruction sets differ the x86 result
 * counts: the minimum or maximum of a NaN and a number is the second operand, a float outside of int32 becomes -2^31, bytes
 * whose index has its highest bit become 0. Of a NaN's bits only that it is one is the same. Included by bf16.h alone. */
#pragma once
#include <arm_neon.h>

typedef float32x4_t __m128;
typedef int32x4_t __m128i;
typedef struct { __m128 of[2]; } __m256;
typedef struct { __m128i of[2]; } __m256i;

/* Operations on one, two or three vectors x, y, z of 128 bits, and the same on both halves of 256. */
#define HALVES_1(vector, name) \
    INLINE vector _mm256_##name(vector x) { return (vector){{half_##name(x.of[0]), half_##name(x.of[1])}}; }
#define HALVES_2(vector, name) \
    INLINE vector _mm256_##name(vector x, vector y) { \
        return (vector){{half_##name(x.of[0], y.of[0]), half_##name(x.of[1], y.of[1])}}; \
    }
#define HALVES_3(vector, name) \
    INLINE vector _mm256_##name(vector x, vector y, vector z) { \
        return (vector){{half_##name(x.of[0], y.of[0], z.of[0]), half_##name(x.of[1], y.of[1], z.of[1])}}; \
    }

/* An operation on integers a and b of a type. */
#define INTEGERS(name, type, result) \
    INLINE __m128i half_##name(__m128i x, __m128i y) { \
        const type a = (type)x, b = (type)y; \
        return (__m128i)(result); \
    } \
    HALVES_2(__m256i, name)

INTEGERS(add_epi16, uint16x8_t, a + b)
INTEGERS(add_epi32, uint32x4_t, a + b)
INTEGERS(sub_epi16, uint16x8_t, a - b)
INTEGERS(sub_epi32, uint32x4_t, a - b)
INTEGERS(and_si256, uint32x4_t, a & b)
INTEGERS(or_si256, uint32x4_t, a | b)
INTEGERS(xor_si256, uint32x4_t, a ^ b)
INTEGERS(andnot_si256, uint32x4_t, ~a & b)
INTEGERS(cmpgt_epi32, int32x4_t, a > b)
INTEGERS(hadd_epi32, int32x4_t, vpaddq_s32(a, b))
INTEGERS(unpacklo_epi8, uint8x16_t, vzip1q_u8(a, b))
INTEGERS(unpackhi_epi8, uint8x16_t, vzip2q_u8(a, b))
INTEGERS(unpacklo_epi16, uint16x8_t, vzip1q_u16(a, b))
INTEGERS(unpackhi_epi16, uint16x8_t, vzip2q_u16(a, b))
INTEGERS(unpacklo_epi32, uint32x4_t, vzip1q_u32(a, b))
INTEGERS(packs_epi16, int16x8_t, vqmovn_high_s16(vqmovn_s16(a), b))
INTEGERS(packs_epi32, int32x4_t, vqmovn_high_s32(vqmovn_s32(a), b))
INTEGERS(shuffle_epi8, uint8x16_t, vqtbl1q_u8(a, vandq_u8(b, vdupq_n_u8(0x8f))))
INTEGERS(madd_epi16, int16x8_t, vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)))
#undef INTEGERS

/* Pairs of products of numbers from 0 to 255 with numbers from -128 to 127; their sums saturate. */
INLINE __m128i half_maddubs_epi16(__m128i x, __m128i y) {
    const uint8x16_t a = (uint8x16_t)x;
    const int8x16_t b = (int8x16_t)y;
    const int16x8_t low = vmulq_s16((int16x8_t)vmovl_u8(vget_low_u8(a)), vmovl_s8(vget_low_s8(b)));
    const int16x8_t high = vmulq_s16((int16x8_t)vmovl_high_u8(a), vmovl_high_s8(b));
    return (__m128i)vqaddq_s16(vuzp1q_s16(low, high), vuzp2q_s16(low, high));
}
HALVES_2(__m256i, maddubs_epi16)

/* Shifts of integers of a type. */
#define SHIFTS(name, type, shift) \
    INLINE __m256i _mm256_##name(__m256i x, int by) { \
        return (__m256i){{(__m128i)((type)x.of[0] shift by), (__m128i)((type)x.of[1] shift by)}}; \
    }

SHIFTS(slli_epi16, uint16x8_t, <<)
SHIFTS(slli_epi32, uint32x4_t, <<)
SHIFTS(srli_epi16, uint16x8_t, >>)
SHIFTS(srli_epi32, uint32x4_t, >>)
SHIFTS(srai_epi16, int16x8_t, >>)
SHIFTS(srai_epi32, int32x4_t, >>)

/* An operation on floats a and b. */
#define FLOATS(name, result) \
    INLINE __m128 half_##name(__m128 a, __m128 b) { return result; } \
    HALVES_2(__m256, name)

FLOATS(add_ps, a + b)
FLOATS(sub_ps, a - b)
FLOATS(mul_ps, a * b)
FLOATS(div_ps, a / b)
FLOATS(min_ps, vbslq_f32(vcltq_f32(a, b), a, b))
FLOATS(max_ps, vbslq_f32(vcgtq_f32(a, b), a, b))
FLOATS(andnot_ps, (float32x4_t)vbicq_u32((uint32x4_t)b, (uint32x4_t)a))
FLOATS(equal, (float32x4_t)vceqq_f32(a, b))
FLOATS(unpacklo_ps, vzip1q_f32(a, b))
FLOATS(unpackhi_ps, vzip2q_f32(a, b))

INLINE __m128 half_fmadd_ps(__m128 a, __m128 b, __m128 c) { return vfmaq_f32(c, a, b); }
INLINE __m128 half_fnmadd_ps(__m128 a, __m128 b, __m128 c) { return vfmsq_f32(c, a, b); }
INLINE __m128 half_blendv_ps(__m128 a, __m128 b, __m128 mask) {
    return vbslq_f32((uint32x4_t)vshrq_n_s32((int32x4_t)mask, 31), b, a);
}
INLINE __m128 half_round_ps(__m128 x) { return vrndnq_f32(x); }
HALVES_3(__m256, fmadd_ps)
HALVES_3(__m256, fnmadd_ps)
HALVES_3(__m256, blendv_ps)
HALVES_1(__m256, round_ps)

/* The only rounding, comparison and hint that the sources name. */
#define _mm256_round_ps(x, to_nearest_even) _mm256_round_ps(x)
#define _mm256_cmp_ps(a, b, equal) _mm256_equal(a, b)
#define _mm_prefetch(at, into_second_level) __builtin_prefetch(at, 0, 2)

/* Conversions; of floats to integers to the nearest, of two the even one. */
INLINE __m128i half_cvtps_epi32(__m128 x) {
    return vbslq_s32(vcltq_f32(x, vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
INLINE __m256i _mm256_cvtps_epi32(__m256 x) { return (__m256i){{half_cvtps_epi32(x.of[0]), half_cvtps_epi32(x.of[1])}}; }
INLINE __m128 _mm_cvtepi32_ps(__m128i x) { return vcvtq_f32_s32(x); }
INLINE __m256 _mm256_cvtepi32_ps(__m256i x) { return (__m256){{vcvtq_f32_s32(x.of[0]), vcvtq_f32_s32(x.of[1])}}; }

/* The numbers of a vector, half of them or a quarter, to twice or four times their bits. */
INLINE __m256i _mm256_cvtepu8_epi16(__m128i x) {
    return (__m256i){{(__m128i)vmovl_u8(vget_low_u8((uint8x16_t)x)), (__m128i)vmovl_high_u8((uint8x16_t)x)}};
}
INLINE __m256i _mm256_cvtepi8_epi16(__m128i x) {
    return (__m256i){{(__m128i)vmovl_s8(vget_low_s8((int8x16_t)x)), (__m128i)vmovl_high_s8((int8x16_t)x)}};
}
INLINE __m256i _mm256_cvtepu16_epi32(__m128i x) {
    return (__m256i){{(__m128i)vmovl_u16(vget_low_u16((uint16x8_t)x)), (__m128i)vmovl_high_u16((uint16x8_t)x)}};
}
INLINE __m256i _mm256_cvtepi16_epi32(__m128i x) {
    return (__m256i){{vmovl_s16(vget_low_s16((int16x8_t)x)), vmovl_high_s16((int16x8_t)x)}};
}
INLINE __m256i _mm256_cvtepu8_epi32(__m128i x) { return _mm256_cvtepu16_epi32(_mm256_cvtepu8_epi16(x).of[0]); }
INLINE __m256i _mm256_cvtepi8_epi32(__m128i x) { return _mm256_cvtepi16_epi32(_mm256_cvtepi8_epi16(x).of[0]); }

/* Loads and stores, aligned or not. Integers move as bytes, which may alias numbers of any type. */
INLINE __m128i _mm_loadu_si128(const __m128i *from) { return (__m128i)vld1q_u8((const uint8_t *)from); }
INLINE __m128i _mm_loadl_epi64(const __m128i *from) {
    return (__m128i)vcombine_u8(vld1_u8((const uint8_t *)from), vdup_n_u8(0));
}
INLINE void _mm_storeu_si128(__m128i *to, __m128i x) { vst1q_u8((uint8_t *)to, (uint8x16_t)x); }
INLINE void _mm_storeu_ps(float *to, __m128 x) { vst1q_f32(to, x); }
INLINE __m256i _mm256_loadu_si256(const __m256i *from) {
    return (__m256i){{_mm_loadu_si128((const __m128i *)from), _mm_loadu_si128((const __m128i *)from + 1)}};
}
INLINE void _mm256_storeu_si256(__m256i *to, __m256i x) {
    _mm_storeu_si128((__m128i *)to, x.of[0]);
    _mm_storeu_si128((__m128i *)to + 1, x.of[1]);
}
INLINE __m256 _mm256_loadu_ps(const float *from) { return (__m256){{vld1q_f32(from), vld1q_f32(from + 4)}}; }
INLINE void _mm256_storeu_ps(float *to, __m256 x) {
    vst1q_f32(to, x.of[0]);
    vst1q_f32(to + 4, x.of[1]);
}
#define _mm_load_si128 _mm_loadu_si128
#define _mm256_load_si256 _mm256_loadu_si256
#define _mm256_store_si256 _mm256_storeu_si256
#define _mm256_load_ps _mm256_loadu_ps
#define _mm256_store_ps _mm256_storeu_ps

/* Constants. */
INLINE __m128 _mm_setzero_ps(void) { return vdupq_n_f32(0); }
INLINE __m128 _mm_setr_ps(float a, float b, float c, float d) { return (__m128){a, b, c, d}; }
INLINE __m128 _mm_set_ss(float x) { return (__m128){x, 0, 0, 0}; }
INLINE __m256 _mm256_setzero_ps(void) { return (__m256){{vdupq_n_f32(0), vdupq_n_f32(0)}}; }
INLINE __m256 _mm256_set1_ps(float x) { return (__m256){{vdupq_n_f32(x), vdupq_n_f32(x)}}; }
INLINE __m256i _mm256_setzero_si256(void) { return (__m256i){{vdupq_n_s32(0), vdupq_n_s32(0)}}; }
INLINE __m256i _mm256_set1_epi8(int8_t x) { return (__m256i){{(__m128i)vdupq_n_s8(x), (__m128i)vdupq_n_s8(x)}}; }
INLINE __m256i _mm256_set1_epi16(int16_t x) { return (__m256i){{(__m128i)vdupq_n_s16(x), (__m128i)vdupq_n_s16(x)}}; }
INLINE __m256i _mm256_set1_epi32(int32_t x) { return (__m256i){{vdupq_n_s32(x), vdupq_n_s32(x)}}; }
#define _mm256_setr_epi8(...) _mm256_loadu_si256((const __m256i *)(const int8_t[32]){__VA_ARGS__})
#define _mm256_setr_ps(...) _mm256_loadu_ps((const float[8]){__VA_ARGS__})
INLINE __m256 _mm256_broadcast_ss(const float *from) {
    float x;
    memcpy(&x, from, sizeof x);
    return _mm256_set1_ps(x);
}

/* Halves, and the first number. */
INLINE __m256 _mm256_castsi256_ps(__m256i x) { return (__m256){{(__m128)x.of[0], (__m128)x.of[1]}}; }
INLINE __m256i _mm256_castps_si256(__m256 x) { return (__m256i){{(__m128i)x.of[0], (__m128i)x.of[1]}}; }
INLINE __m128 _mm256_castps256_ps128(__m256 x) { return x.of[0]; }
INLINE __m128i _mm256_castsi256_si128(__m256i x) { return x.of[0]; }
INLINE __m256i _mm256_castsi128_si256(__m128i x) { return (__m256i){{x, vdupq_n_s32(0)}}; }
INLINE __m128 _mm256_extractf128_ps(__m256 x, int half) { return x.of[half]; }
INLINE __m128i _mm256_extracti128_si256(__m256i x, int half) { return x.of[half]; }
INLINE __m256i _mm256_inserti128_si256(__m256i x, __m128i y, int half) {
    x.of[half] = y;
    return x;
}
INLINE float _mm_cvtss_f32(__m128 x) { return x[0]; }
INLINE int32_t _mm_cvtsi128_si32(__m128i x) { return x[0]; }
INLINE int32_t _mm_cvtss_si32(__m128 x) { return half_cvtps_epi32(x)[0]; }

/* Other orders: two bits of `order` a number of 32 or 64 bits, four a half. */
INLINE __m128 _mm_shuffle_ps(__m128 x, __m128 y, int order) {
    return (__m128){x[order & 3], x[order >> 2 & 3], y[order >> 4 & 3], y[order >> 6 & 3]};
}
INLINE __m128i _mm_shuffle_epi32(__m128i x, int order) {
    return (__m128i){x[order & 3], x[order >> 2 & 3], x[order >> 4 & 3], x[order >> 6 & 3]};
}
INLINE __m256 _mm256_shuffle_ps(__m256 x, __m256 y, int order) {
    return (__m256){{_mm_shuffle_ps(x.of[0], y.of[0], order), _mm_shuffle_ps(x.of[1], y.of[1], order)}};
}
INLINE __m256i _mm256_shuffle_epi32(__m256i x, int order) {
    return (__m256i){{_mm_shuffle_epi32(x.of[0], order), _mm_shuffle_epi32(x.of[1], order)}};
}
INLINE __m256 _mm256_permute2f128_ps(__m256 x, __m256 y, int order) {
    const __m128 of[] = {x.of[0], x.of[1], y.of[0], y.of[1]};
    return (__m256){{of[order & 3], of[order >> 4 & 3]}};
}
INLINE __m256i _mm256_permute2x128_si256(__m256i x, __m256i y, int order) {
    const __m128i of[] = {x.of[0], x.of[1], y.of[0], y.of[1]};
    return (__m256i){{of[order & 3], of[order >> 4 & 3]}};
}
INLINE __m256i _mm256_permute4x64_epi64(__m256i x, int order) {
    const uint64x2_t low = (uint64x2_t)x.of[0], high = (uint64x2_t)x.of[1];
    const uint64_t of[] = {low[0], low[1], high[0], high[1]};
    const uint64x2_t first = {of[order & 3], of[order >> 2 & 3]}, last = {of[order >> 4 & 3], of[order >> 6 & 3]};
    return (__m256i){{(__m128i)first, (__m128i)last}};
}
/* The number of each index, of which the lowest 3 bits count. */
INLINE __m256 _mm256_permutevar8x32_ps(__m256 x, __m256i index) {
    const uint8x16x2_t bytes = {{(uint8x16_t)x.of[0], (uint8x16_t)x.of[1]}};
    __m256 to;
    for (int i = 0; i < 2; i++) {
        const uint32x4_t number = vandq_u32((uint32x4_t)index.of[i], vdupq_n_u32(7));
        const uint32x4_t of_bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), number, 0x04040404);
        to.of[i] = (__m128)vqtbl2q_u8(bytes, (uint8x16_t)of_bytes);
    }
    return to;
}

/* What else the sources use of 128 bits. */
#define _mm_add_epi32 half_add_epi32
INLINE __m128 _mm_loadu_ps(const float *from) { return (__m128)vld1q_u8((const uint8_t *)from); }
#define _mm_add_ps half_add_ps
#define _mm_sub_ps half_sub_ps
#define _mm_fmadd_ps half_fmadd_ps
INLINE __m128 _mm_add_ss(__m128 x, __m128 y) {
    x[0] += y[0];
    return x;
}
INLINE __m128 _mm_movehl_ps(__m128 x, __m128 y) { return (__m128){y[2], y[3], x[2], x[3]}; }
INLINE __m128i _mm_unpackhi_epi64(__m128i x, __m128i y) { return (__m128i)vzip2q_u64((uint64x2_t)x, (uint64x2_t)y); }
#define _MM_TRANSPOSE4_PS(a, b, c, d) \
    do { \
        const __m128 even = vzip1q_f32(a, c), odd = vzip1q_f32(b, d), even_last = vzip2q_f32(a, c), odd_last = vzip2q_f32(b, d); \
        a = vzip1q_f32(even, odd), b = vzip2q_f32(even, odd); \
        c = vzip1q_f32(even_last, odd_last), d = vzip2q_f32(even_last, odd_last); \
    } while (0)
INLINE void _mm_pause(void) { __asm__ volatile("yield"); }
