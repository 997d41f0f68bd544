/* One new token of each of some sequences through decoder layers, for as long as every expert they need is resident. */
#include "dense/dense.h"
#include "dense/dense_planes.h"
#include "experts/expert_ffn.h"
#include "levels.h"
#include "operations.h"
#include "remapping.h"

#if COMPILED
/* A decoder layer, its resident experts, and what tokens leave in it, a row each. k: experts of a token. */
typedef struct {
    const operation *operations; /* in the order in which they are computed */
    int64_t count;        /* of them; at most one is EXPERTS, and one ATTEND, with the operations of its latents, DELTA_NET, SHORT_CONV or STATE_SPACE */
    int64_t window;       /* latest tokens that attention sees; 0: all */
    int64_t following;    /* layers to the next one with a router; 0: there is none */
    int64_t experts, slots; /* entries of `resident`, and of a row of each array [rows, k] below */
    const router *router; /* NULL: its list has no experts */
    void *logits;         /* as edgemoe_router_topk */
    float *scores, *gates;
    int64_t *chosen;
    const level_rule *levels;
    const expert *resident; /* [experts]; level 0: not resident */
    const compensator *compensators; /* [experts]; NULL: experts have no factors */
    int64_t *wanted, *computed, *predicted; /* levels by the rule, levels used, experts predicted for this layer */
    int64_t *remapped;    /* [2]: counts of edgemoe_remap; 0 where it was not called */
    const expert_activation *activation; /* of its experts, as edgemoe_experts */
    double *chosen_by, *chosen_mass; /* [experts]: tokens that chose each and their gate weights are added; NULL: not */
} decoder_layer;

/* What the experts of all layers share. A pair is a token and one of its slots. */
typedef struct {
    const buffer *buffers; /* [buffer_count]; the lists' */
    int64_t buffer_count;
    const matrix *up, *down;
    int64_t inner;
    int64_t most_rows, slots, experts; /* there is space for: tokens, slots of each, experts of a layer */
    expert *together;    /* [pairs] */
    uint16_t *gathered;  /* [pairs, H]: states of a router with a norm of its own; then the pairs' inputs, one expert's after another's, of a single token not used */
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

/* A sequence's state in a layer, and rows after it, in two copies: a step reads one and writes the other one. */
typedef struct {
    uint16_t *conv[2];
    float *state[2];
    uint16_t *kept[2]; /* guesses of the last step, the right ones first */
    int64_t space;     /* numbers that there is space for in each of `kept` */
} delta_copies;

/* A sequence's keys and values, and its states. */
typedef struct {
    const attention_kv *kv;     /* [layers]; read where a list has ATTEND, without past and first */
    const delta_copies *states; /* [layers]; read where a list has DELTA_NET, SHORT_CONV or STATE_SPACE */
    int64_t past;               /* tokens before this one */
    int64_t valid;              /* the copy of states that a step reads */
    int64_t earlier;            /* guesses of the last step that were right */
    int64_t guess;              /* 0: the sequence's first row of this call; otherwise the number of a guess after that row */
} sequence_kv;

/* The input of a layer's router and experts, [rows, H]. */
static const uint16_t *normed(const expert_workspace *w) { return w->buffers[NORMED].at; }

/* Chooses the experts of every row, from x [rows, H], and sets the layer's gates and counts of remapped pairs. */
static int topk(pool *p, const decoder_layer *m, const expert_workspace *w, const uint16_t *x, int64_t rows, int64_t *chosen) {
    const router *r = m->router;
    int failed = 0;
    if (r->state_norm) {
        failed = edgemoe_router_states(p, r, x, rows, w->gathered);
        x = w->gathered;
    }
    if (!failed) failed = edgemoe_router_topk(p, r, x, rows, r->cols, m->logits, m->scores, chosen, m->gates);
    m->remapped[0] = m->remapped[1] = 0;
    if (!failed && w->remapping && rows > 1)
        edgemoe_remap(r, w->remapping, m->logits, rows, m->scores, chosen, m->gates, m->remapped);
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
static int predicted_resident(pool *p, const decoder_layer *next, const expert_workspace *w, int64_t rows, int64_t most) {
    const int failed = topk(p, next, w, normed(w), rows, next->predicted);
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
            if (rows > 1) memcpy(w->gathered + row * size, normed(w) + pair / k * size, (size_t)size * 2);
            w->row_of[pair] = row++;
        }
        if (!plain) with_factors = row - begin;
    }
    *e = m->resident[number];
    e->number = number;
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

/* Computes the chosen experts: their weighted sums are added to the state, or written to another buffer. 1: done; 0: an expert,
 * or its factors, are not resident; below 0: the call failed. */
AVX2 static int add_experts(pool *p, const decoder_layer *m, const operation *o, const expert_workspace *w, int64_t rows) {
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
    const uint16_t *x = rows > 1 ? w->gathered : normed(w);
    const int failed = kept ? edgemoe_experts(p, w->up, w->down, w->inner, w->together, count, x, rows > 1 ? kept : 1, size,
                                              NULL, NULL, m->activation, w->rows, kept, size) : 0;
    if (failed) return failed;
    order_pairs(m, w, rows);
    edgemoe_weighted_sum(w->rows, w->row_of, w->gates, rows, k, size, o->output == HIDDEN, w->buffers[o->output].at);
    return 1;
}

/* Chooses experts and their levels, predicts the next layer's where `look_ahead` is not 0, and computes them. As add_experts. */
static int experts_operation(pool *p, const decoder_layer *m, const operation *o, const expert_workspace *w, int64_t rows,
                             int64_t look_ahead) {
    const int failed = topk(p, m, w, w->buffers[o->routed].at, rows, m->chosen);
    if (failed) return failed;
    count_chosen(m, rows);
    levels_of(m, rows, m->chosen);
    int go_on = 1;
    if (look_ahead && m->following) go_on = predicted_resident(p, m + m->following, w, rows, look_ahead);
    return go_on == 1 ? add_experts(p, m, o, w, rows) : go_on;
}

/* Whether a layer's router and experts have the sizes of the buffers that a call has for them. */
static int router_fits(const decoder_layer *m, const expert_workspace *w, int64_t rows, int64_t size) {
    if (!m->router || m->router->cols != size || m->router->count != m->experts) return 0;
    if (m->levels->rule == PRICED && m->levels->experts != m->experts) return 0;
    if (rows > 1 && m->router->k != m->slots) return 0;
    return m->experts <= w->experts && m->router->k <= m->slots && m->slots <= w->slots;
}

static int layer_fits(const decoder_layer *m, const expert_workspace *w, const rotation *rotations, int64_t rows) {
    for (int64_t i = 0; i < m->count; i++) {
        const operation *o = m->operations + i;
        if (!operation_fits(o, w->buffers, w->buffer_count, rotations, rows)) return 0;
        if (o->kind == EXPERTS && (o->input != NORMED || o->routed < 0 || o->routed > NORMED || !router_fits(m, w, rows, o->input_cols))) return 0;
    }
    return 1;
}

enum { MOST_ROWS = 64 };

/* What the rows of layer `index`, m, see of their sequences' keys and values, and of their states. Returns the number of runs. */
static int64_t rows_memory(const decoder_layer *m, int64_t index, const sequence_kv *sequences, int64_t rows, attention_kv *kv, delta_run *runs) {
    int64_t count = 0;
    for (int64_t row = 0; row < rows; row++) {
        const sequence_kv *s = sequences + row;
        const int64_t past = s->past, seen = past + 1, from = s->valid != 0, to = !from;
        kv[row] = s->kv[index];
        kv[row].past = past;
        kv[row].first = m->window && seen > m->window ? seen - m->window : 0;
        const delta_copies *c = s->states + index;
        if (s->guess) runs[count - 1].tokens++, runs[count - 1].guesses++;
        else
            runs[count++] = (delta_run){past ? c->conv[from] : NULL, past ? c->state[from] : NULL, c->conv[to], c->state[to],
                                        c->kept[from], c->kept[to], s->earlier, row, 1, 0};
    }
    return count;
}

/* Whether every sequence has the state in layer `index`, m, that its list needs, and space for its guesses' rows. */
static int has_states(const decoder_layer *m, int64_t index, const sequence_kv *sequences, int64_t rows) {
    for (int64_t i = 0; i < m->count; i++) {
        const operation *o = m->operations + i;
        const int64_t recurs = o->kind == DELTA_NET || o->kind == STATE_SPACE, inputs = recurs || o->kind == SHORT_CONV;
        for (int64_t row = 0; row < rows && inputs; row++) {
            const sequence_kv *s = sequences + row;
            const delta_copies *c = s->states + index;
            const int64_t kept = s->guess > s->earlier ? s->guess : s->earlier;
            if (!c->conv[0] || (recurs && !c->state[0]) || kept * o->input_cols > (c->kept[0] ? c->space : 0)) return 0;
        }
    }
    return 1;
}

/* Whether each row begins a sequence, or is the next guess after the row before it. */
static int rows_follow(const sequence_kv *sequences, int64_t rows) {
    for (int64_t row = 0; row < rows; row++)
        if (sequences[row].guess && (!row || sequences[row].guess != sequences[row - 1].guess + 1)) return 0;
    return 1;
}

/* Takes `rows` rows, one token of each sequence and guesses at the tokens after it, from an operation of a layer to layers[end]. place [2]: the layer and its
 * operation to begin with; it becomes those that the caller is to compute, EXPERTS after the router's choice or a CALL, or
 * (end, 0).
 *
 * The rows' states are in the buffer HIDDEN. look_ahead: 0, or the highest level at which the next layer's predicted experts
 * must be resident for the call to go on. Returns 0, or OUT_OF_MEMORY or WRONG_SHAPE, when the states are worthless. */
AVX2 int edgemoe_decode_layers(pool *p, const decoder_layer *layers, int64_t *place, int64_t end, const sequence_kv *sequences,
                               int64_t rows, const expert_workspace *w, int64_t look_ahead, const rotation *rotations) {
    attention_kv kv[MOST_ROWS];
    delta_run runs[MOST_ROWS];
    if (rows < 1 || rows > MOST_ROWS || rows > w->most_rows || !rows_follow(sequences, rows)) return WRONG_SHAPE;
    for (int64_t i = place[0]; i < end; i++)
        if (!layer_fits(layers + i, w, rotations, rows) || !layer_fits(layers + i + layers[i].following, w, rotations, rows) ||
            !has_states(layers + i, i, sequences, rows)) return WRONG_SHAPE;
    for (; place[0] < end; place[0]++, place[1] = 0) {
        const decoder_layer *m = layers + place[0];
        const row_memory memory = {kv, runs, rows_memory(m, place[0], sequences, rows, kv, runs)};
        for (; place[1] < m->count; place[1]++) {
            const operation *o = m->operations + place[1];
            if (o->kind == CALL) return 0;
            const int done = o->kind == EXPERTS ? experts_operation(p, m, o, w, rows, look_ahead) : 1;
            if (done < 1) return done;
            const int failed = o->kind == EXPERTS ? 0 : run_operation(p, o, w->buffers, rotations, memory, rows);
            if (failed) return failed;
        }
    }
    return 0;
}

/* A model's parts around its decoder layers. */
typedef struct {
    const void *table;         /* of embeddings, [vocab, cols], as dense_weight has them */
    const uint16_t *row_scale;
    int64_t rows, bits;        /* of table */
    const void *norm;          /* the weight of the norm before the head */
    float epsilon;
    int32_t wide;              /* the form of norm, NARROW_NORM .. */
    linear head;
} outer_layers;

/* hidden [size] = the embedding of a token. Returns 0, or WRONG_SHAPE. */
AVX2 int edgemoe_embed(const outer_layers *o, int64_t token, uint16_t *hidden, int64_t size) {
    const int64_t cols = o->head.weight.cols;
    if (size != cols || token < 0 || token >= o->rows) return WRONG_SHAPE;
    if (o->bits < 8) return dense_planes_row(o->table, o->bits, o->rows, cols, token, hidden);
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
    if (o->head.weight.cols != size || o->head.weight.rows != vocab) return WRONG_SHAPE;
    edgemoe_rms_norm(hidden, o->norm, o->wide, o->epsilon, rows, size, normed);
    return edgemoe_linear(p, &o->head, normed, rows, logits);
}

/* Bytes of every structure that structures.py builds, in the order of SIZES in structure_sizes.py. */
const int64_t edgemoe_sizes[] = {
    sizeof(matrix), sizeof(expert), sizeof(router), sizeof(attention_shape), sizeof(attention_kv),
    sizeof(linear), sizeof(buffer), sizeof(operation), sizeof(rotation), sizeof(level_rule), sizeof(decoder_layer),
    sizeof(sequence_kv), sizeof(expert_workspace), sizeof(outer_layers), sizeof(remapping), sizeof(compensator),
    sizeof(delta_net), sizeof(delta_run), sizeof(delta_copies), sizeof(expert_activation),
    sizeof(dense_heads), sizeof(latent_attention), sizeof(short_conv), sizeof(dense_weight), sizeof(state_space),
    sizeof(latent_rows),
};
#endif
