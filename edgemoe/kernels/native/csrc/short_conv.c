/* Gated short convolutions. A task is some channels of one sequence, for all tokens. */
#include "short_conv.h"

#if COMPILED
enum { CHANNELS = 128 }; /* of a task */

typedef struct {
    const short_conv *s;
    const uint16_t *projected;
    const delta_run *runs;
    uint16_t *out;
} conv_job;

/* A task's channels, and their last inputs, the oldest first. */
typedef struct {
    int64_t first, count;
    float inputs[MOST_TAPS][CHANNELS];
} some_channels;

/* Tasks of a sequence. */
static int64_t tasks_of(const short_conv *s) { return ceil_div(s->channels, CHANNELS); }

/* The inputs before the tokens of a call. */
AVX2 static void earlier_inputs(const short_conv *s, const uint16_t *conv, some_channels *c) {
    for (int64_t i = 0; i < s->taps; i++)
        for (int64_t j = 0; j < c->count; j++)
            c->inputs[i][j] = conv ? from_bf16(conv[(c->first + j) * s->taps + i]) : 0;
}

AVX2 static void keep_inputs(const short_conv *s, const some_channels *c, uint16_t *conv) {
    for (int64_t j = 0; j < c->count; j++)
        for (int64_t i = 0; i < s->taps; i++) conv[(c->first + j) * s->taps + i] = to_bf16(c->inputs[i][j]);
}

/* One token. row and y: the task's channels in its rows. */
AVX2 static void convolve(const short_conv *s, const uint16_t *row, some_channels *c, uint16_t *y) {
    float sums[CHANNELS], *newest = c->inputs[s->taps - 1];
    memmove(c->inputs[0], c->inputs[1], (size_t)(s->taps - 1) * sizeof c->inputs[0]);
    for (int64_t j = 0; j < c->count; j++) newest[j] = from_bf16(to_bf16(from_bf16(row[j]) * from_bf16(row[2 * s->channels + j])));
    for (int64_t j = 0; j < c->count; j++) sums[j] = c->inputs[0][j] * s->conv[c->first + j];
    for (int64_t i = 1; i < s->taps; i++)
        for (int64_t j = 0; j < c->count; j++) sums[j] += c->inputs[i][j] * s->conv[i * s->channels + c->first + j];
    for (int64_t j = 0; s->bias && j < c->count; j++) sums[j] += s->bias[c->first + j];
    for (int64_t j = 0; j < c->count; j++) y[j] = to_bf16(from_bf16(row[s->channels + j]) * from_bf16(to_bf16(sums[j])));
}

AVX2 static void conv_task(void *of, int64_t task) {
    const conv_job *job = of;
    const short_conv *s = job->s;
    const int64_t index = task / tasks_of(s), first = task % tasks_of(s) * CHANNELS;
    const delta_run *run = job->runs + index;
    some_channels c = {.first = first, .count = min_of(CHANNELS, s->channels - first)};
    const uint16_t *own = job->projected + run->first * 3 * s->channels + first;
    uint16_t unused[CHANNELS], *out = job->out + run->first * s->channels + first;
    earlier_inputs(s, run->conv, &c);
    for (int64_t t = 0; t < run->earlier_count; t++) convolve(s, run->earlier + t * 3 * s->channels + first, &c, unused);
    for (int64_t t = 0; t < run->tokens; t++) {
        convolve(s, own + t * 3 * s->channels, &c, out + t * s->channels);
        if (t + 1 == run->tokens - run->guesses) keep_inputs(s, &c, run->next_conv);
    }
}

AVX2 int edgemoe_short_conv(pool *p, const short_conv *s, const uint16_t *projected, int64_t count, const delta_run *runs,
                            uint16_t *out) {
    if (count < 1 || !delta_rows(runs, count) || s->channels < 1 || s->taps < 1 || s->taps > MOST_TAPS) return WRONG_SHAPE;
    conv_job job = {s, projected, runs, out};
    if (!pool_acquire(p, 64)) return OUT_OF_MEMORY;
    pool_run(p, conv_task, &job, count * tasks_of(s));
    delta_keep_guesses(runs, count, projected, 3 * s->channels);
    pool_release(p);
    return 0;
}
#endif
