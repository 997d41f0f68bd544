/* Which paths this processor has, and which one each kind of work takes. */
#define _GNU_SOURCE
#include "paths.h"

#if COMPILED
int chosen_path[WORKS][ROW_BUCKETS];
int use_bf16 = 0;

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum dot vnni_dot = DOT_PLAIN;

/* Registers of CPUID's answer. */
enum cpuid_register { A, B, C, D };

/* Whether the processor's answer to CPUID has all of `bits`. __builtin_cpu_supports would need a part of the compiler's runtime
 * library that not every compiler has: with zig's it denies everything. */
static int has(unsigned leaf, unsigned subleaf, enum cpuid_register in, unsigned bits) {
    unsigned found[4] = {0};
    return __get_cpuid_count(leaf, subleaf, &found[A], &found[B], &found[C], &found[D]) && (found[in] & bits) == bits;
}

/* Whether the operating system saves these registers of a thread, by their bits in XCR0. */
static int saves(unsigned bits) {
    enum { OSXSAVE = 1 << 27 };
    unsigned low, high;
    if (!has(1, 0, C, OSXSAVE)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & bits) == bits;
}

int has_avx2(void) {
    enum { FMA = 1 << 12, AVX = 1 << 28, AVX2_BIT = 1 << 5, XMM_YMM = 0x6 };
    return saves(XMM_YMM) && has(1, 0, C, FMA | AVX) && has(7, 0, B, AVX2_BIT);
}

static int has_avx512_vnni(void) {
    const unsigned f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11, xmm_to_zmm_and_masks = 0xe6;
    return saves(xmm_to_zmm_and_masks) && has(7, 0, B, f | dq | bw | vl) && has(7, 0, C, vnni);
}

static int has_avx512_bf16(void) { return has_avx512_vnni() && has(7, 1, A, 1 << 5); }

static int has_avx_vnni(void) { return COMPILED_AVX_VNNI && has(7, 1, A, 1 << 4); }

/* Linux saves a thread's tiles only in a process that has requested permission; the request fails without AMX. */
static int has_amx(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, BF16_TILE_INT8 = 1 << 22 | 1 << 24 | 1 << 25 };
    const int present = COMPILED_AMX && has(7, 0, D, BF16_TILE_INT8) && has_avx512_vnni();
    return present && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

int edgemoe_paths(void) {
    static int found = 0;
    if (found) return found;
    const int avx512 = has_avx512_vnni();
    vnni_dot = has_avx_vnni() ? DOT_VEX : avx512 ? DOT_EVEX : DOT_PLAIN;
    found = 1 << PATH_AVX2 | (vnni_dot != DOT_PLAIN) << PATH_AVX_VNNI | avx512 << PATH_AVX512_VNNI |
            has_avx512_bf16() << PATH_AVX512_BF16 | has_amx() << PATH_AMX | 1 << PATH_AMX_EMULATED;
    return found;
}

enum path without_tiles(enum path path) {
    if (!has_tiles(path)) return path;
    return edgemoe_paths() >> PATH_AVX512_VNNI & 1 ? PATH_AVX512_VNNI : PATH_AVX2;
}

static enum path widest_path(int work, int bucket) {
    const int found = edgemoe_paths();
    if (found >> PATH_AMX & 1 && bucket > 1) return PATH_AMX;
    if (found >> PATH_AVX512_BF16 & 1 && work == WORK_ATTENTION) return PATH_AVX512_BF16;
    if (found >> PATH_AVX512_VNNI & 1) return PATH_AVX512_VNNI;
    return found >> PATH_AVX_VNNI & 1 && work != WORK_ATTENTION ? PATH_AVX_VNNI : PATH_AVX2;
}

int edgemoe_vnni_encoding(int evex) {
    const enum dot dot = evex ? DOT_EVEX : DOT_VEX;
    if (dot == DOT_EVEX ? !has_avx512_vnni() : !has_avx_vnni()) return -1;
    vnni_dot = dot;
    return 0;
}

int edgemoe_bf16(int use) {
    if (use >= 0) use_bf16 = use && has_avx512_bf16();
    return use_bf16;
}
#else
#include <sys/auxv.h>

static int has_dotprod(void) {
    enum { DOTPROD = 1 << 20 }; /* HWCAP_ASIMDDP */
    return (getauxval(AT_HWCAP) & DOTPROD) != 0;
}

static int has_i8mm(void) {
    enum { I8MM = 1 << 13 }; /* HWCAP2_I8MM */
    return (getauxval(AT_HWCAP2) & I8MM) != 0;
}

int edgemoe_paths(void) {
    static int found = 0;
    if (!found) found = 1 << PATH_NEON | has_dotprod() << PATH_NEON_DOTPROD | has_i8mm() << PATH_NEON_I8MM | 1 << PATH_AMX_EMULATED;
    return found;
}

enum path without_tiles(enum path path) { return has_tiles(path) ? PATH_NEON : path; }

static enum path widest_path(int work, int bucket) {
    const int found = edgemoe_paths(), multiplies_bytes = work == WORK_EXPERTS || work == WORK_DENSE || (work == WORK_EXPERTS_8 && !bucket);
    if (multiplies_bytes && found >> PATH_NEON_I8MM & 1) return PATH_NEON_I8MM;
    return multiplies_bytes && found >> PATH_NEON_DOTPROD & 1 ? PATH_NEON_DOTPROD : PATH_NEON;
}

int edgemoe_vnni_encoding(int evex) {
    (void)evex;
    return -1;
}

int edgemoe_bf16(int use) {
    (void)use;
    return use_bf16;
}
#endif

int edgemoe_choose_path(int work, int bucket, int path) {
    if (work < 0 || work >= WORKS || bucket < 0 || bucket >= ROW_BUCKETS || path < 0 || path >= PATHS) return -1;
    if (!(edgemoe_paths() >> path & 1) || (path == PATH_AVX512_BF16 && work != WORK_ATTENTION)) return -1;
    chosen_path[work][bucket] = path;
    return 0;
}

int edgemoe_chosen_path(int work, int bucket) { return chosen_path[work][bucket]; }

void edgemoe_choose_widest(void) {
    for (int work = 0; work < WORKS; work++)
        for (int bucket = 0; bucket < ROW_BUCKETS; bucket++) chosen_path[work][bucket] = widest_path(work, bucket);
}
#endif
