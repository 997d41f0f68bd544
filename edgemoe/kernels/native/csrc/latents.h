/* Multi-head latent attention, of one token of each of some sequences or of consecutive tokens of one; edgemoe/layers/mla.py has
 * the formulas. */
#pragma once
#include "attention/decode.h"

#if COMPILED
/* Which numbers of a rotary part are rotated together: of two halves; neighbours, whose results are two halves; neighbours, by
 * float32 tables, whose results stay neighbours; none. */
enum { HALVES, PAIRS, WIDE_PAIRS, UNROTATED };

typedef struct {
    int64_t heads, key, value, latent, rotary; /* numbers of a head's query without rotary part, of its values, ... */
    const void *keys, *values; /* of a head [latent, key] and [value, latent]: int8, or bf16 where there are no scales */
    const uint16_t *key_scale, *value_scale; /* of a head's columns of keys, and of its rows of values; NULL: none */
    int64_t stride, scale_stride;            /* numbers from a head's matrices, and scales, to those of the next one */
    const void *norm;                        /* [latent], of edgemoe_rms_norm */
    float epsilon;
    int32_t wide_norm;
    int64_t pairing;                         /* HALVES .. */
} latent_attention;

/* Cosines and sines that a token has. */
static inline int64_t latents_rotation(const latent_attention *l) {
    return l->pairing == UNROTATED ? 0 : l->pairing == WIDE_PAIRS ? l->rotary / 2 : l->rotary;
}

/* Norms latents, rotates the keys' rotary parts, both of compressed [rows, latent + rotary], and writes them to the KV at
 * index past. kv [rows] where `each` is 1; 0: all rows are of one sequence, consecutive from its index past on. Returns 0,
 * OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_store_latents(pool *p, const latent_attention *l, const attention_kv *kv, int64_t each, int64_t rows, const uint16_t *compressed,
                          const void *cosine, const void *sine);

/* Queries in the form of keys, [rows, heads, latent + rotary], of x [rows, heads, key + rotary]. Returns 0, or OUT_OF_MEMORY. */
int edgemoe_latent_queries(pool *p, const latent_attention *l, int64_t rows, const uint16_t *x, const void *cosine, const void *sine, uint16_t *y);

/* Sums of values [rows, heads, value] of sums of latents x [rows, heads, latent + rotary], which change where the KV is rotated.
 * kv as above. Returns 0, or OUT_OF_MEMORY. */
int edgemoe_latent_values(pool *p, const latent_attention *l, const attention_kv *kv, int64_t each, int64_t rows, uint16_t *x, uint16_t *y);

/* Consecutive tokens of a sequence, a row each. */
typedef struct {
    int64_t rows, window;      /* window: latest tokens that a row sees; 0: all */
    const uint16_t *queries;   /* [rows, heads, key + rotary] */
    const uint16_t *compressed;   /* [rows, latent + rotary] */
    const void *cosine, *sine; /* of their positions */
    int64_t block;             /* rows that are computed together; all rows where `received` is counted */
    uint16_t *as_keys, *summed; /* [block, heads, latent + rotary], scratch */
    uint16_t *out;             /* [rows, heads, value] */
    int64_t counted;           /* as edgemoe_attention_rows has them */
    float *received;
} latent_rows;

/* Latent attention of consecutive tokens after kv->past others: stores, attends, and returns sums of values. `shape` is prepared,
 * of keys of latent + rotary numbers. A row's bits do not depend on the others. Returns 0, OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_latent_rows(pool *p, const latent_attention *l, const attention_shape *shape, const attention_kv *kv, const latent_rows *r);
#endif
