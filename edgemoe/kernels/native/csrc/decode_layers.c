/* A new token's way through decoder layers. */
#include "attention/attention.h"
#include "dense.h"
#include "experts/expert_ffn.h"
#include "router.h"

#if defined(__x86_64__)
typedef struct {
    const void *weight;
    const uint16_t *row_scale, *bias; /* NULL: none */
    int64_t rows, cols;
} linear;

/* A decoder layer up to its experts. */
typedef struct {
    const attention_shape *attention;
    const uint16_t *before, *behind; /* weights of the norms before attention and behind it */
    float before_epsilon, behind_epsilon;
    linear qkv, out;
} layer;

AVX2 static int apply(pool *p, const linear *l, const uint16_t *x, uint16_t *y) {
    if (edgemoe_dense_product(p, l->weight, l->row_scale, l->rows, l->cols, x, 1, y)) return -1;
    if (l->bias)
        for (int64_t i = 0; i < l->rows; i++) y[i] = to_bf16(from_bf16(y[i]) + from_bf16(l->bias[i]));
    return 0;
}

/* A layer and what a token leaves in it. */
typedef struct {
    const layer *up_to_experts;
    uint16_t *scratch; /* room for qkv's numbers and those that the heads give */
    uint16_t *normed;  /* [H]: what its experts get */
    const router *router; /* NULL: what lies behind the norm is not known here */
    uint16_t *logits;     /* as edgemoe_choose's, like the next three */
    float *probabilities;
    int64_t *chosen;
    float *shares;
    const expert *held; /* [experts], of one row; of level 0 what is not held. NULL: nothing is */
} moe_layer;

/* What the experts of all layers have in common. */
typedef struct {
    const matrix *up, *down;
    int64_t inner;
    expert *together; /* room for a token's */
    uint16_t *rows;   /* [a token's, H]: what they give */
    int64_t *computed; /* [9]: counts experts by the level that they were computed at */
} expert_room;

/* hidden [H] becomes hidden + attention, and the layer's normed its norm, rounded where transformers rounds. */
AVX2 static int up_to_experts(pool *p, const moe_layer *m, const attention_kv *kv, uint16_t *hidden,
                              const uint16_t *cosine, const uint16_t *sine) {
    const layer *l = m->up_to_experts;
    const int64_t size = l->out.rows;
    uint16_t *qkv = m->scratch, *attended = qkv + l->qkv.rows;
    edgemoe_rms_norm(hidden, l->before, l->before_epsilon, 1, size, m->normed);
    if (apply(p, &l->qkv, m->normed, qkv)) return -1;
    if (edgemoe_attention(p, l->attention, kv, qkv, cosine, sine, attended)) return -1;
    if (apply(p, &l->out, attended, m->normed)) return -1;
    for (int64_t i = 0; i < size; i++) hidden[i] = to_bf16(from_bf16(hidden[i]) + from_bf16(m->normed[i]));
    edgemoe_rms_norm(hidden, l->behind, l->behind_epsilon, 1, size, m->normed);
    return 0;
}

/* Adds what the chosen experts give to hidden, if all of them are held: 1 if so, 0 if not, -1 where there is no memory. */
AVX2 static int add_experts(pool *p, const moe_layer *m, const expert_room *room, uint16_t *hidden) {
    const int64_t k = m->router->k, size = m->router->cols;
    for (int64_t slot = 0; slot < k; slot++) {
        expert *e = room->together + slot;
        *e = m->held[m->chosen[slot]];
        if (!e->level) return 0;
        e->y = slot;
    }
    if (edgemoe_experts(p, room->up, room->down, room->inner, room->together, k, m->normed, 1, room->rows, k)) return -1;
    edgemoe_weighted_sum(room->rows, m->shares, 1, k, size, 1, hidden);
    for (int64_t slot = 0; slot < k; slot++) room->computed[room->together[slot].level]++;
    return 1;
}

/* Takes a new token through layers whose keys and values lie one after another from kv on.
 *
 * hidden [H] is changed; cosine and sine are as edgemoe_attention's. Returns how many it is through: `count`, or as many
 * as come before one whose experts are not all held. There it has gone up to them, and its router has chosen.
 * -1: there is no memory. */
AVX2 int64_t edgemoe_pass(pool *p, const moe_layer *layers, int64_t count, const attention_kv *kv, const expert_room *room,
                          uint16_t *hidden, const uint16_t *cosine, const uint16_t *sine) {
    attention_kv of_layer = *kv;
    for (int64_t i = 0; i < count; i++) {
        const moe_layer *m = layers + i;
        const attention_shape *shape = m->up_to_experts->attention;
        if (up_to_experts(p, m, &of_layer, hidden, cosine, sine)) return -1;
        if (!m->router) return i;
        if (edgemoe_choose(p, m->router, m->normed, 1, m->logits, m->probabilities, m->chosen, m->shares)) return -1;
        const int added = m->held ? add_experts(p, m, room, hidden) : 0;
        if (added < 1) return added ? -1 : i;
        of_layer.keys += shape->kv_heads * kv->context * shape->dim;
        of_layer.values += shape->kv_heads * kv->context * shape->dim;
    }
    return count;
}
#endif
