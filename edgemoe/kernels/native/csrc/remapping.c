/* Tokens of a step that agree on experts: bins, votes, and the choice by both. */
#include "remapping.h"

#if COMPILED
#include <math.h>

static const float LEAST_SCORE = 1e-30f; /* below this a biased score counts as it */

/* A token's experts: its logits, and in scratch [count] each their scores, the numbers that rank them, and their bins. */
typedef struct {
    const void *logits;
    float *scores, *ranks, *bins;
    float largest; /* rank that is a number */
} token_experts;

/* Makes the ranks of experts outside the groups of a token's own experts -INFINITY. */
static void keep_groups(const router *r, const int64_t *own, float *ranks) {
    const int64_t size = r->count / r->groups;
    for (int64_t group = 0; group < r->groups; group++) {
        int there = 0;
        for (int64_t slot = 0; slot < r->k; slot++) there |= own[slot] / size == group;
        for (int64_t i = group * size; !there && i < (group + 1) * size; i++) ranks[i] = -INFINITY;
    }
}

/* The experts of one of the step's tokens, whose own choice is `own`. */
AVX2 static token_experts experts_of(const router *r, const void *logits, int64_t token, const int64_t *own, float *scratch) {
    const int64_t at = token * r->count;
    token_experts t = {(const uint8_t *)logits + at * (r->precise ? 4 : 2), scratch, scratch + r->count, scratch + 2 * r->count, -INFINITY};
    router_scores(r, t.logits, t.scores);
    for (int64_t i = 0; i < r->count; i++) {
        const float score = t.scores[i] + (r->bias ? r->bias[i] : 0);
        if (r->bias) t.ranks[i] = logf(score < LEAST_SCORE ? LEAST_SCORE : score);
        else t.ranks[i] = r->precise ? ((const float *)t.logits)[i] : from_bf16(((const uint16_t *)t.logits)[i]);
    }
    if (r->groups > 1) keep_groups(r, own, t.ranks);
    /* Not by fmaxf, whose loop GCC 12 fails to compile for aarch64. */
    for (int64_t i = 0; i < r->count; i++) t.largest = t.ranks[i] > t.largest ? t.ranks[i] : t.largest;
    return t;
}

/* 0 for the likeliest experts, down to -m->bins; one less for a rank that is none. */
AVX2 static float bin_of(const remapping *m, float rank, float largest) {
    const float bin = ceilf((rank - largest) * m->alpha), last = (float)-m->bins;
    if (!(rank > -INFINITY)) return last - 1;
    return bin > last ? bin : last;
}

/* Adds tokens^(bins + bin) to the popularity of each of a token's experts: whole numbers, so that no order of tokens
 * changes a sum. A token without a finite rank has no votes. */
AVX2 static void vote(const router *r, const remapping *m, const token_experts *t, int64_t tokens) {
    for (int64_t i = 0; i < r->count && isfinite(t->largest); i++) {
        int64_t vote = 1, power = m->bins + (int64_t)bin_of(m, t->ranks[i], t->largest);
        if (power < 0) continue;
        for (; power > 0; power--) vote *= tokens;
        m->popularity[i] += vote;
    }
}

/* Whether expert i comes before another in the choice of a token. */
AVX2 static int comes_before(const remapping *m, const token_experts *t, int64_t i, int64_t other) {
    if (t->bins[i] != t->bins[other]) return t->bins[i] > t->bins[other];
    if (m->popularity[i] != m->popularity[other]) return m->popularity[i] > m->popularity[other];
    return t->ranks[i] > t->ranks[other] || (t->ranks[i] == t->ranks[other] && i < other);
}

/* Chooses a token's experts by bin, popularity, rank and number, its likeliest always, and orders them by rank. Returns how
 * many of them were not chosen before. */
AVX2 static int64_t choose(const router *r, const remapping *m, const token_experts *t, int64_t *chosen) {
    const float taken = (float)(-m->bins - 2);
    int64_t likeliest = 0, changed = 0, left = 0;
    while (t->ranks[likeliest] != t->largest) likeliest++;
    for (int64_t i = 0; i < r->count; i++) t->bins[i] = bin_of(m, t->ranks[i], t->largest);
    t->bins[likeliest] = 1;
    for (int64_t slot = 0; slot < r->k; slot++) {
        int64_t best = -1;
        for (int64_t i = 0; i < r->count; i++)
            if (t->bins[i] != taken && (best < 0 || comes_before(m, t, i, best))) best = i;
        t->bins[best] = taken;
    }
    for (int64_t slot = 0; slot < r->k; slot++) changed += t->bins[chosen[slot]] != taken;
    for (int64_t i = 0; i < r->count; i++) {
        if (t->bins[i] != taken) continue;
        int64_t at = left++;
        for (; at > 0 && t->ranks[chosen[at - 1]] < t->ranks[i]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = i;
    }
    return changed;
}

AVX2 void edgemoe_remap(const router *r, const remapping *m, const void *logits, int64_t tokens, float *scratch, int64_t *chosen, float *gates,
                        int64_t *counts) {
    counts[0] = counts[1] = 0;
    memset(m->popularity, 0, (size_t)r->count * sizeof *m->popularity);
    for (int64_t pair = 0; pair < tokens * r->k; pair++) counts[0] += !m->popularity[chosen[pair]]++;
    memset(m->popularity, 0, (size_t)r->count * sizeof *m->popularity);
    for (int64_t token = 0; token < tokens; token++) {
        const token_experts t = experts_of(r, logits, token, chosen + token * r->k, scratch);
        vote(r, m, &t, tokens);
    }
    for (int64_t token = 0; token < tokens; token++, chosen += r->k, gates += r->k) {
        const token_experts t = experts_of(r, logits, token, chosen, scratch);
        if (!isfinite(t.largest)) continue;
        counts[1] += choose(r, m, &t, chosen);
        router_gates(r, t.scores, chosen, gates);
    }
}
#endif
