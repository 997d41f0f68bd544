/* Products with dense weights of 4 to 6 bits. A weight lies as one matrix of an expert does, with its bits after the fourth in d8,
 * and is multiplied as one, with 8-bit activations (experts/planes.h): every path gives the same bits, for any number of tokens. */
#include "dense_planes.h"

#include "../experts/products.h"

#if COMPILED
enum {
    DENSE_GROUP = 64,   /* columns that share a scale and a centre */
    BATCH_TOKENS = 256, /* tokens whose activations exist at once */
    MAX_UNITS = 4,      /* blocks of rows of a task for a single token */
    PREPARE_TOKENS = 8, /* tokens of a task of prepare_task */
};

typedef struct {
    product product;
    expert weight;
    int64_t tasks, threads;
} planes_job;

AVX2 static void prepare_task(void *argument, int64_t task) {
    const product *job = &((const planes_job *)argument)->product;
    const int64_t end = min_of((task + 1) * PREPARE_TOKENS, job->rows);
    for (int64_t row = task * PREPARE_TOKENS; row < end; row++) product_quantize(job, row);
}

AVX2 static void planes_task(void *argument, int64_t task) {
    const planes_job *job = argument;
    product_run_task(&job->product, &job->weight, contiguous_per_thread(task, job->tasks, job->threads));
}

int dense_planes(pool *p, const uint8_t *weight, int64_t bits, int64_t rows, int64_t cols, const uint16_t *x, int64_t tokens, uint16_t *y) {
    const int64_t parameters = cols / DENSE_GROUP * rows * 4, half = rows * cols / 4, most = min_of(tokens, BATCH_TOKENS);
    const matrix m = {.rows = rows, .cols = cols, .group = DENSE_GROUP, .half = half, .parameter_bytes = parameters,
                      .limit = bits, .low_half = rows * cols / 8 * (bits - 4)};
    if (rows % BLOCK_ROWS || !matrix_fits(&m)) return WRONG_SHAPE;
    const int64_t chunks = most * (cols / CHUNK), blocks = rows / BLOCK_ROWS;
    float *scratch = pool_acquire(p, (size_t)chunks * (2 * sizeof(float) + CHUNK) + (size_t)most);
    if (!scratch) return OUT_OF_MEMORY;
    const activations a8 = {(int8_t *)(scratch + 2 * chunks), scratch, scratch + chunks};
    uint8_t *formats = (uint8_t *)a8.q + chunks * CHUNK;
    memset(formats, A8, (size_t)most);
    const int64_t units = pool_units_per_task(p, blocks, tokens == 1 ? MAX_UNITS : 1);
    for (int64_t now; tokens > 0; tokens -= now, x += now * cols, y += now * rows) {
        now = min_of(tokens, most);
        planes_job job = {
            .product = {.m = &m, .count = 1, .chunk = CHUNK, .rows = now, .blocks_per_task = units, .x = x, .formats = formats, .a8 = a8, .y = y},
            .weight = {.parameters = weight, .base = weight + parameters, .d4 = weight + parameters + half,
                       .d8 = weight + parameters + 2 * half, .level = bits > 4 ? 8 : 4, .tokens = now},
            .tasks = ceil_div(blocks, units), .threads = pool_threads(p)};
        pool_run(p, prepare_task, &job, ceil_div(now, PREPARE_TOKENS));
        pool_run(p, planes_task, &job, job.tasks);
    }
    pool_release(p);
    return 0;
}

AVX2 int dense_planes_row(const uint8_t *weight, int64_t bits, int64_t rows, int64_t cols, int64_t row, uint16_t *y) {
    if (rows % BLOCK_ROWS || cols % DENSE_GROUP || bits < 4 || bits > 6) return WRONG_SHAPE;
    const int64_t block = row / BLOCK_ROWS * BLOCK_ROWS * cols, r = row % BLOCK_ROWS, width = bits - 4, half = rows * cols / 4;
    const uint16_t *parameters = (const uint16_t *)(const void *)weight;
    const uint8_t *base = weight + cols / DENSE_GROUP * rows * 4 + block / 4, *d4 = base + half;
    const uint8_t *next = base - block / 4 + 2 * half + block / 8 * width;
    const int unit = 1 << (8 - bits);
    const float lowest = (float)(unit - 1) / 2 - 135.5f; /* of code 0, as planes.dequantize has it */
    for (int64_t k = 0; k < cols; k++) {
        const uint16_t *pair = parameters + (k / DENSE_GROUP * rows + row) * 2;
        const int64_t four = k / 4, at = four * 32 + k % 2 * 16 + r % 16, shift = r / 16 * 4 + (k & 2);
        int code = (base[at] >> shift & 3) << 2 | (d4[at] >> shift & 3);
        if (width) {
            const int64_t eights = width == 1 ? four / 2 : four, later = width == 1 ? four % 2 * 4 : 0;
            const uint8_t byte = next[eights * 32 + k % 2 * 16 + r % 8 * 2 + k % 4 / 2];
            code = code << width | (byte >> (later + r / 8 * width) & ((1 << width) - 1));
        }
        y[k] = to_bf16(((float)(code * unit) + lowest) * (from_bf16(pair[0]) / 16) + from_bf16(pair[1]));
    }
    return 0;
}
#endif
