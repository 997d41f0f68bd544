/* The recurrence of linear attention. A task is COLUMNS columns of one head's state, for all tokens: they stay in the
 * cache, and no thread waits for another. */
#include "delta.h"

#include "delta_step.h"

#if COMPILED
#include <math.h>

typedef struct {
    const uint16_t *q, *k, *v;
    const float *decay, *rate;
    int64_t tokens, key_heads, heads, key_dim, value_dim, decays;
    float *state;
    uint16_t *out;
} delta_job;

/* Numbers of one head, wide, normalised and scaled. */
AVX2 static void widened(const delta_job *job, const uint16_t *x, float scale, float *to) {
    for (int64_t i = 0; i < job->key_dim; i++) to[i] = from_bf16(x[i]);
    delta_normalised(to, job->key_dim, scale, to);
}

AVX2 static void delta_task(void *of, int64_t task) {
    const delta_job *job = of;
    const int64_t blocks = ceil_div(job->value_dim, COLUMNS), head = task / blocks, from = task % blocks * COLUMNS;
    const int64_t width = min_of(COLUMNS, job->value_dim - from), key_head = head / (job->heads / job->key_heads);
    float *state = job->state + head * job->key_dim * job->value_dim + from;
    float q[MOST_KEY_DIM], k[MOST_KEY_DIM], keep[MOST_KEY_DIM], sums[COLUMNS], value[COLUMNS];
    for (int64_t t = 0; t < job->tokens; t++) {
        const int64_t key_at = (t * job->key_heads + key_head) * job->key_dim, at = t * job->heads + head;
        const delta_token token = {q, k, keep, job->decays > 1, job->rate[at]};
        widened(job, job->q + key_at, 1 / __builtin_sqrtf((float)job->key_dim), q);
        widened(job, job->k + key_at, 1, k);
        for (int64_t i = 0; i < job->decays; i++) keep[i] = expf(job->decay[at * job->decays + i]);
        for (int64_t j = 0; j < width; j++) value[j] = from_bf16(job->v[at * job->value_dim + from + j]);
        delta_columns(&token, job->key_dim, job->value_dim, width, state, state, value, sums);
        for (int64_t j = 0; j < width; j++) job->out[at * job->value_dim + from + j] = to_bf16(sums[j]);
    }
}

AVX2 int edgemoe_delta_rule(pool *p, const uint16_t *q, const uint16_t *k, const uint16_t *v, const float *decay, const float *rate,
                            int64_t tokens, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim,
                            int64_t decays, float *state, uint16_t *out) {
    if (tokens < 1 || key_heads < 1 || heads % key_heads || key_dim < 1 || key_dim > MOST_KEY_DIM || value_dim < 1) return WRONG_SHAPE;
    if (decays != 1 && decays != key_dim) return WRONG_SHAPE;
    if (!pool_acquire(p, 64)) return OUT_OF_MEMORY;
    delta_job job = {q, k, v, decay, rate, tokens, key_heads, heads, key_dim, value_dim, decays, state, out};
    pool_run(p, delta_task, &job, heads * ceil_div(value_dim, COLUMNS));
    pool_release(p);
    return 0;
}
#endif
