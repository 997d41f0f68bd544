/* Multi-head latent attention: rotations, products with each head's matrices, and the write to the KV. */
#include "latents.h"

#include "dense/dense.h"

#if COMPILED
INLINE float product(uint16_t x, uint16_t by) { return from_bf16(to_bf16(from_bf16(x) * from_bf16(by))); }

/* to = x [rotary], rotated by a token's position, rounded where transformers rounds. */
AVX2 static void rotate(const latent_attention *l, const uint16_t *x, const void *cosine, const void *sine, uint16_t *to) {
    const int64_t half = l->rotary / 2;
    const uint16_t *c = cosine, *s = sine;
    const float *wide_c = cosine, *wide_s = sine;
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

AVX2 int edgemoe_store_latents(const latent_attention *l, const attention_kv *kv, int64_t rows, const uint16_t *compressed, const void *cosine,
                               const void *sine) {
    const int64_t dim = l->latent + l->rotary;
    uint16_t key[KV_MOST_DIM];
    if (dim > KV_MOST_DIM) return WRONG_SHAPE;
    for (int64_t row = 0; row < rows; row++, kv++, compressed += dim) {
        if (kv->past < 0 || kv->past >= kv->context || kv->key_format < 0 || kv->key_format >= KV_FORMATS) return WRONG_SHAPE;
        edgemoe_rms_norm(compressed, l->norm, l->wide_norm, l->epsilon, 1, l->latent, key);
        rotate(l, compressed + l->latent, table_of(l, cosine, row), table_of(l, sine, row), key + l->latent);
        kv_store(kv->key_format, key, dim, kv->rotation, kv->keys + kv->past * kv_row_bytes(kv->key_format, dim));
    }
    return 0;
}

AVX2 int edgemoe_latent_queries(pool *p, const latent_attention *l, int64_t rows, const uint16_t *x, const void *cosine, const void *sine,
                                uint16_t *y) {
    const int64_t from = l->key + l->rotary, to = l->latent + l->rotary;
    const dense_heads keys = {l->keys, l->key_scale, l->scale_stride, 1, l->heads, l->stride, l->latent, l->key, from, to,
                              l->heads * from, l->heads * to};
    const int failed = edgemoe_dense_heads(p, &keys, x, rows, y);
    for (int64_t row = 0; row < rows && !failed; row++, x += l->heads * from, y += l->heads * to)
        for (int64_t head = 0; head < l->heads; head++)
            rotate(l, x + head * from + l->key, table_of(l, cosine, row), table_of(l, sine, row), y + head * to + l->latent);
    return failed;
}

/* Undoes the rotation that latents are stored with. */
AVX2 static void undo(uint16_t *x, int64_t count, int64_t rotation) {
    float wide[KV_MOST_DIM];
    for (int64_t i = 0; i < count; i++) wide[i] = from_bf16(x[i]);
    kv_rotate(wide, count, rotation);
    for (int64_t i = 0; i < count; i++) x[i] = to_bf16(wide[i]);
}

AVX2 int edgemoe_latent_values(pool *p, const latent_attention *l, const attention_kv *kv, int64_t rows, uint16_t *x, uint16_t *y) {
    const int64_t from = l->latent + l->rotary;
    const dense_heads values = {l->values, l->value_scale, l->scale_stride, 0, l->heads, l->stride, l->value, l->latent, from, l->value,
                                l->heads * from, l->heads * l->value};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < l->heads && kv[row].rotation; head++) undo(x + (row * l->heads + head) * from, l->latent, kv[row].rotation);
    return edgemoe_dense_heads(p, &values, x, rows, y);
}
#endif
