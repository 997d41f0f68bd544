/* One new token through decoder layers, for as long as every expert it needs is resident. */
#include "attention/attention.h"
#include "dense.h"
#include "experts/expert_ffn.h"
#include "levels.h"
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
    const uint16_t *input_norm, *post_norm; /* weights of the norms before and after attention */
    float input_epsilon, post_epsilon;
    linear qkv, out;
} dense_layer;

/* A decoder layer, its resident experts, and what a token leaves in it. k: experts of a token. */
typedef struct {
    const dense_layer *dense;
    int64_t window;       /* latest tokens that attention sees; 0: all */
    int64_t following;    /* layers to the next one with a router; 0: there is none */
    int64_t experts, slots; /* entries of `resident`, and of each array [k] below */
    int64_t scratch_size;
    uint16_t *scratch;    /* [scratch_size], at least qkv's rows + out's columns */
    uint16_t *normed;     /* [H]: the input of router and experts */
    const router *router; /* NULL: the caller computes the block behind the second norm */
    uint16_t *logits;     /* as edgemoe_router_topk */
    float *probabilities, *gates;
    int64_t *chosen;
    const level_rule *levels;
    const expert *resident; /* [experts], prepared for one row each; level 0: not resident */
    int64_t *wanted, *computed, *predicted; /* [k] each: levels by the rule, levels used, experts predicted for this layer */
} decoder_layer;

/* What the experts of all layers share. */
typedef struct {
    const matrix *up, *down;
    int64_t inner;
    int64_t slots;    /* experts of a token that there is space for */
    expert *together; /* [slots] */
    uint16_t *rows;   /* [slots, H] */
    float *gates;     /* [slots] */
    int64_t exact;       /* compute at the wanted level even where more planes are resident */
    int64_t renormalise; /* scale gate weights to their sum before experts were skipped */
} expert_workspace;

AVX2 static int apply(pool *p, const linear *l, const uint16_t *x, uint16_t *y) {
    const int failed = edgemoe_dense_product(p, l->weight, l->row_scale, l->rows, l->cols, x, 1, l->cols, y, l->rows);
    if (failed) return failed;
    if (l->bias)
        for (int64_t i = 0; i < l->rows; i++) y[i] = to_bf16(from_bf16(y[i]) + from_bf16(l->bias[i]));
    return 0;
}

/* hidden [H] becomes hidden + attention, and the layer's `normed` its norm, rounded where transformers rounds. */
AVX2 static int attend(pool *p, const decoder_layer *m, const attention_kv *kv, uint16_t *hidden, const uint16_t *cosine,
                       const uint16_t *sine) {
    const dense_layer *l = m->dense;
    const int64_t size = l->out.rows;
    uint16_t *qkv = m->scratch, *attended = qkv + l->qkv.rows;
    edgemoe_rms_norm(hidden, l->input_norm, l->input_epsilon, 1, size, m->normed);
    int failed = apply(p, &l->qkv, m->normed, qkv);
    if (!failed) failed = edgemoe_attention(p, l->attention, kv, qkv, cosine, sine, attended);
    if (!failed) failed = apply(p, &l->out, attended, m->normed);
    if (failed) return failed;
    for (int64_t i = 0; i < size; i++) hidden[i] = to_bf16(from_bf16(hidden[i]) + from_bf16(m->normed[i]));
    edgemoe_rms_norm(hidden, l->post_norm, l->post_epsilon, 1, size, m->normed);
    return 0;
}

static int topk(pool *p, const decoder_layer *m, const uint16_t *x, int64_t *chosen) {
    return edgemoe_router_topk(p, m->router, x, 1, m->router->cols, m->logits, m->probabilities, chosen, m->gates);
}

/* Predicts the next layer's experts from this layer's state. 1: all of them are resident at their levels by its rule, or at
 * `most` if that is lower; 0: not; below 0: the call failed. */
static int predicted_resident(pool *p, const decoder_layer *m, const decoder_layer *next, int64_t most) {
    const int failed = topk(p, next, m->normed, next->predicted);
    if (failed) return failed;
    edgemoe_levels(next->levels, next->gates, next->predicted, next->router->k, next->wanted);
    for (int64_t slot = 0; slot < next->router->k; slot++) {
        const int64_t level = next->wanted[slot] < most ? next->wanted[slot] : most;
        if (next->resident[next->predicted[slot]].level < level) return 0;
    }
    return 1;
}

/* Adds the chosen experts' weighted sum to hidden. 1: done; 0: an expert is not resident at its level; below 0: the call
 * failed. */
AVX2 static int add_experts(pool *p, const decoder_layer *m, const expert_workspace *w, uint16_t *hidden) {
    const int64_t k = m->router->k;
    int64_t kept = 0;
    for (int64_t slot = 0; slot < k; slot++) {
        m->computed[slot] = 0;
        if (!m->wanted[slot]) continue;
        expert *e = w->together + kept;
        *e = m->resident[m->chosen[slot]];
        if (e->level < m->wanted[slot]) return 0;
        if (w->exact) e->level = m->wanted[slot];
        m->computed[slot] = e->level;
        e->y = kept;
        w->gates[kept++] = m->gates[slot];
    }
    if (kept < k && w->renormalise) edgemoe_renormalise(m->gates, k, w->gates, kept);
    const int64_t size = m->router->cols;
    const int failed =
        kept ? edgemoe_experts(p, w->up, w->down, w->inner, w->together, kept, m->normed, 1, size, w->rows, kept, size) : 0;
    if (failed) return failed;
    edgemoe_weighted_sum(w->rows, NULL, w->gates, 1, kept, size, 1, hidden);
    return 1;
}

/* Whether a layer's parts have the sizes of the buffers that a call has for them. */
static int layer_fits(const decoder_layer *m, const expert_workspace *w, int64_t size, int64_t dim) {
    const dense_layer *l = m->dense;
    const attention_shape *s = l->attention;
    const int64_t queries = s->heads * s->dim, rows = queries + 2 * s->kv_heads * s->dim;
    if (s->dim != dim || l->qkv.cols != size || l->qkv.rows != rows || l->out.cols != queries || l->out.rows != size) return 0;
    if (rows + queries > m->scratch_size) return 0;
    if (!m->router) return 1;
    if (m->levels->rule == PRICED && m->levels->experts != m->experts) return 0;
    return m->router->cols == size && m->router->count == m->experts && m->router->k <= m->slots && m->slots <= w->slots;
}

/* Takes a token through layers[0, end), whose keys and values lie one after another from kv on.
 *
 * hidden [size] is changed; cosine and sine [dim] are as edgemoe_attention's; kv->first is not read. look_ahead: 0, or
 * the highest level at which the next layer's predicted experts must be resident for the call to go on. Returns the layers
 * done: `end`, or the index of the layer whose block is still to be added to hidden; its attention is done and its router
 * has chosen, if it has one. OUT_OF_MEMORY or WRONG_SHAPE: hidden is worthless. */
AVX2 int64_t edgemoe_decode_layers(pool *p, const decoder_layer *layers, int64_t end, const attention_kv *kv,
                                   const expert_workspace *w, int64_t look_ahead, uint16_t *hidden, int64_t size,
                                   const uint16_t *cosine, const uint16_t *sine, int64_t dim) {
    attention_kv own = *kv;
    for (int64_t i = 0; i < end; i++)
        if (!layer_fits(layers + i, w, size, dim) || !layer_fits(layers + i + layers[i].following, w, size, dim)) return WRONG_SHAPE;
    for (int64_t i = 0; i < end; i++) {
        const decoder_layer *m = layers + i;
        const attention_shape *shape = m->dense->attention;
        own.first = m->window && own.past + 1 > m->window ? own.past + 1 - m->window : 0;
        int failed = attend(p, m, &own, hidden, cosine, sine);
        if (failed) return failed;
        if (!m->router) return i;
        failed = topk(p, m, m->normed, m->chosen);
        if (failed) return failed;
        edgemoe_levels(m->levels, m->gates, m->chosen, m->router->k, m->wanted);
        int go_on = 1;
        if (look_ahead && m->following) go_on = predicted_resident(p, m, m + m->following, look_ahead);
        if (go_on == 1) go_on = add_experts(p, m, w, hidden);
        if (go_on < 1) return go_on ? go_on : i;
        own.keys += shape->kv_heads * kv->context * shape->dim;
        own.values += shape->kv_heads * kv->context * shape->dim;
    }
    return end;
}

/* A model's parts around its decoder layers. */
typedef struct {
    const void *table;         /* of embeddings, [vocab, cols]: int8 with row_scale, bf16 where that is NULL */
    const uint16_t *row_scale;
    int64_t rows;              /* of table */
    const uint16_t *norm;      /* [cols], before the head */
    float epsilon;
    linear head;
} outer_layers;

/* hidden [size] = the embedding of a token. Returns 0, or WRONG_SHAPE. */
AVX2 int edgemoe_embed(const outer_layers *o, int64_t token, uint16_t *hidden, int64_t size) {
    const int64_t cols = o->head.cols;
    if (size != cols || token < 0 || token >= o->rows) return WRONG_SHAPE;
    if (!o->row_scale) {
        memcpy(hidden, (const uint16_t *)o->table + token * cols, (size_t)cols * sizeof *hidden);
        return 0;
    }
    const int8_t *row = (const int8_t *)o->table + token * cols;
    const float scale = from_bf16(o->row_scale[token]);
    for (int64_t i = 0; i < cols; i++) hidden[i] = to_bf16((float)row[i] * scale);
    return 0;
}

/* logits [vocab] = the head's product with the norm of hidden [size]; normed has `size` numbers. Returns 0, OUT_OF_MEMORY,
 * or WRONG_SHAPE. */
int edgemoe_head(pool *p, const outer_layers *o, const uint16_t *hidden, uint16_t *normed, int64_t size, uint16_t *logits,
                 int64_t vocab) {
    if (o->head.cols != size || o->head.rows != vocab) return WRONG_SHAPE;
    edgemoe_rms_norm(hidden, o->norm, o->epsilon, 1, o->head.cols, normed);
    return apply(p, &o->head, normed, logits);
}

/* Bytes of every structure that structures.py builds, in the order of its SIZES. */
const int64_t edgemoe_sizes[] = {
    sizeof(matrix), sizeof(expert), sizeof(router), sizeof(attention_shape), sizeof(attention_kv),
    sizeof(linear), sizeof(dense_layer), sizeof(level_rule), sizeof(decoder_layer), sizeof(expert_workspace),
    sizeof(outer_layers),
};
#endif
