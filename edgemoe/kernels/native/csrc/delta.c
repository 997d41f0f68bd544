/* The recurrences of linear attention and of Mamba-2. A task is COLUMNS columns of one head's state, for all tokens: they stay in the
 * cache, and no thread waits for another. */
#include "delta.h"

#if COMPILED
#include <math.h>

enum { COLUMNS = 32, MOST_KEY_DIM = 1024 };

static const float NORM_EPSILON = 1e-6f;

typedef struct {
    const uint16_t *q, *k, *v;
    const float *decay, *rate, *skip;
    int64_t tokens, key_heads, heads, key_dim, value_dim, decays;
    float *state;
    uint16_t *out;
} delta_job;

/* x / sqrt(sum of squares + epsilon) * scale. */
AVX2 static void normalised(const uint16_t *x, int64_t count, float scale, float *to) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) to[i] = from_bf16(x[i]), sum = __builtin_fmaf(to[i], to[i], sum);
    const float by = 1 / __builtin_sqrtf(sum + NORM_EPSILON) * scale;
    for (int64_t i = 0; i < count; i++) to[i] *= by;
}

/* Numbers of one head, wide: normalised and scaled under the delta rule, as they are otherwise. */
AVX2 static void widened(const delta_job *job, const uint16_t *x, float scale, float *to) {
    if (!job->skip) normalised(x, job->key_dim, scale, to);
    else for (int64_t i = 0; i < job->key_dim; i++) to[i] = from_bf16(x[i]);
}

AVX2 static void delta_task(void *of, int64_t task) {
    const delta_job *job = of;
    const int64_t blocks = ceil_div(job->value_dim, COLUMNS), head = task / blocks, from = task % blocks * COLUMNS;
    const int64_t width = min_of(COLUMNS, job->value_dim - from), key_head = head / (job->heads / job->key_heads);
    float *state = job->state + head * job->key_dim * job->value_dim + from;
    float q[MOST_KEY_DIM], k[MOST_KEY_DIM], keep[MOST_KEY_DIM], held[COLUMNS], sums[COLUMNS], value[COLUMNS];
    for (int64_t t = 0; t < job->tokens; t++) {
        const int64_t key_at = (t * job->key_heads + key_head) * job->key_dim, at = t * job->heads + head;
        widened(job, job->q + key_at, 1 / __builtin_sqrtf((float)job->key_dim), q);
        widened(job, job->k + key_at, 1, k);
        for (int64_t i = 0; i < job->decays; i++) keep[i] = expf(job->decay[at * job->decays + i]);
        for (int64_t i = job->decays; i < job->key_dim; i++) keep[i] = keep[0];
        for (int64_t j = 0; j < width; j++) value[j] = from_bf16(job->v[at * job->value_dim + from + j]);
        for (int64_t j = 0; j < COLUMNS; j++) held[j] = sums[j] = 0;
        for (int64_t i = 0; i < job->key_dim; i++) {
            float *row = state + i * job->value_dim;
            for (int64_t j = 0; j < width; j++) row[j] *= keep[i], held[j] = __builtin_fmaf(k[i], row[j], held[j]);
        }
        for (int64_t j = 0; j < width; j++) {
            if (job->skip) held[j] = 0, sums[j] = job->skip[head] * value[j];
            held[j] = (value[j] - held[j]) * job->rate[at];
        }
        for (int64_t i = 0; i < job->key_dim; i++) {
            float *row = state + i * job->value_dim;
            for (int64_t j = 0; j < width; j++) row[j] = __builtin_fmaf(k[i], held[j], row[j]), sums[j] = __builtin_fmaf(q[i], row[j], sums[j]);
        }
        for (int64_t j = 0; j < width; j++) job->out[at * job->value_dim + from + j] = to_bf16(sums[j]);
    }
}

AVX2 int edgemoe_delta_rule(pool *p, const uint16_t *q, const uint16_t *k, const uint16_t *v, const float *decay, const float *rate,
                            const float *skip, int64_t tokens, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim,
                            int64_t decays, float *state, uint16_t *out) {
    if (tokens < 1 || key_heads < 1 || heads % key_heads || key_dim < 1 || key_dim > MOST_KEY_DIM || value_dim < 1) return WRONG_SHAPE;
    if (decays != 1 && decays != key_dim) return WRONG_SHAPE;
    if (!pool_acquire(p, 64)) return OUT_OF_MEMORY;
    delta_job job = {q, k, v, decay, rate, skip, tokens, key_heads, heads, key_dim, value_dim, decays, state, out};
    pool_run(p, delta_task, &job, heads * ceil_div(value_dim, COLUMNS));
    pool_release(p);
    return 0;
}
#endif
