/* Multi-head latent attention: rotations, products with each head's matrices, and the write to the KV. */
#include "latents.h"

#include "attention/prefill.h"
#include "dense/dense.h"

#if COMPILED
INLINE float product(uint16_t x, uint16_t by) { return from_bf16(to_bf16(from_bf16(x) * from_bf16(by))); }

/* to = x [rotary], rotated by a token's position, rounded where transformers rounds. */
AVX2 static void rotate(const latent_attention *l, const uint16_t *x, const void *cosine, const void *sine, uint16_t *to) {
    const int64_t half = l->rotary / 2;
    const uint16_t *c = cosine, *s = sine;
    const float *wide_c = cosine, *wide_s = sine;
    if (l->pairing == UNROTATED) {
        memcpy(to, x, (size_t)l->rotary * sizeof *to);
        return;
    }
    for (int64_t i = 0; i < half; i++) {
        const uint16_t a = x[l->pairing == HALVES ? i : 2 * i], b = x[l->pairing == HALVES ? i + half : 2 * i + 1];
        if (l->pairing == WIDE_PAIRS) {
            to[2 * i] = to_bf16(from_bf16(a) * wide_c[i] - from_bf16(b) * wide_s[i]);
            to[2 * i + 1] = to_bf16(from_bf16(a) * wide_s[i] + from_bf16(b) * wide_c[i]);
        } else {
            const int64_t last = l->pairing == HALVES ? i + half : i;
            to[i] = to_bf16(product(a, c[i]) - product(b, s[i]));
            to[i + half] = to_bf16(product(b, c[last]) + product(a, s[last]));
        }
    }
}

/* The tables of a row. */
static const void *table_of(const latent_attention *l, const void *table, int64_t row) {
    return (const uint8_t *)table + row * latents_rotation(l) * (l->pairing == WIDE_PAIRS ? 4 : 2);
}

enum { ROWS = 8 }; /* of a task */

/* Rows that tasks of ROWS rows change. */
typedef struct {
    const latent_attention *latents;
    const attention_kv *kv;
    int64_t each, rows;
    const uint16_t *x;
    const void *cosine, *sine;
    uint16_t *y;
} rows_job;

/* Runs a task for each ROWS rows; a few rows take less time than threads take to start. */
static int by_rows(pool *p, task_fn fn, rows_job *job) {
    const int64_t tasks = ceil_div(job->rows, ROWS);
    if (tasks > 2 && !pool_acquire(p, 0)) return OUT_OF_MEMORY;
    if (tasks > 2) pool_run(p, fn, job, tasks);
    else for (int64_t task = 0; task < tasks; task++) fn(job, task);
    if (tasks > 2) pool_release(p);
    return 0;
}

AVX2 static void store_task(void *of, int64_t task) {
    const rows_job *job = of;
    const latent_attention *l = job->latents;
    const int64_t dim = l->latent + l->rotary, end = min_of((task + 1) * ROWS, job->rows);
    uint16_t key[KV_MOST_DIM];
    for (int64_t row = task * ROWS; row < end; row++) {
        const attention_kv *kv = job->kv + row * job->each;
        const int64_t at = kv->past + (job->each ? 0 : row);
        const uint16_t *compressed = job->x + row * dim;
        edgemoe_rms_norm(compressed, l->norm, l->wide_norm, l->epsilon, 1, l->latent, key);
        rotate(l, compressed + l->latent, table_of(l, job->cosine, row), table_of(l, job->sine, row), key + l->latent);
        kv_store(kv->key_format, key, dim, kv->rotation, kv->keys + at * kv_row_bytes(kv->key_format, dim));
    }
}

AVX2 int edgemoe_store_latents(pool *p, const latent_attention *l, const attention_kv *kv, int64_t each, int64_t rows, const uint16_t *compressed,
                               const void *cosine, const void *sine) {
    if (l->latent + l->rotary > KV_MOST_DIM) return WRONG_SHAPE;
    for (int64_t i = 0; i < (each ? rows : 1); i++) {
        const int64_t last = kv[i].past + (each ? 0 : rows - 1);
        if (kv[i].past < 0 || last >= kv[i].context || kv[i].key_format < 0 || kv[i].key_format >= KV_FORMATS) return WRONG_SHAPE;
    }
    rows_job job = {l, kv, each, rows, compressed, cosine, sine, NULL};
    return by_rows(p, store_task, &job);
}

AVX2 static void rotate_task(void *of, int64_t task) {
    const rows_job *job = of;
    const latent_attention *l = job->latents;
    const int64_t from = l->key + l->rotary, to = l->latent + l->rotary, end = min_of((task + 1) * ROWS, job->rows);
    for (int64_t row = task * ROWS; row < end; row++)
        for (int64_t head = row * l->heads; head < (row + 1) * l->heads; head++)
            rotate(l, job->x + head * from + l->key, table_of(l, job->cosine, row), table_of(l, job->sine, row), job->y + head * to + l->latent);
}

AVX2 int edgemoe_latent_queries(pool *p, const latent_attention *l, int64_t rows, const uint16_t *x, const void *cosine, const void *sine,
                                uint16_t *y) {
    const int64_t from = l->key + l->rotary, to = l->latent + l->rotary;
    const dense_heads keys = {l->keys, l->key_scale, l->scale_stride, 1, l->heads, l->stride, l->latent, l->key, from, to,
                              l->heads * from, l->heads * to};
    rows_job job = {l, NULL, 0, rows, x, cosine, sine, y};
    const int failed = edgemoe_dense_heads(p, &keys, x, rows, y);
    return failed ? failed : by_rows(p, rotate_task, &job);
}

/* Undoes the rotation that latents are stored with. */
AVX2 static void undo(uint16_t *x, int64_t count, int64_t rotation) {
    float wide[KV_MOST_DIM];
    for (int64_t i = 0; i < count; i++) wide[i] = from_bf16(x[i]);
    kv_rotate(wide, count, rotation);
    for (int64_t i = 0; i < count; i++) x[i] = to_bf16(wide[i]);
}

AVX2 static void undo_task(void *of, int64_t task) {
    const rows_job *job = of;
    const latent_attention *l = job->latents;
    const int64_t from = l->latent + l->rotary, end = min_of((task + 1) * ROWS, job->rows);
    for (int64_t row = task * ROWS; row < end; row++) {
        const int64_t rotation = job->kv[row * job->each].rotation;
        for (int64_t head = row * l->heads; head < (row + 1) * l->heads && rotation; head++) undo(job->y + head * from, l->latent, rotation);
    }
}

AVX2 int edgemoe_latent_values(pool *p, const latent_attention *l, const attention_kv *kv, int64_t each, int64_t rows, uint16_t *x, uint16_t *y) {
    const int64_t from = l->latent + l->rotary;
    const dense_heads values = {l->values, l->value_scale, l->scale_stride, 0, l->heads, l->stride, l->value, l->latent, from, l->value,
                                l->heads * from, l->heads * l->value};
    rows_job job = {l, kv, each, rows, NULL, NULL, NULL, x};
    const int failed = by_rows(p, undo_task, &job);
    return failed ? failed : edgemoe_dense_heads(p, &values, x, rows, y);
}

/* Attention of rows [from, from + rows), whose keys are stored. */
static int attend_block(pool *p, const latent_attention *l, const attention_shape *shape, const attention_kv *kv, const latent_rows *r, int64_t from,
                        int64_t rows) {
    attention_kv of_rows = *kv;
    of_rows.past += from;
    if (r->window && of_rows.past >= r->window) of_rows.first = of_rows.past + 1 - r->window;
    int failed = edgemoe_latent_queries(p, l, rows, r->queries + from * l->heads * (l->key + l->rotary), table_of(l, r->cosine, from),
                                        table_of(l, r->sine, from), r->as_keys);
    if (failed) return failed;
    if (rows == 1 && !r->received) failed = edgemoe_attention(p, shape, &of_rows, 1, r->as_keys, NULL, NULL, r->summed);
    else failed = edgemoe_attention_rows(p, shape, &of_rows, rows, r->window, NULL, r->as_keys, NULL, NULL, r->summed, r->counted, r->received);
    return failed ? failed : edgemoe_latent_values(p, l, &of_rows, 0, rows, r->summed, r->out + from * l->heads * l->value);
}

AVX2 int edgemoe_latent_rows(pool *p, const latent_attention *l, const attention_shape *shape, const attention_kv *kv, const latent_rows *r) {
    if (shape->dim != l->latent + l->rotary || shape->value_dim != shape->dim || shape->heads != l->heads || shape->kv_heads != 1 || !shape->prepared) return WRONG_SHAPE;
    if (!attention_fits(shape, kv, r->rows) || r->block < 1 || (r->received && r->block < r->rows)) return WRONG_SHAPE;
    int failed = edgemoe_store_latents(p, l, kv, 0, r->rows, r->compressed, r->cosine, r->sine);
    for (int64_t row = 0; row < r->rows && !failed; row += r->block) failed = attend_block(p, l, shape, kv, r, row, min_of(r->block, r->rows - row));
    return failed;
}
#endif
