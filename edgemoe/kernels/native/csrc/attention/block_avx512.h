/* The paths of attention in 512 bits: by float32, and by VDPBF16PS. */
#pragma once
#include "block.h"

#if COMPILED && COMPILED_AVX512
extern const block_path block_avx512, block_avx512_bf16;

void softmax_512(float *scores, int64_t t, int64_t keys, const panel_state *s, float *factor);
float softmax_head_512(const float *const scores[2], float scaling, int64_t low, int64_t high, float *largest, float *total,
                       uint16_t *weights);
#endif
