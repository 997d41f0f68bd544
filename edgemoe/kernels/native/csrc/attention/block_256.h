/* The path of attention in 256 bits, and its parts that other paths use. */
#pragma once
#include "block.h"

#if COMPILED
extern const block_path block_256;

/* A as float32. */
operand wide_rows(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to);
operand wide_columns(int64_t format, const uint8_t *x, int64_t count, int64_t dim, uint16_t *scratch, uint32_t *to);

void softmax_256(float *scores, int64_t t, int64_t keys, const panel_state *s, float *factor);
float softmax_head_256(const float *const scores[2], float scaling, int64_t low, int64_t high, float *largest, float *total,
                       uint16_t *weights);
#endif
