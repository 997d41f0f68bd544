/* The arithmetic of the compiled kernel in plain C, one product after another: what every path must equal bit for bit.
 * Compile without contraction of products and sums, so that fmaf alone fuses them. */
#include <math.h>
#include <stdint.h>
#include <string.h>

static float from_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float largest_of(const uint16_t *x, int64_t n) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(from_bf16(x[i])));
    return largest;
}

/* y [tokens, rows] of codes [rows, cols] of `level` bits, and pairs [cols / group, rows, 2] of 16 scale and centre. */
void reference_expert(const uint8_t *codes, const uint16_t *pairs, int64_t level, int64_t rows, int64_t cols, int64_t group,
                      const uint16_t *x, int64_t tokens, uint16_t *y) {
    const int64_t chunk = group < 64 ? group : 64;
    const float most = level == 8 ? 8191 : 127, unit = level == 8 ? 1 / 16.0f : level == 6 ? 0.25f : level == 5 ? 0.5f : 1;
    const float zero = level == 8 ? -8.46875f : level == 6 ? -8.375f : level == 5 ? -8.25f : level == 4 ? -8.0f : -6.5f;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) {
            float total = 0;
            for (int64_t from = 0; from < cols; from += chunk) {
                const uint16_t *of_chunk = x + t * cols + from, *pair = pairs + (from / group * rows + r) * 2;
                const float largest = largest_of(of_chunk, chunk), by = most / largest <= 3.4e38f ? most / largest : 0, scale = largest / most;
                int32_t products = 0, all = 0;
                for (int64_t k = 0; k < chunk; k++) {
                    const int32_t q = (int32_t)rintf(from_bf16(of_chunk[k]) * by);
                    products += q * codes[r * cols + from + k];
                    all += q;
                }
                const float sum = (float)all * scale, units = fmaf((float)products, unit * scale, zero * sum);
                total = fmaf(from_bf16(pair[1]), sum, fmaf(from_bf16(pair[0]), units, total));
            }
            y[t * rows + r] = to_bf16(total);
        }
}

/* y [tokens, rows] of int8 weights [rows, cols] with one scale per row. */
void reference_dense(const int8_t *w, const uint16_t *row_scale, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens,
                     uint16_t *y) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) {
            float total = 0;
            for (int64_t from = 0; from < cols; from += 64) {
                const int64_t n = cols - from < 64 ? cols - from : 64;
                const float largest = largest_of(x + t * cols + from, n), by = largest >= 1e-36f ? 127 / largest : 0;
                int32_t products = 0;
                for (int64_t k = 0; k < n; k++)
                    products += (int32_t)rintf(from_bf16(x[t * cols + from + k]) * by) * w[r * cols + from + k];
                total = fmaf((float)products, largest / 127, total);
            }
            y[t * rows + r] = to_bf16(from_bf16(row_scale[r]) * total);
        }
}
