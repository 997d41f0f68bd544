/* The kernels of products.h and attention.h by AMX. */
#include "amx.h"

#include "../attention/block_avx512.h"
#include "../experts/vnni.h"

#if defined(__x86_64__) && COMPILED_AMX
typedef struct __attribute__((packed)) {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row of each tile */
    uint8_t rows[16];
} tile_config;

typedef struct { int tokens; } tiles_state; /* that the tiles are configured for */

#define NAME(name) name##_amx
#define TARGET __attribute__((target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))
#define INLINE_TILES static inline __attribute__((always_inline)) TARGET

/* Tiles 6 and 7, of tokens, and 0 to 3, of sums, have one row per token. */
INLINE_TILES void configure_amx(tiles_state *tiles, int tokens) {
    if (tiles->tokens == tokens) return;
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = (uint8_t)(i == 4 || i == 5 ? 16 : tokens);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
    tiles->tokens = tokens;
}

/* Assembly with a clobber of memory: some compilers' intrinsics let a store pass a tile's load. */
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(stride)) : "memory")
/* sum += a b; a is signed. */
#define TILE_DOT_UNSIGNED(sum, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define TILE_DOT_SIGNED(sum, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
/* Of bf16 numbers. */
#define TILE_DOT_BF16(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define TILES_RELEASE() __asm__ volatile("tilerelease" ::)

#define VECTOR __m512
#define LOAD(from) _mm512_loadu_ps(from)
#define STORE(to, v) _mm512_storeu_ps(to, v)
#define ALL(x) _mm512_set1_ps(x)
#define MULTIPLY(a, b) _mm512_mul_ps(a, b)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define NUMBERS(from) _mm512_cvtepi32_ps(_mm512_load_si512(from))
#define SHIFTED(h, l, by) _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(h), by), _mm512_load_si512(l)))
#define SCALES(from) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from), 16))
#define CENTRES(from) _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32((int32_t)0xFFFF0000)))
#define JOIN join_fours_avx512
#include "products.h"
#include "attention.h"

const block_path block_amx = {rows_amx, columns_amx, lanes_amx, multiply_amx, softmax_512, softmax_head_512};
#endif
