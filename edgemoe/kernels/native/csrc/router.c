/* The router: a token's top-k experts by the scores of its product. */
#include "router.h"

#include "dense/dense.h"

#if COMPILED
#include <math.h>

AVX2 static void finish_gates(const router *r, float chosen_total, float *gates) {
    for (int64_t slot = 0; slot < r->k; slot++) {
        if (r->normalise) gates[slot] /= chosen_total;
        if (r->rounded) gates[slot] = from_bf16(to_bf16(gates[slot]));
    }
}

/* The largest of logits [count] that is a number. */
AVX2 static float largest_of(const uint16_t *logits, int64_t count) {
    float largest = -INFINITY;
    /* Not by fmaxf, whose loop GCC 12 fails to compile for aarch64. */
    for (int64_t i = 0; i < count; i++) largest = from_bf16(logits[i]) > largest ? from_bf16(logits[i]) : largest;
    return largest;
}

/* From logits [count]: k distinct experts, the likeliest first, of a tie the first, and their gate weights: parts of
 * a softmax over all experts, or over the chosen. probabilities has room for `count`. */
AVX2 void edgemoe_topk_softmax(const router *r, const uint16_t *logits, float *probabilities, int64_t *chosen, float *gates) {
    const float largest = largest_of(logits, r->count);
    float total = 0, chosen_total = 0;
    for (int64_t i = 0; i < r->count; i++) total += probabilities[i] = expf(from_bf16(logits[i]) - largest);
    for (int64_t slot = 0; slot < r->k; slot++) {
        int64_t best = 0;
        while (probabilities[best] == -1) best++; /* NaN is never above another: without this it would be chosen again */
        for (int64_t i = best + 1; i < r->count; i++) best = probabilities[i] > probabilities[best] ? i : best;
        chosen[slot] = best;
        chosen_total += gates[slot] = probabilities[best] / total;
        probabilities[best] = -1;
    }
    finish_gates(r, chosen_total, gates);
}

/* Parts of a softmax over all experts, of bf16 logits. */
AVX2 static void probabilities_of(const router *r, const uint16_t *logits, float *scores) {
    const float largest = largest_of(logits, r->count);
    float total = 0;
    for (int64_t i = 0; i < r->count; i++) total += scores[i] = expf(from_bf16(logits[i]) - largest);
    for (int64_t i = 0; i < r->count; i++) scores[i] /= total;
}

AVX2 void router_scores(const router *r, const void *of, float *scores) {
    const float *logits = of;
    float largest = -INFINITY, total = 0;
    if (!r->precise) {
        probabilities_of(r, of, scores);
        return;
    }
    for (int64_t i = 0; i < r->count; i++) largest = logits[i] > largest ? logits[i] : largest;
    for (int64_t i = 0; i < r->count; i++) {
        scores[i] = r->sigmoid ? 1 / (1 + expf(-logits[i])) : expf(logits[i] - largest);
        total += scores[i];
    }
    for (int64_t i = 0; i < r->count && !r->sigmoid; i++) scores[i] /= total;
    for (int64_t i = 0; i < r->count && r->rounded_scores; i++) scores[i] = from_bf16(to_bf16(scores[i]));
}

AVX2 void router_gates(const router *r, const float *scores, const int64_t *chosen, float *gates) {
    float total = r->precise && !r->rounded_scores ? r->least : 0;
    for (int64_t slot = 0; slot < r->k; slot++) total += gates[slot] = scores[chosen[slot]];
    if (r->rounded_scores) total = from_bf16(to_bf16(from_bf16(to_bf16(total)) + r->least));
    finish_gates(r, total, gates);
    for (int64_t slot = 0; slot < r->k && r->scale != 0; slot++) {
        gates[slot] *= r->scale;
        if (r->rounded_scores) gates[slot] = from_bf16(to_bf16(gates[slot]));
    }
}

/* The sum of a group's best score, or its best two. */
static float group_rank(const router *r, const float *choice, int64_t size) {
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
        if (choice[i] > best) second = best, best = choice[i];
        else if (choice[i] > second) second = choice[i];
    }
    return r->group_best == 2 ? best + second : best;
}

enum { MOST_GROUPS = 64 };

/* Makes the numbers of all experts outside the best groups -INFINITY. */
static void keep_best_groups(const router *r, float *choice) {
    const int64_t size = r->count / r->groups;
    float ranks[MOST_GROUPS];
    for (int64_t group = 0; group < r->groups; group++) ranks[group] = group_rank(r, choice + group * size, size);
    for (int64_t group = 0; group < r->groups; group++) {
        int64_t better = 0;
        for (int64_t other = 0; other < r->groups; other++)
            better += ranks[other] > ranks[group] || (ranks[other] == ranks[group] && other < group);
        for (int64_t i = group * size; better >= r->best_groups && i < (group + 1) * size; i++) choice[i] = -INFINITY;
    }
}

/* The k experts of the largest numbers in choice [count], which has no NaN, in the order of their scores. */
AVX2 static void take_best(const router *r, float *choice, const float *scores, int64_t *chosen) {
    for (int64_t slot = 0; slot < r->k; slot++) {
        int64_t best = -1, at = slot;
        for (int64_t i = 0; i < r->count; i++)
            if (choice[i] == choice[i] && (best < 0 || choice[i] > choice[best])) best = i;
        choice[best] = NAN; /* taken */
        for (; at > 0 && scores[chosen[at - 1]] < scores[best]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = best;
    }
}

/* As edgemoe_topk_softmax, of a precise router's logits. scores has room for twice `count`. */
AVX2 static void topk_scores(const router *r, const float *logits, float *scores, int64_t *chosen, float *gates) {
    float *choice = scores + r->count;
    router_scores(r, logits, scores);
    for (int64_t i = 0; i < r->count; i++) {
        const float number = (r->raw_choice ? logits[i] : scores[i]) + (r->bias ? r->bias[i] : 0);
        choice[i] = number == number ? number : -INFINITY;
    }
    if (r->groups > 1) keep_best_groups(r, choice);
    take_best(r, choice, scores, chosen);
    router_gates(r, scores, chosen, gates);
}

INLINE float rounded(float x) { return from_bf16(to_bf16(x)); }

/* The expert of the largest of logits [count] but `without`, the first of a tie, and its gate weight. */
AVX2 static void mix(const router *r, const float *logits, int64_t without, int64_t *chosen, float *gate) {
    int64_t best = -1;
    for (int64_t i = 0; i < r->count; i++)
        if (i != without && (best < 0 || logits[i] > logits[best])) best = i;
    const float most = logits[best];
    float total = 0;
    for (int64_t i = 0; i < r->count; i++) {
        const float size = fabsf(logits[i]), below = rounded(rounded(most - logits[i]) / (size < most ? most : size));
        if (i != without && !(below > r->mixing)) total += expf(logits[i] - most);
    }
    *chosen = best, *gate = rounded(1 / total);
}

/* The two experts of `mixing`, the one with the larger gate weight first. */
AVX2 static void topk_mixed(const router *r, const float *logits, int64_t *chosen, float *gates) {
    mix(r, logits, -1, chosen, gates);
    mix(r, logits, chosen[0], chosen + 1, gates + 1);
    if (gates[1] <= gates[0]) return;
    const int64_t second = chosen[1];
    const float gate = gates[1];
    chosen[1] = chosen[0], gates[1] = gates[0], chosen[0] = second, gates[0] = gate;
}

/* Adds the bias of a precise router to its product [tokens, count], and rounds. */
AVX2 static void finish_product(const router *r, int64_t tokens, float *logits) {
    for (; tokens-- > 0 && (r->rounded_product || r->product_bias); logits += r->count)
        for (int64_t i = 0; i < r->count; i++) {
            if (r->product_bias) logits[i] += from_bf16(r->product_bias[i]);
            if (r->rounded_product) logits[i] = from_bf16(to_bf16(logits[i]));
        }
}

/* Multiplies a token's gate weights with the factors of their experts, and puts the largest first again. */
static void scale_experts(const router *r, int64_t *chosen, float *gates) {
    for (int64_t slot = 0; slot < r->k; slot++) {
        const int64_t number = chosen[slot];
        const float gate = gates[slot] * r->expert_scale[number];
        int64_t at = slot;
        for (; at > 0 && gates[at - 1] < gate; at--) gates[at] = gates[at - 1], chosen[at] = chosen[at - 1];
        gates[at] = gate, chosen[at] = number;
    }
}

enum { CHOICES = 16 }; /* tokens of a task */

typedef struct {
    const router *r;
    const void *logits;
    int64_t tokens;
    float *scores; /* [tasks, 2 count] */
    int64_t *chosen;
    float *gates;
} choice_job;

/* The experts of tokens [from, end). */
static void choose_some(const choice_job *job, int64_t from, int64_t end, float *scores) {
    const router *r = job->r;
    for (int64_t token = from; token < end; token++) {
        const int64_t at = token * r->count;
        int64_t *chosen = job->chosen + token * r->k;
        float *gates = job->gates + token * r->k;
        if (r->mixing > 0) topk_mixed(r, (const float *)job->logits + at, chosen, gates);
        else if (r->precise) topk_scores(r, (const float *)job->logits + at, scores, chosen, gates);
        else edgemoe_topk_softmax(r, (const uint16_t *)job->logits + at, scores, chosen, gates);
        if (r->expert_scale) scale_experts(r, chosen, gates);
    }
}

AVX2 static void choice_task(void *of, int64_t task) {
    const choice_job *job = of;
    choose_some(job, task * CHOICES, min_of((task + 1) * CHOICES, job->tokens), job->scores + task * 2 * job->r->count);
}

/* The experts of many tokens, on all threads. */
static int choose_many(pool *p, choice_job *job) {
    const int64_t tasks = ceil_div(job->tokens, CHOICES);
    job->scores = pool_acquire(p, (size_t)(tasks * 2 * job->r->count) * sizeof(float));
    if (!job->scores) return OUT_OF_MEMORY;
    pool_run(p, choice_task, job, tasks);
    pool_release(p);
    return 0;
}

enum { STATES = 16 }; /* rows of a task */

typedef struct {
    const router *r;
    const uint16_t *x;
    int64_t tokens;
    uint16_t *y;
} states_job;

AVX2 static void states_task(void *of, int64_t task) {
    const states_job *job = of;
    const router *r = job->r;
    const int64_t from = task * STATES * r->cols, count = min_of(STATES, job->tokens - task * STATES) * r->cols;
    uint16_t *y = job->y + from;
    edgemoe_rms_norm(job->x + from, r->state_norm, 1, r->state_epsilon, count / r->cols, r->cols, y);
    for (int64_t i = 0; i < count; i++) {
        const float scaled = from_bf16(to_bf16(from_bf16(y[i]) * from_bf16(r->state_scale[i % r->cols])));
        y[i] = to_bf16(scaled * r->state_factor);
    }
}

AVX2 int edgemoe_router_states(pool *p, const router *r, const uint16_t *x, int64_t tokens, uint16_t *y) {
    states_job job = {r, x, tokens, y};
    if (!pool_acquire(p, 64)) return OUT_OF_MEMORY;
    pool_run(p, states_task, &job, ceil_div(tokens, STATES));
    pool_release(p);
    return 0;
}

AVX2 int edgemoe_router_topk(pool *p, const router *r, const uint16_t *x, int64_t tokens, int64_t x_cols, void *logits,
                             float *scores, int64_t *chosen, float *gates) {
    if (r->k < 1 || r->k > r->count || r->groups > MOST_GROUPS || (r->groups > 1 && r->count % r->groups)) return WRONG_SHAPE;
    if (r->mixing > 0 && (!r->precise || r->k != 2)) return WRONG_SHAPE;
    if (x_cols != r->cols || (!r->precise && (r->wide_weight || r->raw_choice || r->sigmoid || r->bias || r->groups > 1 || r->scale != 0 || r->product_bias))) return WRONG_SHAPE;
    const dense_weight weight = {r->weight, NULL, r->count, r->cols, 16};
    const int failed = r->precise ? edgemoe_precise_product(p, r->weight, r->wide_weight, r->count, r->cols, x, tokens, logits)
                                  : edgemoe_dense_product(p, &weight, x, tokens, x_cols, logits, r->count);
    if (failed) return failed;
    if (r->precise) finish_product(r, tokens, logits);
    choice_job job = {r, logits, tokens, NULL, chosen, gates};
    if (tokens > CHOICES) return choose_many(p, &job);
    choose_some(&job, 0, tokens, scores);
    return 0;
}
#endif
