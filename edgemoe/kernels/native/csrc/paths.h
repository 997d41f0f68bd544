/* The path, a set of instructions, of each kind of work and number of rows. All give the same bits. */
#pragma once
#include "vectors/bf16.h"

#if COMPILED
#if defined(__x86_64__)
#define COMPILED_AVX512 1
#else
#define COMPILED_AVX512 0
#endif
/* Whether the compiler, and the assembler that comes with it, know AVX-VNNI and AMX; a library without them lacks two paths. */
#if COMPILED_AVX512 && (defined(__clang__) && __clang_major__ >= 12 || !defined(__clang__) && __GNUC__ >= 11)
#define COMPILED_AVX_VNNI 1
#define COMPILED_AMX 1
#else
#define COMPILED_AVX_VNNI 0
#define COMPILED_AMX 0
#endif

/* In the order of PATHS in kernels/native/paths.py. PATH_AVX512_BF16 has attention alone. PATH_AMX_EMULATED computes PATH_AMX's tiles in plain C, for tests. */
enum path {
    PATH_AVX2, PATH_AVX_VNNI, PATH_AVX512_VNNI, PATH_AVX512_BF16, PATH_AMX, PATH_AMX_EMULATED, PATH_NEON, PATH_NEON_DOTPROD,
    PATH_NEON_I8MM, PATHS
};

/* Whether a path takes the functions of experts/vnni.h and dense/dense_vnni.h, which other architectures do not have. */
#define IS_AVX512(path) (COMPILED_AVX512 && (path) == PATH_AVX512_VNNI)

/* In the order of WORKS in kernels/native/paths.py. Experts at level 8 have activations of their own. */
enum work { WORK_EXPERTS, WORK_EXPERTS_8, WORK_DENSE, WORK_ATTENTION, WORKS };

/* Rows of an expert or of a product share a choice up to 1, 12, 31, and beyond. */
enum { ROW_BUCKETS = 4, FEW_UP_TO = 12, SEVERAL_UP_TO = 31 };

extern int chosen_path[WORKS][ROW_BUCKETS];

static inline int64_t row_bucket(int64_t rows) { return (rows > 1) + (rows > FEW_UP_TO) + (rows > SEVERAL_UP_TO); }

static inline enum path path_of(enum work work, int64_t rows) { return (enum path)chosen_path[work][row_bucket(rows)]; }

/* Whether a path multiplies tiles, and the path of what it has no tiles for. */
static inline int has_tiles(enum path path) { return path == PATH_AMX || path == PATH_AMX_EMULATED; }
enum path without_tiles(enum path path);

/* Whether products with bf16 weights go through dense_bf16. edgemoe_bf16 sets it to `use`, on a processor with AVX512-BF16;
 * below 0 leaves it; it returns what it is now. */
extern int use_bf16;
int edgemoe_bf16(int use);

/* How 256-bit code adds products of 8-bit or 16-bit numbers to 32-bit sums: by two instructions or more, of AVX2 or NEON, or
 * by one: in AVX-VNNI's encoding or in AVX-512's; of 8-bit numbers by NEON's dotprod or i8mm. */
enum dot { DOT_PLAIN, DOT_VEX, DOT_EVEX, DOT_SDOT, DOT_USDOT };

#if defined(__x86_64__)
/* Whether the processor has AVX2 and FMA, and the system saves their registers: without them no function here can run. */
int has_avx2(void);

/* Of PATH_AVX_VNNI on this processor. */
extern enum dot vnni_dot;

static inline enum dot dot_of(enum path path) { return path == PATH_AVX_VNNI ? vnni_dot : DOT_PLAIN; }
#else
static inline enum dot dot_of(enum path path) {
    return path == PATH_NEON_I8MM ? DOT_USDOT : path == PATH_NEON_DOTPROD ? DOT_SDOT : DOT_PLAIN;
}
#endif

/* Whether the processor has the instructions of a path, and the system permits them; a bit for each path. */
int edgemoe_paths(void);

/* Lets a kind of work with `bucket`'s rows take a path. Returns 0, or -1 if there is no such path here. */
int edgemoe_choose_path(int work, int bucket, int path);

int edgemoe_chosen_path(int work, int bucket);

/* The choice before any measurement: the widest path, which is AMX only from 13 rows on, and NEON's dotprod or i8mm only
 * where the kernel has code for it: experts at levels 4 and 2, a single row at level 8, and dense products. */
void edgemoe_choose_widest(void);

/* Which of the two encodings PATH_AVX_VNNI takes, for tests; -1: the processor does not have it. */
int edgemoe_vnni_encoding(int evex);
#endif
