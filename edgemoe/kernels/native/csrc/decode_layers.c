/* One new token of each of some sequences through decoder layers, for as long as every expert they need is resident. */
#include "attention/decode.h"
#include "dense/dense.h"
#include "experts/expert_ffn.h"
#include "levels.h"
#include "router.h"

#if COMPILED
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

/* A decoder layer, its resident experts, and what tokens leave in it, a row each. k: experts of a token. */
typedef struct {
    const dense_layer *dense;
    int64_t window;       /* latest tokens that attention sees; 0: all */
    int64_t following;    /* layers to the next one with a router; 0: there is none */
    int64_t experts, slots; /* entries of `resident`, and of a row of each array [rows, k] below */
    int64_t scratch_size;
    uint16_t *scratch;    /* [scratch_size], at least rows times qkv's rows + out's columns */
    uint16_t *normed;     /* [rows, H]: the input of router and experts */
    const router *router; /* NULL: the caller computes the block behind the second norm */
    uint16_t *logits;     /* as edgemoe_router_topk */
    float *probabilities, *gates;
    int64_t *chosen;
    const level_rule *levels;
    const expert *resident; /* [experts]; level 0: not resident */
    const compensator *compensators; /* [experts]; NULL: experts have no factors */
    int64_t *wanted, *computed, *predicted; /* levels by the rule, levels used, experts predicted for this layer */
    int64_t *remapped;    /* [2]: counts of edgemoe_remap; 0 where it was not called */
    double *chosen_by, *chosen_mass; /* [experts]: tokens that chose each and their gate weights are added; NULL: not */
} decoder_layer;

/* What the experts of all layers share. A pair is a token and one of its slots. */
typedef struct {
    const matrix *up, *down;
    int64_t inner;
    int64_t most_rows, slots, experts; /* there is space for: tokens, slots of each, experts of a layer */
    expert *together;    /* [pairs] */
    uint16_t *gathered;  /* [pairs, H]: the pairs' inputs, one expert's after another's; of a single token not used */
    uint16_t *rows;      /* [pairs, H]: their results */
    float *gates;        /* [pairs] */
    int64_t *row_of;     /* [pairs]: in rows; -1: skipped */
    int64_t *after;      /* [pairs]: the next pair of the same expert; -1: the last */
    int64_t *first;      /* [experts]: its first pair; -1: none */
    int64_t exact;       /* compute at the wanted level even where more planes are resident */
    int64_t renormalise; /* scale gate weights to their sum before experts were skipped */
    const remapping *remapping; /* of steps of several tokens; NULL: none */
    int64_t compensated_first, compensated_end; /* slots whose experts are computed with their factors */
    int64_t compensated_level;                  /* at which they are computed; factors are of its error */
} expert_workspace;

AVX2 static int apply(pool *p, const linear *l, const uint16_t *x, int64_t rows, uint16_t *y) {
    const int failed = edgemoe_dense_product(p, l->weight, l->row_scale, l->rows, l->cols, x, rows, l->cols, y, l->rows);
    if (failed) return failed;
    if (l->bias)
        for (int64_t row = 0; row < rows; row++, y += l->rows)
            for (int64_t i = 0; i < l->rows; i++) y[i] = to_bf16(from_bf16(y[i]) + from_bf16(l->bias[i]));
    return 0;
}

/* hidden [rows, H] becomes hidden + attention, and the layer's `normed` its norm, rounded where transformers rounds. */
AVX2 static int attend(pool *p, const decoder_layer *m, const attention_kv *kv, int64_t rows, uint16_t *hidden,
                       const uint16_t *cosine, const uint16_t *sine) {
    const dense_layer *l = m->dense;
    const int64_t size = l->out.rows;
    uint16_t *qkv = m->scratch, *attended = qkv + rows * l->qkv.rows;
    edgemoe_rms_norm(hidden, l->input_norm, l->input_epsilon, rows, size, m->normed);
    int failed = apply(p, &l->qkv, m->normed, rows, qkv);
    if (!failed) failed = edgemoe_attention(p, l->attention, kv, rows, qkv, cosine, sine, attended);
    if (!failed) failed = apply(p, &l->out, attended, rows, m->normed);
    if (failed) return failed;
    for (int64_t i = 0; i < rows * size; i++) hidden[i] = to_bf16(from_bf16(hidden[i]) + from_bf16(m->normed[i]));
    edgemoe_rms_norm(hidden, l->post_norm, l->post_epsilon, rows, size, m->normed);
    return 0;
}

/* Chooses the experts of every row, from x [rows, H], and sets the layer's gates and counts of remapped pairs. */
static int topk(pool *p, const decoder_layer *m, const expert_workspace *w, const uint16_t *x, int64_t rows, int64_t *chosen) {
    const router *r = m->router;
    const int failed = edgemoe_router_topk(p, r, x, rows, r->cols, m->logits, m->probabilities, chosen, m->gates);
    m->remapped[0] = m->remapped[1] = 0;
    if (!failed && w->remapping && rows > 1)
        edgemoe_remap(r, w->remapping, m->logits, rows, m->probabilities, chosen, m->gates, m->remapped);
    return failed;
}

/* Adds the rows' choices to the counts of a layer that has any. */
static void count_chosen(const decoder_layer *m, int64_t rows) {
    if (!m->chosen_by) return;
    for (int64_t pair = 0; pair < rows * m->router->k; pair++) {
        m->chosen_by[m->chosen[pair]] += 1;
        m->chosen_mass[m->chosen[pair]] += m->gates[pair];
    }
}

/* The levels of every row's experts, by the layer's rule. */
static void levels_of(const decoder_layer *m, int64_t rows, const int64_t *chosen) {
    const int64_t k = m->router->k;
    for (int64_t row = 0; row < rows; row++) edgemoe_levels(m->levels, m->gates + row * k, chosen + row * k, k, m->wanted + row * k);
}

/* Predicts the next layer's experts from this layer's state. 1: all of them are resident at their levels by its rule, or at
 * `most` if that is lower; 0: not; below 0: the call failed. */
static int predicted_resident(pool *p, const decoder_layer *m, const decoder_layer *next, const expert_workspace *w,
                              int64_t rows, int64_t most) {
    const int failed = topk(p, next, w, m->normed, rows, next->predicted);
    if (failed) return failed;
    levels_of(next, rows, next->predicted);
    for (int64_t pair = 0; pair < rows * next->router->k; pair++) {
        const int64_t level = next->wanted[pair] < most ? next->wanted[pair] : most;
        if (next->resident[next->predicted[pair]].level < level) return 0;
    }
    return 1;
}

/* Whether a pair is computed with its expert's factors. */
static int compensated(const decoder_layer *m, const expert_workspace *w, int64_t pair) {
    const int64_t slot = pair % m->router->k;
    return m->compensators && slot >= w->compensated_first && slot < w->compensated_end &&
           m->computed[pair] == w->compensated_level;
}

/* Links the pairs of each expert, and sets the level that each is computed at. 0: an expert is not
 * resident at its level, or its factors are absent. */
static int link_pairs(const decoder_layer *m, const expert_workspace *w, int64_t pairs) {
    memset(w->first, 0xff, (size_t)m->experts * sizeof *w->first);
    for (int64_t pair = pairs - 1; pair >= 0; pair--) {
        const int64_t wanted = m->wanted[pair], number = m->chosen[pair], level = m->resident[number].level;
        m->computed[pair] = 0;
        w->row_of[pair] = -1;
        w->gates[pair] = wanted ? m->gates[pair] : 0;
        if (!wanted) continue;
        if (level < wanted) return 0;
        m->computed[pair] = w->exact ? wanted : level;
        if (compensated(m, w, pair) && m->compensators[number].absent) return 0;
        w->after[pair] = w->first[number];
        w->first[number] = pair;
    }
    return 1;
}

/* Makes an expert of the linked pairs that are computed at the level of the first one of them, those with factors first; its
 * rows begin at `row`. Returns their end. */
static int64_t gather(const decoder_layer *m, const expert_workspace *w, int64_t rows, int64_t first, int64_t row,
                      expert *e) {
    const int64_t k = m->router->k, size = m->router->cols, begin = row, number = m->chosen[first];
    const int64_t level = m->computed[first];
    int64_t with_factors = 0;
    for (int plain = 0; plain < 2; plain++) {
        for (int64_t pair = w->first[number]; pair >= 0; pair = w->after[pair]) {
            if (m->computed[pair] != level || compensated(m, w, pair) == plain) continue;
            if (rows > 1) memcpy(w->gathered + row * size, m->normed + pair / k * size, (size_t)size * 2);
            w->row_of[pair] = row++;
        }
        if (!plain) with_factors = row - begin;
    }
    *e = m->resident[number];
    e->level = level, e->x = rows > 1 ? begin : 0, e->y = begin, e->tokens = row - begin;
    e->compensator = with_factors ? m->compensators + number : NULL, e->compensated = with_factors;
    return row;
}

/* Puts the rows and gates of each token into the order of their experts, in which a prompt's rows are added up as well
 * (PromptSum); the links of pairs are lost. */
static void order_pairs(const decoder_layer *m, const expert_workspace *w, int64_t rows) {
    const int64_t k = m->router->k;
    for (int64_t first = 0; first < rows * k; first += k)
        for (int64_t pair = first; pair < first + k; pair++) {
            const int64_t number = m->chosen[pair], row = w->row_of[pair];
            const float gate = w->gates[pair];
            int64_t to = pair;
            for (; to > first && w->after[to - 1] > number; to--) {
                w->after[to] = w->after[to - 1];
                w->row_of[to] = w->row_of[to - 1];
                w->gates[to] = w->gates[to - 1];
            }
            w->after[to] = number, w->row_of[to] = row, w->gates[to] = gate;
        }
}

/* Adds the chosen experts' weighted sums to hidden [rows, H]. 1: done; 0: an expert, or its factors, are not resident; below 0:
 * the call failed. */
AVX2 static int add_experts(pool *p, const decoder_layer *m, const expert_workspace *w, int64_t rows, uint16_t *hidden) {
    const int64_t k = m->router->k, size = m->router->cols;
    int64_t count = 0, kept = 0;
    if (!link_pairs(m, w, rows * k)) return 0;
    for (int64_t pair = 0; pair < rows * k; pair++)
        if (m->computed[pair] && w->row_of[pair] < 0) {
            kept = gather(m, w, rows, pair, kept, w->together + count);
            count++;
        }
    if (w->renormalise)
        for (int64_t row = 0; row < rows; row++) edgemoe_renormalise(m->gates + row * k, k, w->gates + row * k, k);
    const uint16_t *x = rows > 1 ? w->gathered : m->normed;
    const int failed = kept ? edgemoe_experts(p, w->up, w->down, w->inner, w->together, count, x, rows > 1 ? kept : 1, size,
                                              NULL, NULL, w->rows, kept, size) : 0;
    if (failed) return failed;
    order_pairs(m, w, rows);
    edgemoe_weighted_sum(w->rows, w->row_of, w->gates, rows, k, size, 1, hidden);
    return 1;
}

/* Whether a layer's parts have the sizes of the buffers that a call has for them. */
static int layer_fits(const decoder_layer *m, const expert_workspace *w, int64_t rows, int64_t size, int64_t dim) {
    const dense_layer *l = m->dense;
    const attention_shape *s = l->attention;
    const int64_t queries = s->heads * s->dim, projected = queries + 2 * s->kv_heads * s->dim;
    if (s->dim != dim || l->qkv.cols != size || l->qkv.rows != projected || l->out.cols != queries || l->out.rows != size) return 0;
    if (rows * (projected + queries) > m->scratch_size) return 0;
    if (!m->router) return 1;
    if (m->levels->rule == PRICED && m->levels->experts != m->experts) return 0;
    if (rows > 1 && m->router->k != m->slots) return 0;
    return m->router->cols == size && m->router->count == m->experts && m->experts <= w->experts && m->router->k <= m->slots &&
           m->slots <= w->slots;
}

enum { MOST_ROWS = 64 };

/* Takes one token of each of `rows` sequences through layers[0, end), whose keys and values lie one after another from
 * kv[row] on.
 *
 * hidden [rows, size] is changed; cosine and sine [rows, dim] are as edgemoe_attention's; `first` of kv is not read.
 * look_ahead: 0, or the highest level at which the next layer's predicted experts must be resident for the call to go on.
 * Returns the layers done: `end`, or the index of the layer whose block is still to be added to hidden; its attention is
 * done and its router has chosen, if it has one. OUT_OF_MEMORY or WRONG_SHAPE: hidden is worthless. */
AVX2 int64_t edgemoe_decode_layers(pool *p, const decoder_layer *layers, int64_t end, const attention_kv *kv, int64_t rows,
                                   const expert_workspace *w, int64_t look_ahead, uint16_t *hidden, int64_t size,
                                   const uint16_t *cosine, const uint16_t *sine, int64_t dim) {
    attention_kv own[MOST_ROWS];
    if (rows < 1 || rows > MOST_ROWS || rows > w->most_rows) return WRONG_SHAPE;
    memcpy(own, kv, (size_t)rows * sizeof *own);
    for (int64_t i = 0; i < end; i++) {
        const decoder_layer *m = layers + i;
        if (!layer_fits(m, w, rows, size, dim) || !layer_fits(m + m->following, w, rows, size, dim)) return WRONG_SHAPE;
    }
    for (int64_t i = 0; i < end; i++) {
        const decoder_layer *m = layers + i;
        const attention_shape *shape = m->dense->attention;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t seen = own[row].past + 1;
            own[row].first = m->window && seen > m->window ? seen - m->window : 0;
        }
        int failed = attend(p, m, own, rows, hidden, cosine, sine);
        if (failed) return failed;
        if (!m->router) return i;
        failed = topk(p, m, w, m->normed, rows, m->chosen);
        if (failed) return failed;
        count_chosen(m, rows);
        levels_of(m, rows, m->chosen);
        int go_on = 1;
        if (look_ahead && m->following) go_on = predicted_resident(p, m, m + m->following, w, rows, look_ahead);
        if (go_on == 1) go_on = add_experts(p, m, w, rows, hidden);
        if (go_on < 1) return go_on ? go_on : i;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t count = shape->kv_heads * own[row].context;
            own[row].keys += count * kv_row_bytes(own[row].key_format, shape->dim);
            own[row].values += count * kv_row_bytes(own[row].value_format, shape->dim);
        }
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

/* logits [rows, vocab] = the head's product with the norm of hidden [rows, size]; normed has as many numbers. Returns 0,
 * OUT_OF_MEMORY, or WRONG_SHAPE. */
int edgemoe_head(pool *p, const outer_layers *o, const uint16_t *hidden, int64_t rows, uint16_t *normed, int64_t size,
                 uint16_t *logits, int64_t vocab) {
    if (o->head.cols != size || o->head.rows != vocab) return WRONG_SHAPE;
    edgemoe_rms_norm(hidden, o->norm, o->epsilon, rows, o->head.cols, normed);
    return apply(p, &o->head, normed, rows, logits);
}

/* Bytes of every structure that structures.py builds, in the order of its SIZES. */
const int64_t edgemoe_sizes[] = {
    sizeof(matrix), sizeof(expert), sizeof(router), sizeof(attention_shape), sizeof(attention_kv),
    sizeof(linear), sizeof(dense_layer), sizeof(level_rule), sizeof(decoder_layer), sizeof(expert_workspace),
    sizeof(outer_layers), sizeof(remapping), sizeof(compensator),
};
#endif
