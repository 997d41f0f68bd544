/* The operations of a decoder layer's list (edgemoe/layers/program.py), on rows of bf16 numbers. */
#pragma once
#include "attention/decode.h"
#include "dense/dense.h"
#include "delta_net.h"
#include "latents.h"
#include "short_conv.h"
#include "state_space.h"

#if COMPILED
typedef struct {
    dense_weight weight;
    const uint16_t *bias; /* bf16 [rows]; NULL: none */
} linear;

/* Memory that the lists of all layers share: the rows of a call, one after another. */
typedef struct {
    uint16_t *at;
    int64_t size; /* numbers that there is space for */
} buffer;

/* Two buffers: the state that goes from layer to layer, and the input of a layer's experts. */
enum { HIDDEN, NORMED };

/* Kinds. CALL: the caller computes it, and goes on after it. */
enum { NORM, LINEAR, ATTEND, ACTIVATE, SCALE, ADD, EXPERTS, CALL, DELTA_NET, SHORT_CONV, STATE_SPACE, APPLY, STORE_LATENTS, LATENT_QUERIES, LATENT_VALUES, MULTIPLY, PLACE };

typedef struct {
    int64_t kind, input, output;     /* indices of buffers */
    int64_t input_cols, output_cols; /* numbers of a row that it reads and writes */
    const void *parameters;     /* NORM: weight; LINEAR: linear; ATTEND: attention_shape; DELTA_NET: delta_net;
                                 * SHORT_CONV: short_conv; STATE_SPACE: state_space; STORE_LATENTS, LATENT_*: latent_attention;
                                 * ACTIVATE, APPLY, SCALE: a table of functions' values */
    float number;               /* NORM: epsilon; ADD: factor of the input; 0: none; MULTIPLY: factor;
                                 * PLACE: the first number of the output's row that it writes */
    int32_t wide;               /* NORM: its form, NARROW_NORM ..; ACTIVATE, SCALE: the table is float32;
                                 * MULTIPLY: the factors are the rows' cosines of its rotation, bf16 */
    int64_t routed;             /* EXPERTS: the buffer that its router reads, HIDDEN or NORMED */
    int64_t rotation;           /* ATTEND, STORE_LATENTS, LATENT_QUERIES, MULTIPLY: index of its rotation */
} operation;

/* Cosines and sines of the rows' positions, [rows, cols] each, bf16, or float32 where latents are rotated by those. */
typedef struct {
    const void *cosine, *sine;
    int64_t cols;
} rotation;

/* y [tokens, rows] = x [tokens, cols] W^T + bias, rounded after the product and after the sum. Returns 0, OUT_OF_MEMORY, or
 * WRONG_SHAPE. */
int edgemoe_linear(pool *p, const linear *l, const uint16_t *x, int64_t tokens, uint16_t *y);

/* Whether an operation's buffers have space for `rows` rows, and its parameters have the sizes of its rows. */
int operation_fits(const operation *o, const buffer *buffers, int64_t count, const rotation *rotations, int64_t rows);

/* What rows have of their sequences in a layer: keys and values [rows] where its list has ATTEND, and where it has DELTA_NET,
 * SHORT_CONV or STATE_SPACE a state of each sequence, [count]. */
typedef struct {
    const attention_kv *kv;
    const delta_run *runs;
    int64_t count;
} row_memory;

/* Computes an operation of any kind but EXPERTS and CALL. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int run_operation(pool *p, const operation *o, const buffer *buffers, const rotation *rotations, row_memory memory, int64_t rows);
#endif
