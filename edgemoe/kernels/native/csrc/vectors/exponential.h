/* Exponentials and rounding in vectors of BITS bits, 256 or 512: included once for each width, with NAME for the functions and
 * INLINE_VECTOR for their target. The operations are the same, so the bits are. */
#define MM_OF(bits, operation) _mm##bits##_##operation
#define MM_BITS_OF(bits, operation) _mm##bits##_##operation##bits
#define MM_IN(bits, operation) MM_OF(bits, operation)
#define MM_BITS_IN(bits, operation) MM_BITS_OF(bits, operation)
#define MM(operation) MM_IN(BITS, operation)                /* _mm256_add_ps of add_ps */
#define MM_BITS(operation) MM_BITS_IN(BITS, operation)      /* _mm256_and_si256 of and_si */

/* Two factors of e^x, the second one a power of two. */
typedef struct { VECTOR y, power; } NAME(exponential_factors);

/* e^x with a relative error of about 2^-22. x is clamped to [-87, 88]; NaN stays NaN. */
INLINE_VECTOR NAME(exponential_factors) NAME(factors_of_exponential)(VECTOR x) {
    x = MM(max_ps)(MM(set1_ps)(-87.0f), MM(min_ps)(MM(set1_ps)(88.0f), x));
    const VECTOR n = NEAREST(MM(mul_ps)(x, MM(set1_ps)(1.44269504f)));
    /* ln 2 in two parts; the product of n and the first part is exact. */
    const VECTOR r = MM(fnmadd_ps)(n, MM(set1_ps)(-2.12194440e-4f), MM(fnmadd_ps)(n, MM(set1_ps)(0.693359375f), x));
    VECTOR y = MM(set1_ps)(1.0f / 5040);
    const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    for (int i = 0; i < 7; i++) y = MM(fmadd_ps)(y, r, MM(set1_ps)(factors[i]));
    const INTEGERS power = MM(slli_epi32)(MM(add_epi32)(MM(cvtps_epi32)(n), MM(set1_epi32)(127)), 23);
    return (NAME(exponential_factors)){y, AS_FLOATS(power)};
}

INLINE_VECTOR VECTOR NAME(exponential)(VECTOR x) {
    const NAME(exponential_factors) e = NAME(factors_of_exponential)(x);
    return MM(mul_ps)(e.y, e.power);
}

/* to_bf16 of float32 numbers, as float32; NaN stays NaN as long as its lower half is zero. */
INLINE_VECTOR VECTOR NAME(rounded_to_bf16)(VECTOR x) {
    const INTEGERS bits = AS_INTEGERS(x), even = MM_BITS(and_si)(MM(srli_epi32)(bits, 16), MM(set1_epi32)(1));
    const INTEGERS up = MM(add_epi32)(MM(add_epi32)(bits, MM(set1_epi32)(0x7fff)), even);
    return AS_FLOATS(MM_BITS(and_si)(up, MM(set1_epi32)((int32_t)0xffff0000)));
}
