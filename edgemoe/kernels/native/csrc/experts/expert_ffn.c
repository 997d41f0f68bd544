/* Whole experts in one call, and the weighted sum of their outputs. */
#include <stdatomic.h>

#include "expert_ffn.h"
#include "products.h"

#if COMPILED
/* Both products of several experts and the gating between them, without a barrier: the tasks of an expert's second
 * product follow those of the next expert's first. The thread that ends the last task of a first product computes the
 * gating; tasks of the second product wait for it, and never for a later task. */
typedef struct {
    product up, down;
    int64_t inner;    /* columns of the gating's output; down's columns are padded */
    const expert_activation *activation; /* NULL: silu(gate) up */
    atomic_int *left; /* [count]: unfinished tasks of the first product; -1: gated */
} experts_job;

/* Writes silu(gate) up over the start of a row of gate and up, `inner` of each; rounded where transformers rounds. */
INLINE void gate_row(uint16_t *row, int64_t inner) {
    const __m256 one = _mm256_set1_ps(1);
    for (int64_t i = 0; i < inner; i += 8) {
        uint16_t both[16] = {0};
        const int64_t n = min_of(inner - i, 8);
        memcpy(both, row + i, (size_t)n * 2);
        memcpy(both + 8, row + inner + i, (size_t)n * 2);
        const __m256 x = eight_from_bf16(both);
        const exponential_factors e = factors_of_exponential(_mm256_sub_ps(_mm256_setzero_ps(), x));
        _mm_storeu_si128((__m128i *)both, eight_to_bf16(_mm256_div_ps(x, _mm256_fmadd_ps(e.y, e.power, one))));
        const __m256 gated = _mm256_mul_ps(eight_from_bf16(both), eight_from_bf16(both + 8));
        _mm_storeu_si128((__m128i *)both, eight_to_bf16(gated));
        memcpy(row + i, both, (size_t)n * 2);
    }
}

/* x + bias, rounded. */
INLINE uint16_t biased(uint16_t x, const uint16_t *bias, int64_t i) { return bias ? to_bf16(from_bf16(x) + from_bf16(bias[i])) : x; }

/* Writes the activation of a row of gate and up to `to` [inner]. */
INLINE void activate_row(const expert_activation *a, const uint16_t *row, int64_t number, int64_t inner, uint16_t *to) {
    const uint16_t *bias = a->up_bias ? a->up_bias + number * (a->up ? 2 : 1) * inner : NULL;
    const uint16_t *narrow = a->gate;
    const float *wide = a->wide_gate ? a->gate : NULL;
    for (int64_t i = 0; i < inner && !a->up; i++) to[i] = narrow[biased(row[i], bias, i)];
    if (!a->up) return;
    for (int64_t i = 0; i < inner; i++) {
        const int64_t gate = a->interleaved ? 2 * i : i, up = a->interleaved ? 2 * i + 1 : inner + i;
        const uint16_t x = biased(row[gate], bias, gate);
        to[i] = to_bf16((wide ? wide[x] : from_bf16(narrow[x])) * from_bf16(a->up[biased(row[up], bias, up)]));
    }
}

/* Adds each expert's bias to its rows of y. */
AVX2 static void add_biases(const expert_activation *a, const expert *experts, int64_t count, int64_t cols, uint16_t *y) {
    for (const expert *e = experts; e < experts + count; e++)
        for (int64_t row = e->y; row < e->y + e->tokens; row++)
            for (int64_t i = 0; i < cols; i++) y[row * cols + i] = biased(y[row * cols + i], a->down_bias + e->number * cols, i);
}

INLINE void gate_expert(const experts_job *job, const expert *e) {
    const int64_t cols = job->down.m->cols;
    for (int64_t row = e->y; row < e->y + e->tokens; row++) {
        uint16_t *from = job->up.y + row * job->up.m->rows, *to = (uint16_t *)job->down.x + row * cols;
        if (job->activation) activate_row(job->activation, from, e->number, job->inner, to);
        else {
            gate_row(from, job->inner);
            memcpy(to, from, (size_t)job->inner * 2);
        }
        memset(to + job->inner, 0, (size_t)(cols - job->inner) * 2);
        product_quantize(&job->down, row);
    }
    product_project(&job->down, e);
}

AVX2 static void experts_task(void *argument, int64_t task) {
    experts_job *job = argument;
    const int64_t up = tasks_of(&job->up), both = up + tasks_of(&job->down);
    /* First `up` tasks of expert 0; then, for each expert, `up` of the next one and `down` of its own. */
    int64_t number = task < up ? 0 : (task - up) / both, part = task < up ? task : (task - up) % both, second = 0;
    if (task >= up) {
        const int64_t of_next = number + 1 < job->up.count ? up : 0;
        second = part >= of_next;
        if (second) part -= of_next;
        else number++;
    }
    const expert *e = job->up.experts + number;
    atomic_int *left = job->left + number;
    if (second) {
        for (int i = 1; atomic_load(left) >= 0; i++) spin_once(i);
        product_run_task(&job->down, e, part);
        return;
    }
    product_run_task(&job->up, e, part);
    if (atomic_fetch_sub(left, 1) == 1) {
        gate_expert(job, e);
        atomic_store(left, -1);
    }
}

AVX2 int edgemoe_experts(pool *p, const matrix *up, const matrix *down, int64_t inner, const expert *experts,
                         int64_t count, const uint16_t *x, int64_t x_rows, int64_t x_cols, const int64_t *row_of,
                         uint8_t *quantized, const expert_activation *activation, uint16_t *y, int64_t y_rows, int64_t y_cols) {
    if (!matrix_fits(up) || !matrix_fits(down) || up->cols != x_cols || down->rows != y_cols) return WRONG_SHAPE;
    const int64_t gated = !activation || activation->up;
    if (inner < 1 || (1 + gated) * inner > up->rows || inner > down->cols) return WRONG_SHAPE;
    experts_job job = {
        .up = {.m = up, .projections = 2, .experts = experts, .count = count},
        .down = {.m = down, .projection = 2, .projections = 1, .experts = experts, .count = count, .rows = y_rows,
                 .rows_as_y = 1, .y = y},
        .inner = inner,
        .activation = activation,
    };
    if (!product_take_rows(&job.up, x, x_rows, row_of, y_rows, quantized)) return WRONG_SHAPE;
    if (!experts_fit(experts, count, job.up.rows, y_rows)) return WRONG_SHAPE;
    if (!product_factors_fit(&job.up) || !product_factors_fit(&job.down)) return WRONG_SHAPE;
    const size_t between = (size_t)(y_rows * (up->rows + down->cols)) * sizeof(uint16_t);
    const size_t of_products = product_scratch_bytes(&job.up, y_rows) + product_scratch_bytes(&job.down, y_rows);
    uint8_t *scratch = pool_acquire(p, of_products + between + (size_t)count * sizeof(atomic_int));
    if (!scratch) return OUT_OF_MEMORY;
    const int64_t blocks = count * (blocks_of(up) + blocks_of(down));
    job.up.blocks_per_task = job.down.blocks_per_task = pool_units_per_task(p, blocks, MAX_TASK_BLOCKS);
    scratch = product_prepare(&job.down, y_rows, product_prepare(&job.up, y_rows, scratch));
    job.left = (atomic_int *)scratch;
    for (int64_t i = 0; i < count; i++) atomic_init(job.left + i, (int)tasks_of(&job.up));
    job.up.y = (uint16_t *)(job.left + count);
    job.down.x = job.up.y + y_rows * up->rows;
    product_start(p, &job.up);
    pool_run(p, experts_task, &job, count * (tasks_of(&job.up) + tasks_of(&job.down)));
    pool_release(p);
    if (activation && activation->down_bias) add_biases(activation, experts, count, y_cols, y);
    return 0;
}

/* The first n of 8 bf16 numbers in float32, and 0. */
INLINE __m256 first_from_bf16(const uint16_t *x, int64_t n) {
    uint16_t eight[8] = {0};
    if (n < 8) x = memcpy(eight, x, (size_t)n * 2);
    return eight_from_bf16(x);
}

/* One token's, of n columns, at most 8. */
INLINE __m256 sums_of(const uint16_t *rows, const int64_t *row_of, const float *weights, int64_t count, int64_t cols, int64_t n) {
    __m256 sum = _mm256_setzero_ps();
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = row_of ? row_of[i] : i;
        if (row >= 0) sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[i]), first_from_bf16(rows + row * cols, n), sum);
    }
    return sum;
}

AVX2 void edgemoe_weighted_sum(const uint16_t *rows, const int64_t *row_of, const float *weights, int64_t tokens, int64_t count,
                               int64_t cols, int add, uint16_t *to) {
    for (; tokens-- > 0; weights += count, to += cols) {
        for (int64_t k = 0; k < cols; k += 8) {
            const int64_t n = cols - k < 8 ? cols - k : 8;
            float lanes[8];
            _mm256_storeu_ps(lanes, sums_of(rows + k, row_of, weights, count, cols, n));
            for (int64_t j = 0; j < n; j++) {
                const uint16_t sum = to_bf16(lanes[j]);
                to[k + j] = add ? to_bf16(from_bf16(to[k + j]) + from_bf16(sum)) : sum;
            }
        }
        if (row_of) row_of += count;
        else rows += count * cols;
    }
}
#endif
