/* Levels of a new token's experts: the rules of edgemoe/policy/levels.py, to the same bits. */
#ifndef EDGEMOE_LEVELS_H
#define EDGEMOE_LEVELS_H
#include <stdint.h>

enum { MOST_LEVELS = 4 };
enum { UNIFORM, RANKED, PRICED };

typedef struct {
    int64_t rule;               /* UNIFORM: all at level[0]; RANKED or PRICED */
    int64_t count;              /* of levels */
    int64_t level[MOST_LEVELS]; /* high to low */
    int16_t counts[MOST_LEVELS]; /* RANKED: the first counts[i] experts are at level[i] or above; not set for the last level */
    int64_t experts;            /* PRICED: rows of damage */
    const float *damage;        /* PRICED: [experts, count], for a gate weight of 1; a level costs gate^2 * damage + price */
    const float *price;         /* PRICED: [places, count] */
    const int64_t *held;        /* [experts]: the row of price of each; NULL: the first */
} level_rule;

/* gates [k], not rising, as the router gives them, of the experts chosen [k] -> levels [k]. */
void edgemoe_levels(const level_rule *rule, const float *gates, const int64_t *chosen, int64_t k, int64_t *levels);

/* Scales kept [n] so that they add up to what gates [k] add up to. */
void edgemoe_renormalise(const float *gates, int64_t k, float *kept, int64_t n);
#endif
