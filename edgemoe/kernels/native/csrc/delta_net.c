/* Gated delta nets. A task is a head of keys of one sequence, with its heads of values: no thread waits for another. */
#include <stdatomic.h>

#include "delta_net.h"

#include "convolution.h"
#include "delta_step.h"
#include "dense/dense.h"

#if COMPILED
#include <math.h>

enum { CHUNK = MOST_GUESSES }; /* tokens whose queries, keys and values exist at once */

typedef struct {
    const delta_net *net;
    const uint16_t *projected;
    int64_t count, threads;
    const delta_run *runs;
    uint16_t *out;
    float *scratch; /* [threads, scratch_floats] */
    _Atomic int64_t next;
} net_job;

/* Heads of values that share a head of keys, and channels of the convolution that are theirs. */
static int64_t sharing(const delta_net *n) { return n->heads / n->key_heads; }
static int64_t own_channels(const delta_net *n) { return 2 * n->key_dim + sharing(n) * n->value_dim; }

/* A thread's scratch: inputs of the convolution, [taps - 1 + CHUNK, own_channels], its results, and those of the recurrence. */
typedef struct {
    float *inputs, *convolved;
    uint16_t *core; /* [CHUNK, sharing, value_dim] */
    float *keep, *rate; /* [CHUNK, sharing, decays], [CHUNK, sharing] */
    float *state;       /* [key_dim, value_dim], of a head after guesses */
} net_scratch;

static int64_t scratch_floats(const delta_net *n) {
    return (n->taps - 1 + 2 * CHUNK) * own_channels(n) + CHUNK * sharing(n) * (n->value_dim + 1 + n->decays) + n->key_dim * n->value_dim;
}

static net_scratch scratch_at(const delta_net *n, float *at) {
    net_scratch s = {.inputs = at, .convolved = at + (n->taps - 1 + CHUNK) * own_channels(n)};
    s.state = s.convolved + CHUNK * own_channels(n);
    s.keep = s.state + n->key_dim * n->value_dim;
    s.rate = s.keep + CHUNK * sharing(n) * n->decays;
    s.core = (uint16_t *)(s.rate + CHUNK * sharing(n));
    return s;
}

/* The queries', the keys' and the values' channels of a head of keys. */
static channels channels_of(const delta_net *n, int64_t key_head, int part) {
    const int64_t keys = n->key_heads * n->key_dim, values = sharing(n) * n->value_dim;
    if (part < 2) return (channels){part * keys + key_head * n->key_dim, part * n->key_dim, n->key_dim};
    return (channels){2 * keys + key_head * values, 2 * n->key_dim, values};
}

/* The last inputs, of which the last one is in row `last`; four of them are a number of 64 bits. */
AVX2 static void keep_inputs(const delta_net *n, const delta_run *run, channels c, const float *inputs, int64_t last) {
    const int64_t own = own_channels(n);
    const uint32_t *x = (const uint32_t *)inputs + (last + 1 - n->taps) * own + c.own; /* their upper halves are bf16 */
    uint16_t *to = run->next_conv + c.first * n->taps;
    if (n->taps == 4)
        for (int64_t j = 0; j < c.count; j++) {
            const uint64_t low = x[j] >> 16 | (x[own + j] & 0xffff0000), high = x[2 * own + j] >> 16 | (x[3 * own + j] & 0xffff0000);
            const uint64_t all = high << 32 | low;
            memcpy(to + 4 * j, &all, sizeof all);
        }
    else
        for (int64_t j = 0; j < c.count; j++)
            for (int64_t i = 0; i < n->taps; i++) to[j * n->taps + i] = (uint16_t)(x[i * own + j] >> 16);
}

/* The part of a row of the state that stays. Exponentials are rounded once: the same bits by every library. */
AVX2 static float kept(const delta_net *n, float a, float factor) {
    const float soft = a > 20 ? a : (float)log1p(exp(a));
    const float decay = n->lowest == 0 ? factor * soft : n->lowest * (float)(1 / (1 + exp(factor * a)));
    return expf(n->rounded_decay ? from_bf16(to_bf16(decay)) : decay);
}

/* What stays of the state, and how much of it is replaced, by each token in each head of values. */
AVX2 static void rates(const delta_net *n, const uint16_t *x, int64_t key_head, int64_t tokens, const net_scratch *s) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < sharing(n); i++) {
            const uint16_t *b = x + t * delta_row_size(n) + delta_channels(n) + n->heads * n->value_dim;
            const int64_t head = key_head * sharing(n) + i, row = t * sharing(n) + i;
            for (int64_t d = 0; d < n->decays; d++) {
                const int64_t at = head * n->decays + d;
                s->keep[row * n->decays + d] = kept(n, from_bf16(b[n->heads + at]) + n->added[at], n->factor[head]);
            }
            s->rate[row] = from_bf16(n->sigmoid[b[head]]);
        }
}

/* The recurrence in one head of values: some columns of its state for all tokens. */
AVX2 static void recur(const delta_net *n, const float *from, float *to, int64_t head, int64_t tokens, const net_scratch *s) {
    const int64_t own = own_channels(n), size = n->value_dim;
    const int64_t most = tokens > 1 ? COLUMNS : WIDE_COLUMNS;
    for (int64_t at = 0; at < size; at += most)
        for (int64_t t = 0; t < tokens; t++) {
            const float *q = s->convolved + t * own, *value = q + 2 * n->key_dim + head * size + at;
            const int64_t width = min_of(most, size - at), row = t * sharing(n) + head;
            const delta_token token = {q, q + n->key_dim, s->keep + row * n->decays, n->decays > 1, s->rate[row]};
            float sums[WIDE_COLUMNS];
            delta_columns(&token, n->key_dim, size, width, (t ? to : from) + at, to + at, value, sums);
            for (int64_t j = 0; j < width; j++) s->core[row * size + at + j] = to_bf16(sums[j]);
        }
}

/* y = norm(x) gate(z), of one head of one token. */
AVX2 static void gated_norm(const delta_net *n, const uint16_t *x, const uint16_t *z, uint16_t *y) {
    const float by = edgemoe_rms_factor(x, n->value_dim, n->epsilon);
    for (int64_t j = 0; j < n->value_dim; j++) {
        const float scaled = from_bf16(x[j]) * by, normed = n->norm[j] * (n->strict ? scaled : from_bf16(to_bf16(scaled)));
        y[j] = to_bf16((n->rounded ? from_bf16(to_bf16(normed)) : normed) * n->wide_gate[z[j]]);
    }
}

/* Where a task is in the rows of its sequence: tokens of the last chunk; 0: none was computed. */
typedef struct {
    const delta_run *run;
    int64_t key_head, done;
} net_place;

/* Some tokens of a sequence in a head of keys. x and y: the first one's rows; y NULL: no results. guesses: the state stays as it is. */
AVX2 static void net_chunk(const delta_net *n, const net_place *place, const uint16_t *x, int64_t tokens, int guesses, const net_scratch *s,
                           uint16_t *y) {
    const delta_run *run = place->run;
    const int first = !place->done;
    const int64_t key_head = place->key_head;
    const int64_t own = own_channels(n), size = n->value_dim, head_size = n->key_dim * size;
    const convolution conv = {n->taps, delta_channels(n), n->conv, NULL, n->silu};
    for (int part = 0; part < 3; part++) {
        const channels c = channels_of(n, key_head, part);
        if (first) earlier_inputs(&conv, run->conv, c, own, s->inputs);
        convolve(&conv, x, delta_row_size(n), c, own, tokens, s->inputs, s->convolved);
    }
    for (int64_t t = 0; t < tokens; t++) {
        float *q = s->convolved + t * own, *k = q + n->key_dim;
        delta_normalised(q, n->key_dim, 1 / __builtin_sqrtf((float)n->key_dim), q);
        delta_normalised(k, n->key_dim, 1, k);
    }
    rates(n, x, key_head, tokens, s);
    for (int64_t i = 0; i < sharing(n); i++) {
        const int64_t head = key_head * sharing(n) + i;
        float *to = run->next_state + head * head_size;
        if (first && !run->state) memset(to, 0, (size_t)head_size * sizeof *to);
        recur(n, first && run->state ? run->state + head * head_size : to, guesses ? s->state : to, i, tokens, s);
        for (int64_t t = 0; t < tokens && y; t++)
            gated_norm(n, s->core + (t * sharing(n) + i) * size, x + t * delta_row_size(n) + delta_channels(n) + head * size,
                       y + (t * n->heads + head) * size);
    }
}

/* Consecutive rows of a sequence, chunk by chunk. */
AVX2 static void net_rows(const delta_net *n, net_place *place, const uint16_t *x, int64_t tokens, int guesses, const net_scratch *s, uint16_t *y) {
    const int64_t own = own_channels(n);
    for (int64_t t = 0; t < tokens; t += place->done) {
        if (place->done) memmove(s->inputs, s->inputs + place->done * own, (size_t)((n->taps - 1) * own) * sizeof(float));
        const int64_t some = min_of(CHUNK, tokens - t);
        net_chunk(n, place, x + t * delta_row_size(n), some, guesses, s, y ? y + t * n->heads * n->value_dim : NULL);
        place->done = some;
    }
}

AVX2 static void net_task(const net_job *job, int64_t task, const net_scratch *s) {
    const delta_net *n = job->net;
    const delta_run *run = job->runs + task / n->key_heads;
    net_place place = {run, task % n->key_heads, 0};
    const int64_t certain = run->tokens - run->guesses, guess = run->first + certain, size = n->heads * n->value_dim;
    net_rows(n, &place, run->earlier, run->earlier_count, 0, s, NULL);
    net_rows(n, &place, job->projected + run->first * delta_row_size(n), certain, 0, s, job->out + run->first * size);
    for (int part = 0; part < 3; part++) keep_inputs(n, run, channels_of(n, place.key_head, part), s->inputs, n->taps - 2 + place.done);
    net_rows(n, &place, job->projected + guess * delta_row_size(n), run->guesses, 1, s, job->out + guess * size);
}

AVX2 static void thread_task(void *argument, int64_t thread) {
    net_job *job = argument;
    const net_scratch s = scratch_at(job->net, job->scratch + thread * scratch_floats(job->net));
    const int64_t tasks = job->count * job->net->key_heads;
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < tasks;) net_task(job, contiguous_per_thread(task, tasks, job->threads), &s);
}

AVX2 int edgemoe_delta_net(pool *p, const delta_net *n, const uint16_t *projected, int64_t count, const delta_run *runs, uint16_t *out) {
    if (count < 1 || !delta_rows(runs, count) || n->key_heads < 1 || n->heads < 1 || n->heads % n->key_heads || n->key_dim < 1) return WRONG_SHAPE;
    if (n->decays != 1 && n->decays != n->key_dim) return WRONG_SHAPE;
    if (n->key_dim > MOST_KEY_DIM || n->value_dim < 1 || n->taps < 1) return WRONG_SHAPE;
    net_job job = {.net = n, .projected = projected, .count = count, .threads = pool_threads(p), .runs = runs, .out = out};
    job.scratch = pool_acquire(p, (size_t)(pool_threads(p) * scratch_floats(n)) * sizeof(float));
    if (!job.scratch) return OUT_OF_MEMORY;
    pool_run(p, thread_task, &job, pool_threads(p));
    pool_release(p);
    delta_keep_guesses(runs, count, projected, delta_row_size(n));
    return 0;
}
#endif
