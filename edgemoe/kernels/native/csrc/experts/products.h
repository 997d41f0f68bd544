/* Products of several experts' matrices with their rows of activations. */
#ifndef EDGEMOE_PRODUCTS_H
#define EDGEMOE_PRODUCTS_H
#include "planes.h"
#include "../pool.h"

#if defined(__x86_64__)
/* Numbers of rows of activations: [chunks, rows, chunk], 2 bytes each if fine, and [chunks, rows]. */
typedef struct { int8_t *q; float *scale, *sum; } numbers;

/* Rows of y = each expert's matrix times its rows of x. */
typedef struct {
    const matrix *m;
    const expert *experts;
    int64_t count, chunk, rows; /* experts; of x in all */
    int64_t together;           /* blocks of a task */
    int inner;                  /* x is what the experts' first matrix gave: its rows lie as those of y do */
    const uint16_t *x;
    uint8_t *forms;             /* [rows]: the forms wanted of each */
    numbers fine, coarse;
    uint16_t *y;
} product;

INLINE int64_t blocks_of(const matrix *m) { return (m->rows + 31) / 32; }

/* Of one expert. */
INLINE int64_t tasks_of(const product *job) { return (blocks_of(job->m) + job->together - 1) / job->together; }

/* Bytes that a product needs besides x and y, for so many rows of x; as native_experts.py counts it. */
size_t product_scratch(const matrix *m, int64_t rows);

/* Lays what a product needs out from `at`, which is aligned as a float is; returns where that ends, aligned again. */
uint8_t *product_prepare(product *job, uint8_t *at);

/* A row of x as numbers, in the forms that its experts want. */
void product_quantize(const product *job, int64_t row);

/* Every row of x, on all threads of the pool. */
void product_quantize_all(pool *p, product *job);

/* Blocks that a task of a product is best made of, where a call has so many in all. */
int64_t product_together(const pool *p, int64_t blocks);

/* A task's rows of y, for all of an expert's tokens. */
void product_of_task(const product *job, const expert *e, int64_t task);
#endif
#endif
