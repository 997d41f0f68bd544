/* The plainest products of 4-bit weights in groups of 64 columns that use the processor's integer units, in a layout of
 * their own: what edgemoe's experts are compared with by tools.timing.products. One thread, one matrix.
 *
 * Weights [rows / 32, groups, 16, 64]: of 32 rows and 64 columns, four columns of a row in a dword, a row below 16 in
 * the lower nibbles and the row 16 above it in the upper ones. Scales and centres [groups, rows]; activations
 * [groups, tokens, 64] with a scale and a sum each. rows % 32 == 0, tokens % 16 == 0. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ROWS = 32, GROUP = 64, TOKENS = 8 };

#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define AMX __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8")))
#define DOT(sum, a, b) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))

typedef struct {
    int64_t rows, groups, tokens;
    const uint8_t *codes;
    const float *scale, *centre;
    const int8_t *x;
    const float *x_scale, *x_sum;
    float *y; /* [rows / 32, tokens, 32] */
} grouped;

/* Unpacks a block's group to [16, 2, 16] dwords. */
VNNI static void unpack(const uint8_t *from, uint8_t *to) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int k = 0; k < GROUP / 4; k++) {
        const __m512i both = _mm512_loadu_si512(from + 64 * k);
        _mm512_store_si512(to + 128 * k, _mm512_and_si512(both, nibble));
        _mm512_store_si512(to + 128 * k + 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
    }
}

VNNI static inline __attribute__((always_inline)) void rescale(__m512i sum, __m512 scale, __m512 centre, float by, float all, float *to) {
    const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
    const __m512 total = _mm512_fmadd_ps(product, _mm512_set1_ps(by), _mm512_loadu_ps(to));
    _mm512_storeu_ps(to, _mm512_fmadd_ps(centre, _mm512_set1_ps(all), total));
}

VNNI void grouped_vnni(const grouped *job) {
    _Alignas(64) uint8_t tile[GROUP * ROWS];
    for (int64_t r = 0; r < job->rows; r += ROWS) {
        float *y = job->y + r * job->tokens;
        memset(y, 0, sizeof *y * (size_t)(ROWS * job->tokens));
        for (int64_t g = 0; g < job->groups; g++) {
            unpack(job->codes + (r / ROWS * job->groups + g) * GROUP * ROWS / 2, tile);
            __m512 scale[2], centre[2];
            for (int h = 0; h < 2; h++) {
                scale[h] = _mm512_loadu_ps(job->scale + g * job->rows + r + 16 * h);
                centre[h] = _mm512_loadu_ps(job->centre + g * job->rows + r + 16 * h);
            }
            for (int64_t t = 0; t < job->tokens; t += TOKENS) {
                const int64_t at = g * job->tokens + t;
                __m512i sum[TOKENS][2];
                for (int i = 0; i < TOKENS; i++) sum[i][0] = sum[i][1] = _mm512_setzero_si512();
                for (int k = 0; k < GROUP / 4; k++) {
                    const __m512i a = _mm512_load_si512(tile + 128 * k), b = _mm512_load_si512(tile + 128 * k + 64);
                    for (int i = 0; i < TOKENS; i++) {
                        int32_t four;
                        memcpy(&four, job->x + (at + i) * GROUP + 4 * k, 4);
                        const __m512i v = _mm512_set1_epi32(four);
                        DOT(sum[i][0], a, v);
                        DOT(sum[i][1], b, v);
                    }
                }
                for (int i = 0; i < TOKENS; i++)
                    for (int h = 0; h < 2; h++)
                        rescale(sum[i][h], scale[h], centre[h], job->x_scale[at + i], job->x_sum[at + i], y + (t + i) * ROWS + 16 * h);
            }
        }
    }
}

#if defined(__clang__) && __clang_major__ >= 12 || !defined(__clang__) && __GNUC__ >= 11
#define LOAD(tile, from, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE(tile, to) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)64) : "memory")

/* Whether this process may use tiles. */
int grouped_has_amx(void) { return !syscall(SYS_arch_prctl, 0x1023, 18); }

AMX void grouped_amx(const grouped *job) {
    _Alignas(64) uint8_t tile[GROUP * ROWS];
    _Alignas(64) int32_t sum[2][16][16];
    struct __attribute__((packed)) { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
    for (int64_t r = 0; r < job->rows; r += ROWS) {
        float *y = job->y + r * job->tokens;
        memset(y, 0, sizeof *y * (size_t)(ROWS * job->tokens));
        for (int64_t g = 0; g < job->groups; g++) {
            unpack(job->codes + (r / ROWS * job->groups + g) * GROUP * ROWS / 2, tile);
            LOAD(4, tile, 128);
            LOAD(5, tile + 64, 128);
            for (int64_t t = 0; t < job->tokens; t += 16) {
                const int64_t at = g * job->tokens + t;
                __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1" ::);
                LOAD(6, job->x + at * GROUP, GROUP);
                __asm__ volatile("tdpbsud %%tmm4, %%tmm6, %%tmm0\n\ttdpbsud %%tmm5, %%tmm6, %%tmm1" ::);
                STORE(0, sum[0]);
                STORE(1, sum[1]);
                for (int h = 0; h < 2; h++) {
                    const __m512 scale = _mm512_loadu_ps(job->scale + g * job->rows + r + 16 * h);
                    const __m512 centre = _mm512_loadu_ps(job->centre + g * job->rows + r + 16 * h);
                    for (int i = 0; i < 16; i++)
                        rescale(_mm512_load_si512(sum[h][i]), scale, centre, job->x_scale[at + i], job->x_sum[at + i], y + (t + i) * ROWS + 16 * h);
                }
            }
        }
    }
    __asm__ volatile("tilerelease" ::);
}
#else
int grouped_has_amx(void) { return 0; }
void grouped_amx(const grouped *job) { (void)job; }
#endif
