/* Products of several experts' matrices with their rows of activations. */
#pragma once
#include "planes.h"
#include "../pool.h"

#if COMPILED
/* Quantized rows: q [chunks, rows, chunk], of 2 bytes for A14 and 1 for A8; scale and sum [chunks, rows]. */
typedef struct { int8_t *q; float *scale, *sum; } activations;

/* Rows of y = each expert's matrix times its rows of x. */
typedef struct {
    const matrix *m;
    const expert *experts;
    int64_t count, chunk, rows; /* of experts, columns of a chunk, rows of x in all */
    int64_t blocks_per_task;
    int rows_as_y;              /* x is the output of a first product: an expert's rows have the same index as in y */
    const uint16_t *x;
    const int64_t *row_of;      /* [rows]: indices into x; NULL: row i of x is row i */
    activations quantized;      /* every row of x in A8: q [x_rows, cols], scale and sum [x_rows, chunks]; or NULL */
    uint8_t *formats;           /* [rows]: the formats that each row is needed in */
    activations a14, a8;
    uint16_t *y;
    int64_t projection, projections; /* of the matrix, the first in PROJECTIONS and how many: gate and up, or down */
    int64_t compensated, ranks;      /* experts with factors, and the most ranks of one, of the matrix's projections */
    const expert **with_factors;     /* [compensated] */
    float *t;                        /* [rows of y, ranks]: V x of each row */
} product;

enum { MAX_TASK_BLOCKS = 16 };

INLINE int64_t blocks_of(const matrix *m) { return ceil_div(m->rows, BLOCK_ROWS); }

/* Tasks per expert. */
INLINE int64_t tasks_of(const product *job) { return ceil_div(blocks_of(job->m), job->blocks_per_task); }

/* Counts a job's factors, and whether they fit its matrix. */
int product_factors_fit(product *job);

/* Scratch bytes of a product with `y_rows` rows of y; scratch_bytes in native/experts.py counts the same for planes, and
 * resident_bytes in kernels/compensators.py for factors. */
size_t product_scratch_bytes(const product *job, int64_t y_rows);

/* Lays out a product's scratch from `at`, aligned for float; returns its end, a multiple of 64. */
uint8_t *product_prepare(product *job, int64_t y_rows, uint8_t *at);

/* Sets the rows of a product: those of x [x_rows, cols], or with row_of [count] the rows of x with these indices; quantized:
 * edgemoe_quantize_rows of x, or NULL. Returns whether the indices are those of rows. */
int product_take_rows(product *job, const uint16_t *x, int64_t x_rows, const int64_t *row_of, int64_t count, uint8_t *quantized);

/* Quantizes a row of x to the formats that its experts need; A8 is copied where x is quantized. */
void product_quantize(const product *job, int64_t row);

/* Multiplies an expert's compensated rows of x with its factors V. */
void product_project(const product *job, const expert *e);

/* Quantizes every row of x, and multiplies rows with factors V, on all threads of the pool. */
void product_start(pool *p, product *job);

/* Computes a task's rows of y, for all of an expert's tokens. */
void product_run_task(const product *job, const expert *e, int64_t task);
#endif
