/* Multi-head latent attention of one token of each of some sequences; edgemoe/layers/mla.py has the formulas. */
#pragma once
#include "attention/decode.h"

#if COMPILED
/* Which numbers of a rotary part are rotated together: of two halves; neighbours, whose results are two halves; neighbours, by
 * float32 tables, whose results stay neighbours. */
enum { HALVES, PAIRS, WIDE_PAIRS };

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
static inline int64_t latents_rotation(const latent_attention *l) { return l->pairing == WIDE_PAIRS ? l->rotary / 2 : l->rotary; }

/* Norms latents, rotates the keys' rotary parts, both of compressed [rows, latent + rotary], and writes them to the KV at
 * index past. Returns 0, or WRONG_SHAPE. */
int edgemoe_store_latents(const latent_attention *l, const attention_kv *kv, int64_t rows, const uint16_t *compressed, const void *cosine,
                          const void *sine);

/* Queries in the form of keys, [rows, heads, latent + rotary], of x [rows, heads, key + rotary]. Returns 0, or OUT_OF_MEMORY. */
int edgemoe_latent_queries(pool *p, const latent_attention *l, int64_t rows, const uint16_t *x, const void *cosine, const void *sine, uint16_t *y);

/* Sums of values [rows, heads, value] of sums of latents x [rows, heads, latent + rotary], which change where the KV is rotated.
 * Returns 0, or OUT_OF_MEMORY. */
int edgemoe_latent_values(pool *p, const latent_attention *l, const attention_kv *kv, int64_t rows, uint16_t *x, uint16_t *y);
#endif
