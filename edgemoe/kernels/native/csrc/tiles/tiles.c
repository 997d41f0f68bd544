/* The choice between AMX and its emulation. */
#include "tiles.h"

#include "amx.h"
#include "emulated.h"

#if COMPILED
void gemm_block_tiles(enum path path, const matrix *m, const expert *e, int64_t block, const int8_t *x, const float *scale,
                      const float *sum, int64_t stride, int64_t tokens, uint16_t *y) {
#if COMPILED_AMX
    if (path == PATH_AMX) gemm_block_amx(m, e, block, x, scale, sum, stride, tokens, y);
    else
#endif
        gemm_block_emulated(m, e, block, x, scale, sum, stride, tokens, y);
}

void dense_strip_tiles(enum path path, const dense_strip *s, int64_t tokens, float *total) {
#if COMPILED_AMX
    if (path == PATH_AMX) dense_strip_amx(s, tokens, total);
    else
#endif
        dense_strip_emulated(s, tokens, total);
}
#endif
