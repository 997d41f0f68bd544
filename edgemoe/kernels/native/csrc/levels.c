/* Levels of a new token's experts. Plain C, one rounding an operation: no products are fused with sums. */
#include "levels.h"

static float sum_of(const float *x, int64_t n) {
    float total = 0;
    for (int64_t i = 0; i < n; i++) total += x[i];
    return total;
}

/* The level of an expert of least weight * damage + price; of a tie the higher one. */
static int64_t cheapest(const level_rule *rule, int64_t expert, float weight) {
    const float *damage = rule->damage + expert * rule->count;
    const float *price = rule->price + (rule->held ? rule->held[expert] * rule->count : 0);
    int64_t best = 0;
    float least = 0;
    for (int64_t i = 0; i < rule->count; i++) {
        const volatile float lost = weight * damage[i]; /* volatile: rounded before the sum */
        const float cost = lost + price[i];
        if (!i || cost < least) best = i, least = cost;
    }
    return rule->level[best];
}

/* The level of the expert at a place among a token's experts. */
static int64_t ranked(const level_rule *rule, int64_t place) {
    int64_t i = 0;
    while (i < rule->count - 1 && place >= rule->counts[i]) i++;
    return rule->level[i];
}

void edgemoe_levels(const level_rule *rule, const float *gates, const int64_t *chosen, int64_t k, int64_t *levels) {
    for (int64_t i = 0; i < k; i++) {
        if (rule->rule == PRICED) levels[i] = cheapest(rule, chosen[i], gates[i] * gates[i]);
        else levels[i] = rule->rule == RANKED ? ranked(rule, i) : rule->level[0];
    }
}

void edgemoe_renormalise(const float *gates, int64_t k, float *kept, int64_t n) {
    const float left = sum_of(kept, n), factor = sum_of(gates, k) / (left > 1e-20f ? left : 1e-20f);
    for (int64_t i = 0; i < n; i++) kept[i] *= factor;
}
