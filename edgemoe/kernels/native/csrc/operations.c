/* The operations of a decoder layer's list. Each rounds to bf16 where transformers' modules do. */
#include "operations.h"

#if COMPILED
AVX2 int edgemoe_linear(pool *p, const linear *l, const uint16_t *x, int64_t tokens, uint16_t *y) {
    const int64_t rows = l->weight.rows;
    const int failed = edgemoe_dense_product(p, &l->weight, x, tokens, l->weight.cols, y, rows);
    if (failed || !l->bias) return failed;
    for (int64_t row = 0; row < tokens; row++, y += rows)
        for (int64_t i = 0; i < rows; i++) y[i] = to_bf16(from_bf16(y[i]) + from_bf16(l->bias[i]));
    return 0;
}

/* y = f(gate) up, for rows x of gates and ups, `cols` of each. f's value for each of the 65,536 bf16 numbers is in a table: it
 * has torch's bits, whatever vectors the processor has. */
AVX2 static void activate(const uint16_t *f, const uint16_t *x, int64_t rows, int64_t cols, uint16_t *y) {
    for (; rows-- > 0; x += 2 * cols, y += cols)
        for (int64_t i = 0; i < cols; i++) y[i] = to_bf16(from_bf16(f[x[i]]) * from_bf16(x[cols + i]));
}

/* The same by a table of float32: the product alone is rounded. */
AVX2 static void activate_wide(const float *f, const uint16_t *x, int64_t rows, int64_t cols, uint16_t *y) {
    for (; rows-- > 0; x += 2 * cols, y += cols)
        for (int64_t i = 0; i < cols; i++) y[i] = to_bf16(f[x[i]] * from_bf16(x[cols + i]));
}

/* y *= f(x), for rows of x whose numbers are each for as many of y: for one, for a head of it, or for all. */
AVX2 static void scale(const uint16_t *f, const uint16_t *x, int64_t x_cols, int64_t rows, int64_t cols, uint16_t *y) {
    const int64_t run = cols / x_cols;
    for (; rows-- > 0; x += x_cols)
        for (int64_t k = 0; k < x_cols; k++, y += run)
            for (int64_t i = 0; i < run; i++) y[i] = to_bf16(from_bf16(y[i]) * from_bf16(f[x[k]]));
}

/* The same by a table of float32: the product alone is rounded. */
AVX2 static void scale_wide(const float *f, const uint16_t *x, int64_t x_cols, int64_t rows, int64_t cols, uint16_t *y) {
    const int64_t run = cols / x_cols;
    for (; rows-- > 0; x += x_cols)
        for (int64_t k = 0; k < x_cols; k++, y += run)
            for (int64_t i = 0; i < run; i++) y[i] = to_bf16(from_bf16(y[i]) * f[x[k]]);
}

/* y = f(x), `count` numbers. */
AVX2 static void apply(const uint16_t *f, const uint16_t *x, int64_t count, uint16_t *y) {
    for (int64_t i = 0; i < count; i++) y[i] = f[x[i]];
}

/* y += x, or x times a factor, rounded, where that is not 0. */
AVX2 static void add(const uint16_t *x, float factor, int64_t count, uint16_t *y) {
    if (factor == 0) for (int64_t i = 0; i < count; i++) y[i] = to_bf16(from_bf16(y[i]) + from_bf16(x[i]));
    else for (int64_t i = 0; i < count; i++) y[i] = to_bf16(from_bf16(y[i]) + from_bf16(to_bf16(from_bf16(x[i]) * factor)));
}

/* Writes rows of x into rows of y, from number `at` of each on. */
static void place(const uint16_t *x, int64_t x_cols, int64_t at, int64_t rows, int64_t cols, uint16_t *y) {
    for (; rows-- > 0; x += x_cols, y += cols) memcpy(y + at, x, (size_t)x_cols * sizeof *y);
}

/* y = x times a factor, `count` numbers. */
AVX2 static void multiply(const uint16_t *x, float factor, int64_t count, uint16_t *y) {
    for (int64_t i = 0; i < count; i++) y[i] = to_bf16(from_bf16(x[i]) * factor);
}

/* y = x times a factor of each row's own. */
AVX2 static void multiply_rows(const uint16_t *x, const uint16_t *factors, int64_t rows, int64_t cols, uint16_t *y) {
    for (int64_t row = 0; row < rows; row++) multiply(x + row * cols, from_bf16(factors[row]), cols, y + row * cols);
}

int operation_fits(const operation *o, const buffer *buffers, int64_t count, const rotation *rotations, int64_t rows) {
    const int64_t from = o->input_cols, to = o->output_cols;
    if (o->input < 0 || o->input >= count || o->output < 0 || o->output >= count || from < 1 || to < 1) return 0;
    if (rows * from > buffers[o->input].size || rows * to > buffers[o->output].size) return 0;
    if (o->kind == LINEAR) {
        const linear *l = o->parameters;
        return l->weight.cols == from && l->weight.rows == to && o->input != o->output;
    }
    if (o->kind == ATTEND) {
        const attention_shape *s = o->parameters;
        return attention_row_size(s) == from && s->heads * s->value_dim == to && (s->prepared || rotations[o->rotation].cols == s->rotated);
    }
    if (o->kind == DELTA_NET) {
        const delta_net *n = o->parameters;
        return delta_row_size(n) == from && n->heads * n->value_dim == to && o->input != o->output;
    }
    if (o->kind == SHORT_CONV) {
        const short_conv *s = o->parameters;
        return from == 3 * s->channels && to == s->channels && o->input != o->output;
    }
    if (o->kind == STATE_SPACE) {
        const state_space *s = o->parameters;
        return space_row_size(s) == from && space_values(s) == to && o->input != o->output;
    }
    if (o->kind >= STORE_LATENTS && o->kind <= LATENT_VALUES) {
        const latent_attention *l = o->parameters;
        const int64_t key = l->latent + l->rotary, cols = rotations[o->rotation].cols;
        if (o->kind == LATENT_VALUES) return from == l->heads * key && to == l->heads * l->value && o->input != o->output;
        if (cols != latents_rotation(l)) return 0;
        return o->kind == STORE_LATENTS ? from == key && to == key
                                        : from == l->heads * (l->key + l->rotary) && to == l->heads * key && o->input != o->output;
    }
    if (o->kind == MULTIPLY && o->wide && rotations[o->rotation].cols != 1) return 0;
    if (o->kind == ACTIVATE) return from == 2 * to;
    if (o->kind == PLACE) return o->number >= 0 && from + (int64_t)o->number <= to && o->input != o->output;
    return from == to || (o->kind == SCALE && to % from == 0) || o->kind == CALL;
}

int run_operation(pool *p, const operation *o, const buffer *buffers, const rotation *rotations, row_memory memory, int64_t rows) {
    uint16_t *from = buffers[o->input].at, *to = buffers[o->output].at;
    const rotation *r = rotations + o->rotation;
    switch (o->kind) {
    case NORM: edgemoe_rms_norm(from, o->parameters, o->wide, o->number, rows, o->output_cols, to); return 0;
    case LINEAR: return edgemoe_linear(p, o->parameters, from, rows, to);
    case ATTEND: return edgemoe_attention(p, o->parameters, memory.kv, rows, from, r->cosine, r->sine, to);
    case DELTA_NET: return edgemoe_delta_net(p, o->parameters, from, memory.count, memory.runs, to);
    case SHORT_CONV: return edgemoe_short_conv(p, o->parameters, from, memory.count, memory.runs, to);
    case STATE_SPACE: return edgemoe_state_space(p, o->parameters, from, memory.count, memory.runs, to);
    case APPLY: apply(o->parameters, from, rows * o->output_cols, to); return 0;
    case STORE_LATENTS: return edgemoe_store_latents(p, o->parameters, memory.kv, 1, rows, from, r->cosine, r->sine);
    case LATENT_QUERIES: return edgemoe_latent_queries(p, o->parameters, rows, from, r->cosine, r->sine, to);
    case LATENT_VALUES: return edgemoe_latent_values(p, o->parameters, memory.kv, 1, rows, from, to);
    case ACTIVATE:
        if (o->wide) activate_wide(o->parameters, from, rows, o->output_cols, to);
        else activate(o->parameters, from, rows, o->output_cols, to);
        return 0;
    case SCALE:
        if (o->wide) scale_wide(o->parameters, from, o->input_cols, rows, o->output_cols, to);
        else scale(o->parameters, from, o->input_cols, rows, o->output_cols, to);
        return 0;
    case PLACE: place(from, o->input_cols, (int64_t)o->number, rows, o->output_cols, to); return 0;
    case MULTIPLY:
        if (o->wide) multiply_rows(from, r->cosine, rows, o->output_cols, to);
        else multiply(from, o->number, rows * o->output_cols, to);
        return 0;
    case ADD: add(from, o->number, rows * o->output_cols, to); return 0;
    default: return WRONG_SHAPE;
    }
}
#endif
