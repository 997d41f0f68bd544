/* The choice between the paths of attention. */
#include "block_paths.h"

#include "../tiles/amx.h"
#include "../tiles/emulated.h"
#include "block_256.h"
#include "block_avx512.h"

#if COMPILED
const block_path *block_path_of(enum path path) {
    if (path == PATH_AMX_EMULATED) return &block_emulated;
#if COMPILED_AMX
    if (path == PATH_AMX) return &block_amx;
#endif
#if COMPILED_AVX512
    if (path == PATH_AVX512_BF16) return &block_avx512_bf16;
    if (path == PATH_AVX512_VNNI) return &block_avx512;
#endif
    return &block_256;
}
#endif
