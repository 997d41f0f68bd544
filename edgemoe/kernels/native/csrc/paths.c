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

static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

static int has_avx512_vnni(void) { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

static int has_avx512_bf16(void) { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

/* By CPUID, since older compilers do not know the name. */
static int has_avx_vnni(void) {
    unsigned a = 0, b, c, d;
    return COMPILED_AVX_VNNI && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

/* Linux saves a thread's tiles only in a process that has requested permission; the request fails without AMX. */
static int has_amx(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d = 0;
    const int present = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
    return COMPILED_AMX && present && has_avx512_vnni() && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

int edgemoe_paths(void) {
    static int found = 0;
    if (found) return found;
    const int avx512 = has_avx512_vnni();
    vnni_dot = has_avx_vnni() ? DOT_VEX : avx512 ? DOT_EVEX : DOT_PLAIN;
    found = 1 << PATH_AVX2 | (vnni_dot != DOT_PLAIN) << PATH_AVX_VNNI | avx512 << PATH_AVX512_VNNI |
            (avx512 && has_avx512_bf16()) << PATH_AVX512_BF16 | has_amx() << PATH_AMX |
            1 << PATH_AMX_EMULATED;
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
