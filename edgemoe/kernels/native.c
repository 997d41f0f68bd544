/* Products with quantized weights on a CPU with AVX2, read as the planes lie, by threads of its own.
 *
 * Loaded with ctypes (native.py); no Python.h, so that a C compiler is all that building it takes. Where this
 * file cannot be compiled, or the processor has no AVX2, torch's operators do the same work (cpu.py).
 *
 * An expert's codes lie in layout cpu-avx2 (storage/layout.py): blocks of 32 rows, per column 16 bytes, rows d
 * and d + 16 in byte d. What is multiplied is an integer: activations are turned into 14-bit numbers 128 h + l
 * with a scale per chunk of at most 64 columns, so that both halves times a nibble add up in 16 bits over a
 * chunk: 16 steps * 2 products * 15 * 64 = 30720. The rounding that adds is some 1/16384 of a chunk's largest
 * activation, below that of a bf16 number's own.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define INLINE static inline __attribute__((always_inline)) AVX2

/* ---------------------------------------------------------------------------------------------------- threads */

typedef void (*task_fn)(void *job, int64_t task);

typedef struct {
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
} pool;

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

INLINE float from_bf16(uint16_t bits) {
    union { uint32_t i; float f; } u = {(uint32_t)bits << 16};
    return u.f;
}

INLINE uint16_t to_bf16(float x) {
    union { float f; uint32_t i; } u = {x};
    const uint32_t rounded = (u.i + 0x7fff + (u.i >> 16 & 1)) >> 16, nan = u.i >> 16 | 0x40;
    return (uint16_t)((u.i & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

/* Round to nearest without a call: exact for |x| < 2^22. */
INLINE int32_t nearest(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    union { float f; int32_t i; } u = {x + shift}, zero = {shift};
    return u.i - zero.i;
}

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

/* One row of x as 14-bit numbers: per 4 columns the bytes h0 h2 h1 h3 l0 l2 l1 l3, the order `steps` wants. */
AVX2 static void quantize_row(const uint16_t *x, int64_t cols, int64_t chunk, int8_t *q, float *scale, float *sum) {
    for (int64_t c = 0; c < cols / chunk; c++, x += chunk) {
        const float largest = magnitude(x, chunk);
        const float inverse = largest > 0 ? LARGEST / largest : 0; /* of NaN: 0, and the numbers do not matter */
        scale[c] = largest / LARGEST;
        uint32_t total = 0;
        for (int64_t i = 0; i < chunk; i += 4, q += 8) {
            static const int place[4] = {0, 2, 1, 3};
            for (int j = 0; j < 4; j++) {
                const int32_t v = nearest(from_bf16(x[i + j]) * inverse);
                const int32_t h = (v + 64) >> 7;
                total += (uint32_t)v;
                q[place[j]] = (int8_t)h;
                q[4 + place[j]] = (int8_t)(v - (h << 7));
            }
        }
        sum[c] = (float)(int32_t)total * scale[c];
    }
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

/* One token's 32 rows from `block`. */
AVX2 static void block_32(const matrix *m, const expert *e, int64_t block, int64_t chunk, const int8_t *x,
                          const float *scale, const float *sum, uint16_t *y) {
    const float unit = e->level == 8 ? 1 / 16.0f : 1, zero = zero_of(e->level);
    const __m256i upper = _mm256_set1_epi32((int32_t)0xFFFF0000);
    const int64_t at = m->codes_at + block * m->cols * 16;
    __m256 total[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t c = 0; c < m->cols / chunk; c++) {
        __m256i codes[4];
        code_sums(m, e, at + c * chunk * 16, x + 2 * c * chunk, chunk / 4, codes);
        const uint8_t *pairs = e->parameters + m->parameters_at + (c * chunk / m->group * m->rows + block * 32) * 4;
        prefetch(pairs + 2 * m->rows * 4); /* two groups on, in another page */
        prefetch(pairs + 2 * m->rows * 4 + 64);
        const __m256 by = _mm256_set1_ps(unit * scale[c]), all = _mm256_set1_ps(sum[c]);
        const __m256 shift = _mm256_set1_ps(zero * sum[c]);
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

/* The code of one weight at the expert's level, as code_sums adds it up. */
INLINE int32_t code_at(const matrix *m, const expert *e, int64_t at, int high) {
    const int64_t place = at < m->half ? at : at - m->half;
    const int second = at >= m->half;
    const int32_t base = e->base[place], d4 = e->level > 2 ? e->d4[place] : 0;
    const int32_t byte = second ? (base & 0xCC) | (d4 >> 2 & 0x33) : (base & 0x33) << 2 | (d4 & 0x33);
    const int32_t nibble = byte >> (4 * high) & 15;
    return e->level == 8 ? nibble << 4 | (e->d8[at] >> (4 * high) & 15) : nibble;
}

/* One token's last 16 rows, which the layout pairs as neighbours. Rare, so plain. */
AVX2 static void last_16(const matrix *m, const expert *e, int64_t chunk, const int8_t *x, const float *scale,
                         const float *sum, uint16_t *y) {
    static const int place[4] = {0, 2, 1, 3};
    const float unit = e->level == 8 ? 1 / 16.0f : 1;
    const int64_t first = m->rows - 16, at = m->codes_at + first * m->cols / 2;
    for (int64_t r = 0; r < 16; r++) {
        float total = 0;
        for (int64_t c = 0; c < m->cols / chunk; c++) {
            int32_t codes = 0;
            for (int64_t k = c * chunk; k < (c + 1) * chunk; k++) {
                const int8_t *q = x + k / 4 * 8 + place[k % 4];
                codes += code_at(m, e, at + k * 8 + r / 2, (int)(r & 1)) * (128 * q[0] + q[4]);
            }
            const uint16_t *pair =
                (const uint16_t *)(e->parameters + m->parameters_at) + (c * chunk / m->group * m->rows + first + r) * 2;
            total += from_bf16(pair[0]) * ((float)codes * (unit * scale[c]) + zero_of(e->level) * sum[c]);
            total += from_bf16(pair[1]) * sum[c];
        }
        y[first + r] = to_bf16(total);
    }
}

typedef struct {
    const matrix *m;
    const expert *experts;
    int64_t chunk;
    const int8_t *x;
    const float *scale, *sum;
    uint16_t *y;
} product_job;

AVX2 static void product_task(void *argument, int64_t task) {
    const product_job *job = argument;
    const matrix *m = job->m;
    const int64_t blocks = (m->rows + 31) / 32, block = task % blocks, chunks = m->cols / job->chunk;
    const expert *e = job->experts + task / blocks;
    for (int64_t t = 0; t < e->tokens; t++) {
        const int64_t row = e->x + t;
        const int8_t *x = job->x + row * m->cols * 2;
        const float *scale = job->scale + row * chunks, *sum = job->sum + row * chunks;
        uint16_t *y = job->y + (e->y + t) * m->rows;
        if (block * 32 + 32 <= m->rows) block_32(m, e, block, job->chunk, x, scale, sum, y + block * 32);
        else last_16(m, e, job->chunk, x, scale, sum, y);
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
    const int64_t chunk = m->group < 64 ? m->group : 64, chunks = m->cols / chunk;
    pthread_mutex_lock(&p->caller);
    int8_t *q = grown(p, (size_t)(tokens * (2 * m->cols + 8 * chunks)));
    if (!q) return no_memory(p);
    float *scale = (float *)(q + tokens * m->cols * 2), *sum = scale + tokens * chunks;
    for (int64_t t = 0; t < tokens; t++)
        quantize_row(x + t * m->cols, m->cols, chunk, q + t * m->cols * 2, scale + t * chunks, sum + t * chunks);
    product_job job = {m, experts, chunk, q, scale, sum, y};
    run(p, product_task, &job, count * ((m->rows + 31) / 32));
    pthread_mutex_unlock(&p->caller);
    return 0;
}

/* ------------------------------------------------------------------------------------------------ dequantizing */

typedef struct {
    const matrix *m;
    const expert *e;
    float *out;
} weights_job;

INLINE void store_rows(float *out, __m128i codes, const float *step, const float *zero) {
    _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)), _mm256_loadu_ps(step),
                                          _mm256_loadu_ps(zero)));
    _mm256_storeu_ps(out + 8, _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8))),
                                              _mm256_loadu_ps(step + 8), _mm256_loadu_ps(zero + 8)));
}

enum { TILE = 8 }; /* blocks of rows whose columns are written side by side: 1 KiB each, all in one page */

/* One group of columns, of every row. */
AVX2 static void weights_task(void *argument, int64_t g) {
    const weights_job *job = argument;
    const matrix *m = job->m;
    const expert *e = job->e;
    const uint16_t *pairs = (const uint16_t *)(e->parameters + m->parameters_at) + g * m->rows * 2;
    const float unit = e->level == 8 ? 1 / 16.0f : 1;
    const __m128i low = _mm_set1_epi8(0x33), high = _mm_set1_epi8((char)0xCC), four = _mm_set1_epi8(15);
    for (int64_t tile = 0; tile < m->rows / 32; tile += TILE) {
        const int64_t end = tile + TILE < m->rows / 32 ? tile + TILE : m->rows / 32;
        float steps[TILE * 32], zeros[TILE * 32];
        for (int64_t r = 0; r < (end - tile) * 32; r++) {
            const float s = from_bf16(pairs[(tile * 32 + r) * 2]);
            steps[r] = s * unit;
            zeros[r] = from_bf16(pairs[(tile * 32 + r) * 2 + 1]) + s * zero_of(e->level);
        }
        for (int64_t i = 0; i < m->group * (end - tile); i++) {
            const int64_t k = g * m->group + i / (end - tile), block = tile + i % (end - tile);
            const float *step = steps + (block - tile) * 32, *zero = zeros + (block - tile) * 32;
            const int64_t at = m->codes_at + (block * m->cols + k) * 16;
            const int second = at >= m->half;
            const int64_t place = second ? at - m->half : at;
            const __m128i b = _mm_loadu_si128((const __m128i *)(e->base + place));
            __m128i n = second ? _mm_and_si128(b, high) : _mm_slli_epi16(_mm_and_si128(b, low), 2);
            if (e->level > 2) {
                const __m128i d = _mm_loadu_si128((const __m128i *)(e->d4 + place));
                n = _mm_or_si128(n, _mm_and_si128(second ? _mm_srli_epi16(d, 2) : d, low));
            }
            __m128i first = _mm_and_si128(n, four), last = _mm_and_si128(_mm_srli_epi16(n, 4), four);
            if (e->level == 8) {
                const __m128i f = _mm_loadu_si128((const __m128i *)(e->d8 + at));
                first = _mm_or_si128(_mm_slli_epi16(first, 4), _mm_and_si128(f, four));
                last = _mm_or_si128(_mm_slli_epi16(last, 4), _mm_and_si128(_mm_srli_epi16(f, 4), four));
            }
            float *out = job->out + k * m->rows + block * 32;
            store_rows(out, first, step, zero);
            store_rows(out + 16, last, step + 16, zero + 16);
        }
    }
    if (m->rows % 32 == 0) return;
    const int64_t from = m->rows - 16, at = m->codes_at + from * m->cols / 2;
    for (int64_t k = g * m->group; k < (g + 1) * m->group; k++)
        for (int64_t r = 0; r < 16; r++) {
            const float s = from_bf16(pairs[(from + r) * 2]), z = from_bf16(pairs[(from + r) * 2 + 1]);
            const int32_t code = code_at(m, e, at + k * 8 + r / 2, (int)(r & 1));
            job->out[k * m->rows + from + r] = (float)code * (s * unit) + (z + s * zero_of(e->level));
        }
}

/* out float [cols, rows]: one expert's matrix at its level, transposed. */
void edgemoe_expert_weights(pool *p, const matrix *m, const expert *e, float *out) {
    weights_job job = {m, e, out};
    pthread_mutex_lock(&p->caller);
    run(p, weights_task, &job, m->cols / m->group);
    pthread_mutex_unlock(&p->caller);
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

INLINE float added_up(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
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

AVX2 static void dense_task(void *argument, int64_t task) {
    const dense_job *job = argument;
    const int64_t cols = job->cols, chunks = (cols + DENSE_CHUNK - 1) / DENSE_CHUNK;
    const int64_t end = (task + 1) * DENSE_ROWS < job->rows ? (task + 1) * DENSE_ROWS : job->rows;
    for (int64_t row = task * DENSE_ROWS; row < end; row++)
        for (int64_t t = 0; t < job->tokens; t++) {
            uint16_t *y = job->y + t * job->rows + row;
            if (job->row_scale)
                *y = to_bf16(from_bf16(job->row_scale[row]) * int8_row((const int8_t *)job->weight + row * cols,
                                                            (const int16_t *)job->x + t * cols,
                                                            job->x_scale + t * chunks, cols));
            else *y = to_bf16(bf16_row((const uint16_t *)job->weight + row * cols, (const float *)job->x + t * cols, cols));
        }
}

/* y [tokens, rows] = x [tokens, cols] W^T, x and y bf16; W is int8 with a scale per row, or bf16 where
 * row_scale is NULL. Returns 0, or -1 where there is no memory. */
AVX2 int edgemoe_dense_product(pool *p, const void *weight, const uint16_t *row_scale, int64_t rows, int64_t cols,
                               const uint16_t *x, int64_t tokens, uint16_t *y) {
    const int64_t chunks = (cols + DENSE_CHUNK - 1) / DENSE_CHUNK;
    pthread_mutex_lock(&p->caller);
    float *scale = grown(p, (size_t)tokens * 4 * (size_t)(chunks + cols));
    if (!scale) return no_memory(p);
    void *q = scale + tokens * chunks;
    for (int64_t t = 0; t < tokens; t++)
        if (row_scale) quantize_dense(x + t * cols, cols, (int16_t *)q + t * cols, scale + t * chunks);
        else for (int64_t i = 0; i < cols; i++) ((float *)q)[t * cols + i] = from_bf16(x[t * cols + i]);
    dense_job job = {weight, row_scale, rows, cols, tokens, q, scale, y};
    run(p, dense_task, &job, (rows + DENSE_ROWS - 1) / DENSE_ROWS);
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

int edgemoe_supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

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
int edgemoe_supported(void) { return 0; }
#endif
