/* Transposes matrices in tiles of 8 rows and 8 columns. */
#include "transpose.h"

#if COMPILED
AVX2 void transpose(const float *from, int64_t rows, int64_t cols, float *to) {
    for (int64_t r = 0; r < rows; r += 8)
        for (int64_t c = 0; c < cols; c += 8) {
            __m256 a[8], b[8];
            for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(from + (r + i) * cols + c);
            for (int i = 0; i < 8; i += 2) {
                b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
                b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
            }
            for (int i = 0; i < 8; i += 4)
                for (int j = 0; j < 2; j++) {
                    a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
                    a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xEE);
                }
            for (int i = 0; i < 4; i++) {
                _mm256_storeu_ps(to + (c + i) * rows + r, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
                _mm256_storeu_ps(to + (c + i + 4) * rows + r, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
            }
        }
}
#endif
