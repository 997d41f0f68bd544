/* Whole experts in one call, and the weighted sum of their outputs. */
#pragma once
#include "planes.h"
#include "../pool.h"

#if COMPILED
/* What lies between an expert's products where it is not silu(gate) up: the product of a function of each gate and one of each
 * up, or without a gate a function of each number. They are tables of the functions' values for the 65,536 bf16 numbers. */
typedef struct {
    const void *gate;                    /* [65536], bf16, or float32 where wide_gate is not 0 */
    const uint16_t *up;                  /* bf16 [65536]; NULL: there is no gate, and `gate` is the function of each number */
    const uint16_t *up_bias, *down_bias; /* bf16 [experts, 2 inner], or [experts, inner] without a gate, in the order of the product's rows, and [experts, y_cols];
                                          * NULL: none. Added to products that are rounded already, and rounded again */
    int64_t interleaved;                 /* rows of gate and of up alternate; 0: all of gate come first */
    int64_t wide_gate;                   /* nonzero: the product with up alone is rounded */
} expert_activation;

/* Each expert's rows of y [y_rows, y_cols] = down(silu(gate) up) of its rows, both bf16; gate and up are the first and second
 * `inner` rows of `up`. The rows are those of x [x_rows, x_cols], or with row_of [y_rows] the rows of x with these indices;
 * quantized: edgemoe_quantize_rows of x, or NULL. activation: NULL: silu(gate) up, without biases. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_experts(pool *p, const matrix *up, const matrix *down, int64_t inner, const expert *experts, int64_t count,
                    const uint16_t *x, int64_t x_rows, int64_t x_cols, const int64_t *row_of,
                    uint8_t *quantized, const expert_activation *activation, uint16_t *y, int64_t y_rows, int64_t y_cols);

/* Each of to [tokens, cols] = the sum over `count` of weights [tokens, count] times its rows, bf16, in float32 and in this
 * order; rounded to bf16. row_of [tokens, count]: indices into rows [.., cols], below 0: left out; NULL: rows are [tokens,
 * count, cols]. add: the sum, rounded, is added to what `to` has. */
void edgemoe_weighted_sum(const uint16_t *rows, const int64_t *row_of, const float *weights, int64_t tokens, int64_t count,
                          int64_t cols, int add, uint16_t *to);
#endif
