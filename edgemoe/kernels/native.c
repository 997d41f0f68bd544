/* Products with quantized weights on a CPU with AVX2, read as the planes lie, by threads of its own.
 *
 * Loaded with ctypes (native.py); no Python.h, so that a C compiler is all that building it takes. Where this
 * file cannot be compiled, or the processor has no AVX2, torch's operators do the same work (cpu.py).
 *
 * An expert's codes lie in layout cpu-avx2 (storage/layout.py): blocks of 32 rows, per column 16 bytes, rows d
 * and d + 16 in byte d. What is multiplied is an integer: activations are turned into 14-bit numbers with a scale
 * per chunk of at most 64 columns. The rounding that adds is some 1/16384 of a chunk's largest activation, below
 * that of a bf16 number's own. A chunk's sum is exact, so one token and many can go different ways to it and come
 * out the same bit for bit:
 *   one token:   numbers are split into 128 h + l, and both halves times a nibble, straight from the planes, add up
 *                in 16 bits over a chunk: 16 steps * 2 products * 15 * 64 = 30720;
 *   more tokens: a chunk's codes are joined once, 32 rows of them in a tile of 2 KiB, and multiplied with every
 *                token in 16 bits each.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#if defined(__x86_64__)
/* ---------------------------------------------------------------------------------------------------- threads */

struct pool {
    int threads; /* the caller's own among them */
    int stop;
    pthread_t *workers;
    pthread_mutex_t caller; /* one product at a time, whoever asks */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_uint epoch;   /* counts runs: a worker that sees a new one has work */
    atomic_int sleeping; /* workers in pthread_cond_wait, or about to be */
    atomic_int active;   /* workers inside a run */
    _Atomic int64_t next, left;
    _Atomic int64_t tasks;
    task_fn fn;
    void *job;
    int8_t *scratch; /* quantized activations; grows to the largest product asked for */
    size_t scratch_bytes;
};

/* How long a worker waits before it sleeps: longer than the caller needs between two products of a token,
 * since waking a thread takes longer than most products. Meanwhile it lets whoever else wants the core have it. */
enum { SPINS = 4096, YIELD_EVERY = 64 };

static void work(pool *p) {
    int64_t task;
    while ((task = atomic_fetch_add(&p->next, 1)) < p->tasks) {
        p->fn(p->job, task);
        atomic_fetch_sub(&p->left, 1);
    }
}

static void *worker(void *argument) {
    pool *p = argument;
    unsigned seen = 0;
    for (;;) {
        for (int i = 1; i <= SPINS && atomic_load(&p->epoch) == seen; i++)
            if (i % YIELD_EVERY) _mm_pause();
            else sched_yield();
        if (atomic_load(&p->epoch) == seen) {
            pthread_mutex_lock(&p->mutex);
            atomic_fetch_add(&p->sleeping, 1);
            while (atomic_load(&p->epoch) == seen) pthread_cond_wait(&p->wake, &p->mutex);
            atomic_fetch_sub(&p->sleeping, 1);
            pthread_mutex_unlock(&p->mutex);
        }
        /* Between its two marks a worker may touch the job; run() waits for all of them. */
        atomic_fetch_add(&p->active, 1);
        seen = atomic_load(&p->epoch);
        if (p->stop) break;
        work(p);
        atomic_fetch_sub(&p->active, 1);
    }
    return NULL;
}

static void announce(pool *p) {
    atomic_fetch_add(&p->epoch, 1);
    if (atomic_load(&p->sleeping)) {
        pthread_mutex_lock(&p->mutex);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->mutex);
    }
}

static void run(pool *p, task_fn fn, void *job, int64_t tasks) {
    if (p->threads == 1 || tasks == 1) {
        for (int64_t task = 0; task < tasks; task++) fn(job, task);
        return;
    }
    /* A late worker of the last run may still be asking for tasks: there are none until `next` is reset. */
    p->fn = fn, p->job = job, p->tasks = tasks;
    atomic_store(&p->left, tasks);
    atomic_store(&p->next, 0);
    announce(p);
    work(p);
    for (int i = 1; atomic_load(&p->left) > 0; i++)
        if (i % 1024) _mm_pause();
        else sched_yield();
    atomic_store(&p->next, INT64_MAX / 2);
    for (int i = 1; atomic_load(&p->active) > 0; i++)
        if (i % 1024) _mm_pause();
        else sched_yield();
}

/* ------------------------------------------------------------------------------------------------ activations */

/* The largest magnitude of n bf16 numbers; NaN where one is NaN or infinite, so that it is seen in every result. */
INLINE float magnitude(const uint16_t *x, int64_t n) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t bits = x[i] & 0x7fff;
        largest = bits > largest ? bits : largest;
    }
    return from_bf16(largest < 0x7f80 ? largest : 0x7fc0);
}

enum { LARGEST = 8191 }; /* |128 h + l|, with |h| <= 64 and -64 <= l <= 63 */

/* Round to nearest without a call: exact for |x| < 2^22. */
INLINE int32_t nearest(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    union { float f; int32_t i; } u = {x + shift}, zero = {shift};
    return u.i - zero.i;
}

/* 8 bf16 numbers times `by`, each rounded to the nearest integer. */
INLINE __m256i scaled(const uint16_t *x, __m256 by) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)), by));
}

INLINE int32_t integers_added_up(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
}

/* One chunk of a row as 14-bit numbers, in the order that products want: of 4 columns 0 2 1 3. For one token in
 * halves, per 4 columns the bytes h0 h2 h1 h3 l0 l2 l1 l3; for more in 16 bits. */
INLINE void quantize_chunk(const uint16_t *x, int64_t chunk, int halves, int8_t *q, float *scale, float *sum) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
                                           0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    const float largest = magnitude(x, chunk);
    const __m256 by = _mm256_set1_ps(largest > 0 ? LARGEST / largest : 0); /* of NaN: 0, and the numbers do not matter */
    __m256i total = _mm256_setzero_si256();
    for (int64_t i = 0; i < chunk; i += 16) {
        const __m256i first = scaled(x + i, by), last = scaled(x + i + 8, by);
        total = _mm256_add_epi32(total, _mm256_add_epi32(first, last));
        __m256i v = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, last), 0xD8);
        v = _mm256_shuffle_epi8(v, order);
        if (halves) {
            const __m256i h = _mm256_srai_epi16(_mm256_add_epi16(v, _mm256_set1_epi16(64)), 7);
            const __m256i l = _mm256_sub_epi16(v, _mm256_slli_epi16(h, 7));
            v = _mm256_shuffle_epi32(_mm256_packs_epi16(h, l), 0xD8);
        }
        _mm256_storeu_si256((__m256i *)(q + 2 * i), v);
    }
    *scale = largest / LARGEST;
    *sum = (float)integers_added_up(total) * *scale;
}

/* --------------------------------------------------------------------------------------------- expert products */

typedef struct {
    int64_t rows, cols, group;       /* padded: rows % 16 == 0, cols % group == 0 */
    int64_t parameters_at, codes_at; /* offsets of this matrix in an expert's parameters and nibbles */
    int64_t half;                    /* bytes of a two-bit plane: where the nibbles' second half begins */
} matrix;

typedef struct {
    const uint8_t *parameters; /* bf16 [groups, rows, 2]: 16 scale and centre */
    const uint8_t *base, *d4, *d8;
    int64_t level; /* 8, 4 or 2: planes above it may be NULL */
    int64_t x, y, tokens; /* the first of its rows of x and of y, and how many */
} expert;

/* Where the nibbles of 4 columns are: the low or high fields of two-bit planes, or nibbles as they are. */
enum kind { BASE_LOW, BASE_HIGH, BOTH_LOW, BOTH_HIGH, PLAIN };

INLINE __m256i nibbles(enum kind kind, const uint8_t *base, const uint8_t *d4, int64_t at) {
    const __m256i low = _mm256_set1_epi8(0x33), high = _mm256_set1_epi8((char)0xCC);
    const __m256i b = _mm256_loadu_si256((const __m256i *)(base + at));
    if (kind == PLAIN) return b;
    const __m256i top =
        kind == BASE_LOW || kind == BOTH_LOW ? _mm256_slli_epi16(_mm256_and_si256(b, low), 2) : _mm256_and_si256(b, high);
    if (kind == BASE_LOW || kind == BASE_HIGH) return top;
    const __m256i d = _mm256_loadu_si256((const __m256i *)(d4 + at));
    return _mm256_or_si256(top, _mm256_and_si256(kind == BOTH_LOW ? d : _mm256_srli_epi16(d, 2), low));
}

typedef struct { __m256i l[4], h[4]; } sums; /* 16-bit, of rows 0-7, 8-15, 16-23, 24-31; two columns' in each half */

/* Bytes of a plane to ask memory for in advance: the processor's own prefetching ends at every page. */
enum { AHEAD = 2048 };

INLINE void prefetch(const uint8_t *line) { _mm_prefetch((const char *)line, _MM_HINT_T0); }

INLINE __m256i four_bytes(const int8_t *x) { return _mm256_castps_si256(_mm256_broadcast_ss((const float *)x)); }

/* Adds n times 4 columns of 32 rows. */
INLINE void steps(enum kind kind, const uint8_t *base, const uint8_t *d4, const int8_t *x, int64_t n, sums *into) {
    const __m256i four = _mm256_set1_epi8(15);
    /* Columns 0 and 2 lie in the lower halves of two loads, 1 and 3 in the upper ones. */
    const __m256i pick = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1,
                                          2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
    sums s = *into;
    for (int64_t i = 0; i < n; i++) {
        prefetch(base + 64 * i + AHEAD);
        if (kind == BOTH_LOW || kind == BOTH_HIGH) prefetch(d4 + 64 * i + AHEAD);
        const __m256i a = nibbles(kind, base, d4, 64 * i), b = nibbles(kind, base, d4, 64 * i + 32);
        const __m256i h = _mm256_shuffle_epi8(four_bytes(x + 8 * i), pick);
        const __m256i l = _mm256_shuffle_epi8(four_bytes(x + 8 * i + 4), pick);
        const __m256i a0 = _mm256_and_si256(a, four), b0 = _mm256_and_si256(b, four);
        const __m256i a1 = _mm256_and_si256(_mm256_srli_epi16(a, 4), four);
        const __m256i b1 = _mm256_and_si256(_mm256_srli_epi16(b, 4), four);
        const __m256i w[4] = {_mm256_unpacklo_epi8(a0, b0), _mm256_unpackhi_epi8(a0, b0),
                              _mm256_unpacklo_epi8(a1, b1), _mm256_unpackhi_epi8(a1, b1)};
        for (int r = 0; r < 4; r++) {
            s.h[r] = _mm256_add_epi16(s.h[r], _mm256_maddubs_epi16(w[r], h));
            s.l[r] = _mm256_add_epi16(s.l[r], _mm256_maddubs_epi16(w[r], l));
        }
    }
    *into = s;
}

/* 32-bit sums of 32 rows, 8 in each. */
INLINE void widen(const sums *s, __m256i out[4]) {
    const __m256i weights = _mm256_set1_epi32(128 << 16 | 1);
    for (int r = 0; r < 4; r++) {
        const __m256i p = _mm256_madd_epi16(_mm256_unpacklo_epi16(s->l[r], s->h[r]), weights);
        const __m256i q = _mm256_madd_epi16(_mm256_unpackhi_epi16(s->l[r], s->h[r]), weights);
        out[r] = _mm256_add_epi32(_mm256_permute2x128_si256(p, q, 0x20), _mm256_permute2x128_si256(p, q, 0x31));
    }
}

/* The two kinds that a stretch of nibbles [at, at + bytes) is made of, and where the first ends. */
INLINE int64_t low_part(const matrix *m, int64_t at, int64_t bytes) {
    const int64_t low = m->half - at;
    return low < 0 ? 0 : low > bytes ? bytes : low;
}

INLINE void code_sums(const matrix *m, const expert *e, int64_t at, const int8_t *x, int64_t n, __m256i out[4]) {
    sums s;
    memset(&s, 0, sizeof s);
    const int64_t low = low_part(m, at, 64 * n) / 64;
    const uint8_t *base = e->base + at, *d4 = e->d4 + at;
    const uint8_t *base_high = e->base + at - m->half + 64 * low, *d4_high = e->d4 + at - m->half + 64 * low;
    if (e->level == 2) {
        if (low) steps(BASE_LOW, base, NULL, x, low, &s);
        if (low < n) steps(BASE_HIGH, base_high, NULL, x + 8 * low, n - low, &s);
    } else {
        if (low) steps(BOTH_LOW, base, d4, x, low, &s);
        if (low < n) steps(BOTH_HIGH, base_high, d4_high, x + 8 * low, n - low, &s);
    }
    widen(&s, out);
    if (e->level != 8) return;
    __m256i fine[4];
    memset(&s, 0, sizeof s);
    steps(PLAIN, e->d8 + at, NULL, x, n, &s);
    widen(&s, fine);
    for (int r = 0; r < 4; r++) out[r] = _mm256_add_epi32(_mm256_slli_epi32(out[r], 4), fine[r]);
}

/* What stands for the integer 0 of each level, in units of 16 scale (storage/planes.py). */
INLINE float zero_of(int64_t level) { return level == 8 ? -8.46875f : level == 4 ? -8.0f : -6.5f; }

/* One token's 32 rows from `block`; its chunks lie `stride` apart in x, scale and sum. */
AVX2 static void block_32(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                          const float *scale, const float *sum, int64_t stride, uint16_t *y) {
    const float unit = e->level == 8 ? 1 / 16.0f : 1, zero = zero_of(e->level);
    const __m256i upper = _mm256_set1_epi32((int32_t)0xFFFF0000);
    const int64_t at = m->codes_at + block * m->cols * 16;
    __m256 total[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t c = 0; c < m->cols / chunk; c++) {
        __m256i codes[4];
        code_sums(m, e, at + c * chunk * 16, x + 2 * c * chunk * stride, chunk / 4, codes);
        const uint8_t *pairs = e->parameters + m->parameters_at + (c * chunk / m->group * m->rows + block * 32) * 4;
        prefetch(pairs + 2 * m->rows * 4); /* two groups on, in another page */
        prefetch(pairs + 2 * m->rows * 4 + 64);
        const __m256 by = _mm256_set1_ps(unit * scale[c * stride]), all = _mm256_set1_ps(sum[c * stride]);
        const __m256 shift = _mm256_set1_ps(zero * sum[c * stride]);
        for (int r = 0; r < 4; r++) {
            const __m256i pair = _mm256_loadu_si256((const __m256i *)(pairs + 32 * r));
            const __m256 step = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
            const __m256 centre = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
            total[r] = _mm256_fmadd_ps(step, _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes[r]), by, shift), total[r]);
            total[r] = _mm256_fmadd_ps(centre, all, total[r]);
        }
    }
    float out[32];
    for (int r = 0; r < 4; r++) _mm256_storeu_ps(out + 8 * r, total[r]);
    for (int r = 0; r < 32; r++) y[r] = to_bf16(out[r]);
}

enum { TOKENS = 64, SIDE_BY_SIDE = 4 }; /* most tokens that one pass over weights serves, and that registers do */

/* The codes of 32 rows of a chunk, two columns of a row side by side: 0 and 2, 1 and 3, 4 and 6, ... */
enum { CHUNK = 64, TILE = CHUNK * 32, OF_ROWS = 32 };

INLINE void join(enum kind kind, int level, const uint8_t *base, const uint8_t *d4, const uint8_t *d8, uint8_t *tile) {
    const __m256i four = _mm256_set1_epi8(15), upper = _mm256_set1_epi8((char)0xF0);
    prefetch(base + AHEAD);
    if (level > 2) prefetch(d4 + AHEAD);
    if (level > 4) prefetch(d8 + AHEAD);
    __m256i low[2], high[2];
    for (int i = 0; i < 2; i++) {
        const __m256i n = nibbles(kind, base, d4, 32 * i);
        low[i] = _mm256_and_si256(n, four);
        high[i] = _mm256_and_si256(_mm256_srli_epi16(n, 4), four);
        if (level == 8) {
            const __m256i f = _mm256_loadu_si256((const __m256i *)(d8 + 32 * i));
            low[i] = _mm256_or_si256(_mm256_slli_epi16(low[i], 4), _mm256_and_si256(f, four));
            high[i] = _mm256_or_si256(_mm256_and_si256(n, upper), _mm256_and_si256(_mm256_srli_epi16(f, 4), four));
        }
    }
    for (int i = 0; i < 2; i++) {
        const __m256i *half = i ? high : low;
        const __m256i first = _mm256_unpacklo_epi8(half[0], half[1]), last = _mm256_unpackhi_epi8(half[0], half[1]);
        _mm256_store_si256((__m256i *)tile + i, _mm256_permute2x128_si256(first, last, 0x20));
        _mm256_store_si256((__m256i *)tile + 2 + i, _mm256_permute2x128_si256(first, last, 0x31));
    }
}

INLINE void join_32(const matrix *m, const expert *e, int64_t at, int64_t n, uint8_t *tile) {
    for (int64_t i = 0; i < n; i++, at += 64, tile += 4 * OF_ROWS) {
        const int low = at < m->half;
        const int64_t place = low ? at : at - m->half;
        const uint8_t *base = e->base + place, *d4 = e->d4 + place, *d8 = e->d8 + at;
        if (e->level == 2) {
            if (low) join(BASE_LOW, 2, base, NULL, NULL, tile);
            else join(BASE_HIGH, 2, base, NULL, NULL, tile);
        } else if (e->level == 4) {
            if (low) join(BOTH_LOW, 4, base, d4, NULL, tile);
            else join(BOTH_HIGH, 4, base, d4, NULL, tile);
        } else if (low) join(BOTH_LOW, 8, base, d4, d8, tile);
        else join(BOTH_HIGH, 8, base, d4, d8, tile);
    }
}

/* The same of a matrix's last 16 rows, which the layout pairs as neighbours. Rare, so plain. */
AVX2 static void join_16(const matrix *m, const expert *e, int64_t at, int64_t n, uint8_t *tile) {
    for (int64_t k = 0; k < 4 * n; k++)
        for (int64_t r = 0; r < 16; r++) {
            const int64_t byte = at + k * 8 + r / 2, place = byte < m->half ? byte : byte - m->half;
            const int32_t base = e->base[place], d4 = e->level > 2 ? e->d4[place] : 0, shift = 4 * (r & 1);
            const int32_t both = byte < m->half ? (base & 0x33) << 2 | (d4 & 0x33) : (base & 0xCC) | (d4 >> 2 & 0x33);
            int32_t code = both >> shift & 15;
            if (e->level == 8) code = code << 4 | (e->d8[byte] >> shift & 15);
            tile[(k / 4 * 4 + k % 2 * 2) * OF_ROWS + 2 * r + k / 2 % 2] = (uint8_t)code;
        }
}

/* What turns a chunk's integers into its share of 8 rows' results. */
typedef struct { __m256 step, centre; } affine;

/* Adds a chunk's share of 16 rows of `tokens` tokens, whose numbers lie 2 * chunk bytes apart. */
INLINE void tile_products(const uint8_t *tile, const int8_t *x, int64_t chunk, int tokens, float unit, float zero,
                          const float *scale, const float *sum, const affine *rows, float *total) {
    __m256i codes[2][SIDE_BY_SIDE];
    for (int t = 0; t < tokens; t++) codes[0][t] = codes[1][t] = _mm256_setzero_si256();
    for (int64_t i = 0; i < chunk / 2; i++, tile += 2 * OF_ROWS, x += 4) {
        const __m256i upper = _mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)tile));
        const __m256i lower = _mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)tile + 1));
        for (int t = 0; t < tokens; t++) {
            const __m256i v = four_bytes(x + 2 * t * chunk);
            codes[0][t] = _mm256_add_epi32(codes[0][t], _mm256_madd_epi16(upper, v));
            codes[1][t] = _mm256_add_epi32(codes[1][t], _mm256_madd_epi16(lower, v));
        }
    }
    for (int t = 0; t < tokens; t++) {
        const __m256 by = _mm256_set1_ps(unit * scale[t]), all = _mm256_set1_ps(sum[t]);
        const __m256 shift = _mm256_set1_ps(zero * sum[t]);
        for (int r = 0; r < 2; r++) {
            float *into = total + t * OF_ROWS + 8 * r;
            const __m256 share = _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes[r][t]), by, shift);
            const __m256 so_far = _mm256_fmadd_ps(rows[r].step, share, _mm256_load_ps(into));
            _mm256_store_ps(into, _mm256_fmadd_ps(rows[r].centre, all, so_far));
        }
    }
}

/* Up to 64 tokens' rows from `block`: 32, or the matrix's last 16. x, scale and sum as in block_32. */
AVX2 static void block_of_tokens(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                                 const float *scale, const float *sum, int64_t stride, int64_t tokens, uint16_t *y) {
    _Alignas(32) uint8_t tile[TILE];
    _Alignas(32) float total[TOKENS * OF_ROWS];
    const float unit = e->level == 8 ? 1 / 16.0f : 1, zero = zero_of(e->level);
    const __m256i upper = _mm256_set1_epi32((int32_t)0xFFFF0000);
    const int64_t rows = m->rows - block * 32 < 32 ? 16 : 32, at = m->codes_at + block * m->cols * 16;
    memset(total, 0, sizeof *total * (size_t)(tokens * OF_ROWS));
    for (int64_t c = 0; c < m->cols / chunk; c++) {
        if (rows == 32) join_32(m, e, at + c * chunk * 16, chunk / 4, tile);
        else join_16(m, e, at + c * chunk * 8, chunk / 4, tile);
        const uint8_t *pairs = e->parameters + m->parameters_at + (c * chunk / m->group * m->rows + block * 32) * 4;
        for (int64_t r = 0; r < rows; r += 16) {
            affine both[2];
            for (int i = 0; i < 2; i++) {
                const __m256i pair = _mm256_loadu_si256((const __m256i *)(pairs + 4 * r + 32 * i));
                both[i].step = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
                both[i].centre = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
            }
            int64_t now;
            for (int64_t t = 0; t < tokens; t += now) {
                const int64_t left = tokens - t, first = c * stride + t;
                now = left / ((left + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE);
                const int8_t *from = x + 2 * first * chunk;
                float *into = total + t * OF_ROWS + r;
                /* One loop for each count, which has its sums in registers. */
                switch (now) {
                case 1: tile_products(tile + 2 * r, from, chunk, 1, unit, zero, scale + first, sum + first, both, into); break;
                case 2: tile_products(tile + 2 * r, from, chunk, 2, unit, zero, scale + first, sum + first, both, into); break;
                case 3: tile_products(tile + 2 * r, from, chunk, 3, unit, zero, scale + first, sum + first, both, into); break;
                default: tile_products(tile + 2 * r, from, chunk, 4, unit, zero, scale + first, sum + first, both, into);
                }
            }
        }
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) y[t * m->rows + r] = to_bf16(total[t * OF_ROWS + r]);
}

typedef struct {
    const matrix *m;
    const expert *experts;
    int64_t chunk, tokens;    /* of x in all */
    const uint16_t *from;
    const uint8_t *halves;    /* [tokens]: whether quantized for block_32 */
    int8_t *x;                /* [chunks, tokens, 2 chunk] */
    float *scale, *sum;       /* [chunks, tokens] */
    uint16_t *y;
} product_job;

enum { QUANTIZED_TOGETHER = 8 };

AVX2 static void quantize_task(void *argument, int64_t task) {
    const product_job *job = argument;
    const int64_t cols = job->m->cols, chunk = job->chunk, from = task * QUANTIZED_TOGETHER;
    const int64_t end = from + QUANTIZED_TOGETHER < job->tokens ? from + QUANTIZED_TOGETHER : job->tokens;
    for (int64_t t = from; t < end; t++)
        for (int64_t c = 0; c < cols / chunk; c++) {
            const int64_t to = c * job->tokens + t;
            quantize_chunk(job->from + t * cols + c * chunk, chunk, job->halves[t], job->x + 2 * to * chunk,
                           job->scale + to, job->sum + to);
        }
}

AVX2 static void product_task(void *argument, int64_t task) {
    const product_job *job = argument;
    const matrix *m = job->m;
    const int64_t blocks = (m->rows + 31) / 32, block = task % blocks;
    const expert *e = job->experts + task / blocks;
    for (int64_t t = 0; t < e->tokens; t += TOKENS) {
        const int64_t row = e->x + t, now = e->tokens - t < TOKENS ? e->tokens - t : TOKENS;
        const int8_t *x = job->x + 2 * row * job->chunk;
        uint16_t *y = job->y + (e->y + t) * m->rows + block * 32;
        if (job->halves[row]) block_32(m, e, block, job->chunk, x, job->scale + row, job->sum + row, job->tokens, y);
        else block_of_tokens(m, e, block, job->chunk, x, job->scale + row, job->sum + row, job->tokens, now, y);
    }
}

static void *grown(pool *p, size_t bytes) {
    if (bytes > p->scratch_bytes) {
        free(p->scratch);
        p->scratch = malloc(bytes);
        p->scratch_bytes = p->scratch ? bytes : 0;
    }
    return p->scratch;
}

static int no_memory(pool *p) {
    pthread_mutex_unlock(&p->caller);
    return -1;
}

/* Each expert's rows of y [.., rows] = its matrix times its rows of x [tokens, cols], both bf16.
 * Returns 0, or -1 where there is no memory. */
AVX2 int edgemoe_expert_product(pool *p, const matrix *m, const expert *experts, int64_t count, const uint16_t *x,
                                int64_t tokens, uint16_t *y) {
    const int64_t chunk = m->group < CHUNK ? m->group : CHUNK, chunks = m->cols / chunk;
    pthread_mutex_lock(&p->caller);
    float *scale = grown(p, (size_t)(tokens * (2 * m->cols + 8 * chunks + 1)));
    if (!scale) return no_memory(p);
    float *sum = scale + tokens * chunks;
    int8_t *q = (int8_t *)(sum + tokens * chunks);
    uint8_t *halves = (uint8_t *)q + 2 * tokens * m->cols;
    for (int64_t i = 0; i < count; i++) {
        const int alone = experts[i].tokens == 1 && m->rows % 32 == 0;
        memset(halves + experts[i].x, alone, (size_t)experts[i].tokens);
    }
    product_job job = {m, experts, chunk, tokens, x, halves, q, scale, sum, y};
    run(p, quantize_task, &job, (tokens + QUANTIZED_TOGETHER - 1) / QUANTIZED_TOGETHER);
    run(p, product_task, &job, count * ((m->rows + 31) / 32));
    pthread_mutex_unlock(&p->caller);
    return 0;
}

/* ---------------------------------------------------------------------------------------------- dense products */

typedef struct {
    const void *weight;
    const uint16_t *row_scale; /* bf16, of int8 rows; NULL: the weight is bf16 */
    int64_t rows, cols, tokens;
    const void *x;          /* int16 of quantize_dense, or float */
    const float *x_scale;
    uint16_t *y;
} dense_job;

enum { DENSE_ROWS = 32, DENSE_CHUNK = 256 };

/* One row of x as 16-bit numbers with a scale per DENSE_CHUNK columns. */
AVX2 static void quantize_dense(const uint16_t *x, int64_t cols, int16_t *q, float *scale) {
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK) {
        const int64_t end = from + DENSE_CHUNK < cols ? from + DENSE_CHUNK : cols;
        const float largest = magnitude(x + from, end - from);
        const float inverse = largest > 0 ? 32767 / largest : 0;
        *scale++ = largest / 32767;
        for (int64_t i = from; i < end; i++) q[i] = (int16_t)nearest(from_bf16(x[i]) * inverse);
    }
}

INLINE __m256i int8_products(const int8_t *w, const int16_t *x) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
    return _mm256_madd_epi16(wide, _mm256_loadu_si256((const __m256i *)x));
}

INLINE float int8_row(const int8_t *w, const int16_t *x, const float *scale, int64_t cols) {
    __m256 total = _mm256_setzero_ps();
    float rest = 0;
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = from + DENSE_CHUNK < cols ? from + DENSE_CHUNK : cols;
        __m256i a = _mm256_setzero_si256(), b = a;
        int64_t k = from;
        for (; k + 64 <= end; k += 64) {
            prefetch((const uint8_t *)w + k + AHEAD);
            a = _mm256_add_epi32(a, int8_products(w + k, x + k));
            b = _mm256_add_epi32(b, int8_products(w + k + 16, x + k + 16));
            a = _mm256_add_epi32(a, int8_products(w + k + 32, x + k + 32));
            b = _mm256_add_epi32(b, int8_products(w + k + 48, x + k + 48));
        }
        for (; k + 16 <= end; k += 16) a = _mm256_add_epi32(a, int8_products(w + k, x + k));
        total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(a, b)), _mm256_set1_ps(*scale), total);
        int32_t left = 0;
        for (; k < end; k++) left += w[k] * x[k];
        rest += (float)left * *scale;
    }
    return added_up(total) + rest;
}

INLINE float bf16_row(const uint16_t *w, const float *x, int64_t cols) {
    __m256 a = _mm256_setzero_ps(), b = a;
    int64_t k = 0;
    for (; k + 16 <= cols; k += 16) {
        prefetch((const uint8_t *)(w + k) + AHEAD);
        const __m256i w0 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k)));
        const __m256i w1 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k + 8)));
        a = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w0, 16)), _mm256_loadu_ps(x + k), a);
        b = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w1, 16)), _mm256_loadu_ps(x + k + 8), b);
    }
    float rest = 0;
    for (; k < cols; k++) rest += from_bf16(w[k]) * x[k];
    return added_up(_mm256_add_ps(a, b)) + rest;
}

/* 2 rows times 4 tokens, whose numbers and scales lie `cols` and `chunks` apart: what int8_row gives for each, bit for
 * bit, with the rows' numbers widened once. cols % 16 == 0. */
AVX2 static void int8_tile(const int8_t *w, const int16_t *x, const float *scale, int64_t cols, int64_t chunks,
                           float out[2][4]) {
    __m256 total[2][4];
    for (int t = 0; t < 4; t++) total[0][t] = total[1][t] = _mm256_setzero_ps();
    for (int64_t from = 0; from < cols; from += DENSE_CHUNK, scale++) {
        const int64_t end = from + DENSE_CHUNK < cols ? from + DENSE_CHUNK : cols;
        __m256i sum[2][4];
        for (int t = 0; t < 4; t++) sum[0][t] = sum[1][t] = _mm256_setzero_si256();
        for (int64_t k = from; k < end; k += 16) {
            const __m256i upper = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + k)));
            const __m256i lower = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + cols + k)));
            for (int t = 0; t < 4; t++) {
                const __m256i v = _mm256_loadu_si256((const __m256i *)(x + t * cols + k));
                sum[0][t] = _mm256_add_epi32(sum[0][t], _mm256_madd_epi16(upper, v));
                sum[1][t] = _mm256_add_epi32(sum[1][t], _mm256_madd_epi16(lower, v));
            }
        }
        for (int t = 0; t < 4; t++)
            for (int r = 0; r < 2; r++)
                total[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][t]), _mm256_set1_ps(scale[t * chunks]), total[r][t]);
    }
    for (int t = 0; t < 4; t++)
        for (int r = 0; r < 2; r++) out[r][t] = added_up(total[r][t]);
}

/* A row times 4 tokens, bit for bit what bf16_row gives for each. cols % 16 == 0. */
AVX2 static void bf16_tile(const uint16_t *w, const float *x, int64_t cols, float out[4]) {
    __m256 a[4], b[4];
    for (int t = 0; t < 4; t++) a[t] = b[t] = _mm256_setzero_ps();
    for (int64_t k = 0; k < cols; k += 16) {
        prefetch((const uint8_t *)(w + k) + AHEAD);
        const __m256i w0 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k)));
        const __m256i w1 = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k + 8)));
        const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(w0, 16));
        const __m256 last = _mm256_castsi256_ps(_mm256_slli_epi32(w1, 16));
        for (int t = 0; t < 4; t++) {
            a[t] = _mm256_fmadd_ps(first, _mm256_loadu_ps(x + t * cols + k), a[t]);
            b[t] = _mm256_fmadd_ps(last, _mm256_loadu_ps(x + t * cols + k + 8), b[t]);
        }
    }
    for (int t = 0; t < 4; t++) out[t] = added_up(_mm256_add_ps(a[t], b[t]));
}

INLINE void int8_products_of(const dense_job *job, int64_t row, int64_t rows, int64_t t, int64_t tokens) {
    const int64_t cols = job->cols, chunks = (cols + DENSE_CHUNK - 1) / DENSE_CHUNK;
    const int8_t *w = (const int8_t *)job->weight + row * cols;
    const int16_t *x = (const int16_t *)job->x + t * cols;
    float out[2][4];
    if (rows == 2) int8_tile(w, x, job->x_scale + t * chunks, cols, chunks, out);
    else out[0][0] = int8_row(w, x, job->x_scale + t * chunks, cols);
    for (int64_t i = 0; i < rows; i++) {
        const float scale = from_bf16(job->row_scale[row + i]);
        for (int64_t j = 0; j < tokens; j++) job->y[(t + j) * job->rows + row + i] = to_bf16(scale * out[i][j]);
    }
}

INLINE void bf16_products_of(const dense_job *job, int64_t row, int64_t t, int64_t tokens) {
    const uint16_t *w = (const uint16_t *)job->weight + row * job->cols;
    const float *x = (const float *)job->x + t * job->cols;
    float out[4];
    if (tokens == 4) bf16_tile(w, x, job->cols, out);
    else out[0] = bf16_row(w, x, job->cols);
    for (int64_t j = 0; j < tokens; j++) job->y[(t + j) * job->rows + row] = to_bf16(out[j]);
}

AVX2 static void dense_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t from = task * DENSE_ROWS;
    const int64_t end = from + DENSE_ROWS < job->rows ? from + DENSE_ROWS : job->rows;
    /* What goes four tokens, and of int8 two rows, at a time. */
    const int64_t tokens = job->cols % 16 ? 0 : job->tokens / 4 * 4;
    const int64_t rows = job->row_scale ? from + (end - from) / 2 * 2 : end;
    for (int64_t t = 0; t < tokens; t += 4)
        for (int64_t row = from; row < rows; row += job->row_scale ? 2 : 1)
            if (job->row_scale) int8_products_of(job, row, 2, t, 4);
            else bf16_products_of(job, row, t, 4);
    for (int64_t row = from; row < end; row++)
        for (int64_t t = row < rows ? tokens : 0; t < job->tokens; t++)
            if (job->row_scale) int8_products_of(job, row, 1, t, 1);
            else bf16_products_of(job, row, t, 1);
}

/* y [tokens, rows] = x [tokens, cols] W^T, x and y bf16; W is int8 with a scale per row, or bf16 where
 * row_scale is NULL. Returns 0, or -1 where there is no memory. */
AVX2 int edgemoe_dense_product(pool *p, const void *weight, const uint16_t *row_scale, int64_t rows, int64_t cols,
                               const uint16_t *x, int64_t tokens, uint16_t *y) {
    const int64_t chunks = (cols + DENSE_CHUNK - 1) / DENSE_CHUNK, most = tokens < TOKENS ? tokens : TOKENS;
    pthread_mutex_lock(&p->caller);
    float *scale = grown(p, (size_t)most * 4 * (size_t)(chunks + cols));
    if (!scale) return no_memory(p);
    void *q = scale + most * chunks;
    for (int64_t now; tokens > 0; tokens -= now, x += now * cols, y += now * rows) {
        now = tokens < most ? tokens : most;
        for (int64_t t = 0; t < now; t++)
            if (row_scale) quantize_dense(x + t * cols, cols, (int16_t *)q + t * cols, scale + t * chunks);
            else for (int64_t i = 0; i < cols; i++) ((float *)q)[t * cols + i] = from_bf16(x[t * cols + i]);
        dense_job job = {weight, row_scale, rows, cols, now, q, scale, y};
        run(p, dense_task, &job, (rows + DENSE_ROWS - 1) / DENSE_ROWS);
    }
    pthread_mutex_unlock(&p->caller);
    return 0;
}

/* --------------------------------------------------------------------------------------------------------- norms */

/* y = weight * bf16(x / sqrt(mean(x^2) + epsilon)), all bf16 [rows, cols], rounded where transformers rounds. */
AVX2 void edgemoe_rms_norm(const uint16_t *x, const uint16_t *weight, float epsilon, int64_t rows, int64_t cols,
                           uint16_t *y) {
    for (; rows-- > 0; x += cols, y += cols) {
        float lanes[8] = {0};
        int64_t k = 0;
        for (; k + 8 <= cols; k += 8)
            for (int j = 0; j < 8; j++) lanes[j] += from_bf16(x[k + j]) * from_bf16(x[k + j]);
        for (; k < cols; k++) lanes[0] += from_bf16(x[k]) * from_bf16(x[k]);
        const float sum = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
        const float by = 1 / __builtin_sqrtf(sum / (float)cols + epsilon);
        for (k = 0; k < cols; k++) y[k] = to_bf16(from_bf16(weight[k]) * from_bf16(to_bf16(from_bf16(x[k]) * by)));
    }
}

/* ------------------------------------------------------------------------------------------------ life and death */

int edgemoe_supported_2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

void edgemoe_close(pool *p) {
    if (!p) return;
    p->stop = 1;
    announce(p);
    for (int i = 0; i < p->threads - 1; i++) pthread_join(p->workers[i], NULL);
    pthread_mutex_destroy(&p->caller);
    pthread_mutex_destroy(&p->mutex);
    pthread_cond_destroy(&p->wake);
    free(p->workers);
    free(p->scratch);
    free(p);
}

void edgemoe_run(pool *p, task_fn fn, void *job, int64_t tasks) {
    pthread_mutex_lock(&p->caller);
    run(p, fn, job, tasks);
    pthread_mutex_unlock(&p->caller);
}

/* NULL where there is no memory or no thread to be had. */
pool *edgemoe_open(int threads) {
    pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    pthread_mutex_init(&p->caller, NULL);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->threads = 1;
    while (p->workers && p->threads < threads) {
        if (pthread_create(&p->workers[p->threads - 1], NULL, worker, p)) break;
        p->threads++;
    }
    if (p->threads == threads) return p;
    edgemoe_close(p);
    return NULL;
}
#else
int edgemoe_supported_2(void) { return 0; }
#endif
