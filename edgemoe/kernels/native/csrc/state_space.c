/* Selective state spaces. A task of the first part is some heads of a group, of one sequence: the convolution of what they take, and
 * their recurrences. The second part has the norms of some rows, and the last inputs of a sequence's convolution. */
#include <stdatomic.h>

#include "state_space.h"

#include "delta_step.h"

#if COMPILED
#include <math.h>

enum { CHUNK = MOST_GUESSES, ROWS = 4, ENOUGH = 4 }; /* tokens convolved at once; rows of a norm's task; tasks for a thread */

typedef struct {
    const state_space *s;
    const uint16_t *projected;
    int64_t count, rows, split; /* split: tasks of a group */
    const delta_run *runs;
    uint16_t *out;
    float *scratch; /* [threads, floats] */
    int64_t floats, threads;
    _Atomic int64_t next;
} space_job;

/* Heads of a task at most, and the channels of their convolution. */
static int64_t heads_of_task(const state_space *s, int64_t split) { return ceil_div(s->heads / s->groups, split); }
static int64_t own_channels(const state_space *s, int64_t split) { return 2 * s->key_dim + heads_of_task(s, split) * s->value_dim; }

/* A thread's inputs of the convolution, [taps - 1 + CHUNK, own_channels], its results, [CHUNK, own_channels], and a head's state after
 * guesses, [key_dim, value_dim]. */
static int64_t scratch_floats(const state_space *s, int64_t split) {
    return (s->conv.taps - 1 + 2 * CHUNK) * own_channels(s, split) + s->key_dim * s->value_dim;
}

/* The heads of a task: the first one, and how many; tokens of their last chunk, 0: none was computed. */
typedef struct { int64_t group, first, count, done; } some_heads;

/* Their values', their group's keys' and its queries' channels. */
static channels channels_of(const state_space *s, some_heads h, int64_t own, int part) {
    if (!part) return (channels){h.first * s->value_dim, 2 * s->key_dim, h.count * s->value_dim};
    return (channels){space_values(s) + ((part - 1) * s->groups + h.group) * s->key_dim, (part - 1) * s->key_dim, s->key_dim};
}

/* A token, in `width` columns of a head's state: to = from keep + key by; sums += query to. */
INLINE void space_columns(const float *k, const float *q, float keep, int64_t key_dim, int64_t stride, int64_t width, const float *from,
                          float *to, const float *by, float *sums) {
    int64_t i = 0;
    for (; i + 4 <= key_dim; i += 4) {
        const float *row = from + i * stride;
        float *after = to + i * stride;
        if (from != to) delta_soon(after + 4 * stride, stride, width, 1);
        INDEPENDENT
        for (int64_t j = 0; j < width; j++) {
            float sum = sums[j];
            for (int r = 0; r < 4; r++) {
                const float number = __builtin_fmaf(k[i + r], by[j], row[r * stride + j] * keep);
                after[r * stride + j] = number;
                sum = __builtin_fmaf(q[i + r], number, sum);
            }
            sums[j] = sum;
        }
    }
    for (; i < key_dim; i++)
        for (int64_t j = 0; j < width; j++) {
            const float number = __builtin_fmaf(k[i], by[j], from[i * stride + j] * keep);
            to[i * stride + j] = number;
            sums[j] = __builtin_fmaf(q[i], number, sums[j]);
        }
}

/* A head's step, as large as its number in a row says. */
AVX2 static float step_of(const state_space *s, uint16_t number, int64_t head) {
    const float step = from_bf16(s->softplus[to_bf16(from_bf16(number) + from_bf16(s->added[head]))]);
    return step < s->least ? s->least : step > s->most ? s->most : step;
}

/* The recurrence of some tokens in one head, some columns of its state for all of them. row and y: the first token's; y NULL: no results. convolved: its
 * keys, queries, and the values of the task's heads, of which this is number `at`. */
AVX2 static void recur(const state_space *s, int64_t head, int64_t at, const uint16_t *row, const float *convolved, int64_t own, int64_t tokens,
                       const float *from, float *to, uint16_t *y) {
    const int64_t size = s->value_dim, most = tokens > 1 ? COLUMNS : WIDE_COLUMNS;
    for (int64_t column = 0; column < size; column += most) {
        const int64_t width = min_of(most, size - column);
        for (int64_t t = 0; t < tokens; t++) {
            const float *k = convolved + t * own, *q = k + s->key_dim, *value = q + s->key_dim + at * size + column;
            const float step = step_of(s, row[t * space_row_size(s) + space_values(s) + space_channels(s) + head], head);
            float by[WIDE_COLUMNS], sums[WIDE_COLUMNS];
            for (int64_t j = 0; j < width; j++) by[j] = value[j] * step, sums[j] = s->skip[head] * value[j];
            space_columns(k, q, expf(s->factor[head] * step), s->key_dim, size, width, (t ? to : from) + column, to + column, by, sums);
            for (int64_t j = 0; j < width && y; j++) y[t * space_values(s) + head * size + column + j] = to_bf16(sums[j]);
        }
    }
}

/* Consecutive rows of a sequence in some heads. row and y: as recur. guesses: the state stays as it is. */
AVX2 static void heads_rows(const space_job *job, const delta_run *run, some_heads *h, const uint16_t *row, int64_t tokens, int guesses,
                            float *inputs, uint16_t *y) {
    const state_space *s = job->s;
    const int64_t own = own_channels(s, job->split), head_size = s->key_dim * s->value_dim, size = space_row_size(s);
    float *convolved = inputs + (s->conv.taps - 1 + CHUNK) * own, *state = convolved + CHUNK * own;
    for (int64_t t = 0; t < tokens; t += h->done) {
        const int first = !h->done;
        if (!first) memmove(inputs, inputs + h->done * own, (size_t)((s->conv.taps - 1) * own) * sizeof *inputs);
        h->done = min_of(CHUNK, tokens - t);
        for (int i = 0; i < 3; i++)
            convolve(&s->conv, row + t * size + space_values(s), size, channels_of(s, *h, own, i), own, h->done, inputs, convolved);
        for (int64_t i = 0; i < h->count; i++) {
            const int64_t head = h->first + i;
            float *to = run->next_state + head * head_size;
            if (first && !run->state) memset(to, 0, (size_t)head_size * sizeof *to);
            recur(s, head, i, row + t * size, convolved, own, h->done, first && run->state ? run->state + head * head_size : to,
                  guesses ? state : to, y ? y + t * space_values(s) : NULL);
        }
    }
}

AVX2 static void heads_task(const space_job *job, int64_t task, float *inputs) {
    const state_space *s = job->s;
    const int64_t own = own_channels(s, job->split), in_group = s->heads / s->groups, most = heads_of_task(s, job->split);
    const int64_t part = task % job->split, size = space_row_size(s);
    const delta_run *run = job->runs + task / (s->groups * job->split);
    const int64_t certain = run->tokens - run->guesses, guess = run->first + certain;
    some_heads h = {.group = task / job->split % s->groups};
    h.first = h.group * in_group + part * most, h.count = min_of(most, in_group - part * most);
    if (h.count < 1) return;
    for (int i = 0; i < 3; i++) earlier_inputs(&s->conv, run->conv, channels_of(s, h, own, i), own, inputs);
    heads_rows(job, run, &h, run->earlier, run->earlier_count, 0, inputs, NULL);
    heads_rows(job, run, &h, job->projected + run->first * size, certain, 0, inputs, job->out + run->first * space_values(s));
    heads_rows(job, run, &h, job->projected + guess * size, run->guesses, 1, inputs, job->out + guess * space_values(s));
}

AVX2 static void thread_task(void *of, int64_t thread) {
    space_job *job = of;
    const int64_t tasks = job->count * job->s->groups * job->split;
    float *inputs = job->scratch + thread * job->floats;
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < tasks;) heads_task(job, contiguous_per_thread(task, tasks, job->threads), inputs);
}

/* 1 / sqrt(the mean of squares + epsilon), in eight sums on every processor. */
AVX2 static float factor_of(const float *x, int64_t count, float epsilon) {
    float lanes[8] = {0}, sum = 0;
    int64_t k = 0;
    for (; k + 8 <= count; k += 8)
        for (int j = 0; j < 8; j++) lanes[j] = __builtin_fmaf(x[k + j], x[k + j], lanes[j]);
    for (; k < count; k++) lanes[0] = __builtin_fmaf(x[k], x[k], lanes[0]);
    for (int j = 0; j < 8; j++) sum += lanes[j];
    return 1 / __builtin_sqrtf(sum / (float)count + epsilon);
}

/* y = norm(y silu(z)), of one row. x [norm_size]: scratch. */
AVX2 static void gated_norm(const state_space *s, const uint16_t *z, float *x, uint16_t *y) {
    for (int64_t first = 0; first < space_values(s); first += s->norm_size, y += s->norm_size, z += s->norm_size) {
        for (int64_t j = 0; j < s->norm_size; j++) x[j] = from_bf16(y[j]) * s->wide_silu[z[j]];
        const float by = factor_of(x, s->norm_size, s->epsilon);
        for (int64_t j = 0; j < s->norm_size; j++) y[j] = to_bf16(s->norm[first + j] * from_bf16(to_bf16(x[j] * by)));
    }
}

/* The last inputs of a sequence's convolution, which may lie where those before the tokens lie. */
AVX2 static void keep_inputs(const state_space *s, const delta_run *run, const uint16_t *projected) {
    const int64_t taps = s->conv.taps, channels = space_channels(s), stride = space_row_size(s), tokens = run->earlier_count + run->tokens - run->guesses;
    const uint16_t *x = projected + run->first * stride + space_values(s);
    if (taps == 4 && tokens == 1 && run->conv) { /* four of them are a number of 64 bits */
        for (int64_t c = 0; c < channels; c++) {
            uint64_t all;
            memcpy(&all, run->conv + 4 * c, sizeof all);
            all = all >> 16 | (uint64_t)x[c] << 48;
            memcpy(run->next_conv + 4 * c, &all, sizeof all);
        }
        return;
    }
    for (int64_t i = 0; i < taps; i++) {
        const int64_t token = tokens - taps + i, own = token - run->earlier_count;
        const uint16_t *row = own >= 0 ? x + own * stride : token >= 0 ? run->earlier + token * stride + space_values(s) : NULL;
        for (int64_t c = 0; c < channels; c++)
            run->next_conv[c * taps + i] = row ? row[c] : run->conv ? run->conv[c * taps + taps + token] : 0;
    }
}

AVX2 static void end_task(void *of, int64_t thread) {
    space_job *job = of;
    const state_space *s = job->s;
    const int64_t rows = job->rows, norms = ceil_div(rows, ROWS), stride = space_row_size(s);
    float *x = job->scratch + thread * job->floats;
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < norms + job->count;) {
        const int64_t index = task - norms;
        if (index >= 0) keep_inputs(s, job->runs + index, job->projected);
        else
            for (int64_t row = task * ROWS; row < min_of((task + 1) * ROWS, rows); row++)
                gated_norm(s, job->projected + row * stride, x, job->out + row * space_values(s));
    }
}

static int space_fits(const state_space *s) {
    if (s->groups < 1 || s->heads < 1 || s->heads % s->groups || s->key_dim < 1 || s->value_dim < 1 || s->conv.taps < 1) return 0;
    return s->norm_size > 0 && space_values(s) % s->norm_size == 0 && s->conv.channels == space_channels(s);
}

AVX2 int edgemoe_state_space(pool *p, const state_space *s, const uint16_t *projected, int64_t count, const delta_run *runs, uint16_t *out) {
    const int64_t rows = count < 1 ? 0 : delta_rows(runs, count);
    if (!rows || !space_fits(s)) return WRONG_SHAPE;
    const int64_t threads = pool_threads(p), split = min_of(s->heads / s->groups, ceil_div(ENOUGH * threads, count * s->groups));
    const int64_t convolved = scratch_floats(s, split), floats = convolved > s->norm_size ? convolved : s->norm_size;
    space_job job = {.s = s, .projected = projected, .count = count, .rows = rows, .split = split, .runs = runs, .out = out,
                     .floats = floats, .threads = threads};
    job.scratch = pool_acquire(p, (size_t)(threads * floats) * sizeof(float));
    if (!job.scratch) return OUT_OF_MEMORY;
    pool_run(p, thread_task, &job, threads);
    atomic_store(&job.next, 0);
    pool_run(p, end_task, &job, threads);
    pool_release(p);
    delta_keep_guesses(runs, count, projected, space_row_size(s));
    return 0;
}
#endif
