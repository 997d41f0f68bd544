/* The sizes, KV and queries of attention, of one token of each of some sequences (decode.h) or of consecutive tokens of one
 * sequence (prefill.h). */
#pragma once
#include "kv_rows.h"

#if COMPILED
static const float MASKED = -1e30f; /* score of a key that a query does not attend to */

/* Which numbers of a head are rotated together: of two halves, by bf16 tables, with every product rounded; of two halves,
 * or neighbours, by float32 tables, with the result rounded alone. */
enum { ROTATE_HALVES, ROTATE_WIDE_HALVES, ROTATE_WIDE_PAIRS };

typedef struct {
    int64_t heads, kv_heads, dim;     /* dim % 16 == 0 */
    int64_t rotated;                  /* leading numbers of a head that are rotated by its position; even */
    const void *q_norm, *k_norm;      /* weights; NULL: no norm */
    int64_t q_norm_size, k_norm_size; /* consecutive numbers that one norm covers */
    float q_epsilon, k_epsilon, scaling;
    float clip;         /* largest magnitude of projected numbers, after their norms; 0: any */
    const float *sinks; /* [heads], one more score in each head's softmax, without a value; NULL: none */
    int64_t prepared;   /* nonzero: a row of qkv has finished queries alone, and the KV has the keys and values already */
    int64_t wide_norms; /* the form of the norms, NARROW_NORM .. */
    int64_t pairing;    /* ROTATE_HALVES .. */
    int64_t norms_last; /* nonzero: the norms come after the rotation */
    int64_t queries_alone; /* nonzero: keys are not rotated */
    int64_t value_dim;  /* numbers of a projected value, and of a head's result; zeros follow it in the KV, up to dim */
    const void *v_norm; /* weight of a norm of each value, [value_dim]; NULL: no norm */
    float v_epsilon, v_scale; /* v_scale: factor of the values, which are then rounded; 0: none */
    int64_t values_are_keys;  /* nonzero: no values are projected; they are the keys before the keys' norm and rotation */
} attention_shape;

typedef struct {
    uint8_t *keys, *values;             /* rows of their formats, [kv_heads, context] each */
    int64_t context, past, first;       /* tokens: capacity, number before this token, first one that it attends to */
    int64_t key_format, value_format;   /* KV_BF16 .. */
    int64_t rotation;                   /* numbers of keys and queries that are rotated together (kv_rotate); 0: none */
} attention_kv;

/* Whether the heads can be computed, and `rows` more tokens have places in the KV. */
static inline int attention_fits(const attention_shape *s, const attention_kv *kv, int64_t rows) {
    return s->dim > 0 && s->dim % 16 == 0 && s->dim <= KV_MOST_DIM && s->rotated >= 0 && s->rotated % 2 == 0 && s->rotated <= s->dim && s->value_dim > 0 && s->value_dim <= s->dim && s->kv_heads > 0 && s->heads > 0 && s->heads % s->kv_heads == 0 && rows > 0 &&
           kv->past >= 0 && kv->past + rows <= kv->context && kv->first >= 0 && kv->first <= kv->past &&
           kv->key_format >= 0 && kv->key_format < KV_FORMATS && kv->value_format >= 0 && kv->value_format < KV_FORMATS &&
           (!kv->rotation || (!(kv->rotation & (kv->rotation - 1)) && s->dim % kv->rotation == 0));
}

/* Numbers of a token's row of qkv. */
static inline int64_t attention_row_size(const attention_shape *s) {
    const int64_t value = s->values_are_keys ? 0 : s->value_dim;
    return s->heads * s->dim + (s->prepared ? 0 : s->kv_heads * (s->dim + value));
}

/* The tables of a row of a call: [rows, rotated], of float32 tables the first half of each row alone is read. */
static inline const void *attention_table(const attention_shape *s, const void *table, int64_t row) {
    return (const uint8_t *)table + row * s->rotated * (s->pairing == ROTATE_HALVES ? 2 : 4);
}

/* The largest score and the sum of weights of a head's softmax before its first key. */
static inline void attention_start(const attention_shape *s, int64_t head, float *largest, float *total) {
    *largest = s->sinks ? s->sinks[head] : MASKED;
    *total = s->sinks ? 1 : 0;
}

/* A query [dim] of qkv, rotated as keys are stored and rounded. */
INLINE void attention_query(const uint16_t *query, int64_t dim, int64_t rotation, uint16_t *to) {
    float wide[KV_MOST_DIM];
    memcpy(to, query, (size_t)dim * sizeof *to);
    if (!rotation) return;
    for (int64_t i = 0; i < dim; i++) wide[i] = from_bf16(query[i]);
    kv_rotate(wide, dim, rotation);
    for (int64_t i = 0; i < dim; i++) to[i] = to_bf16(wide[i]);
}

#endif
