/* The kernel's threads, and whether this processor can run it.
 *
 * Loaded with ctypes (native.py); no Python.h, so that a C compiler is all that building it takes. Where these files
 * cannot be compiled, or the processor has no AVX2, torch's operators do the same work (cpu.py).
 */
#include "experts/vnni.h"

#if defined(__x86_64__)
#include <pthread.h>
#include <stdatomic.h>

enum { TASKS = 8 }; /* that a thread has at least, where there is more than so much to do */

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
    void *scratch; /* grows to the most that was asked for */
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

void pool_run(pool *p, task_fn fn, void *job, int64_t tasks) {
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
    for (int i = 1; atomic_load(&p->left) > 0; i++) pause_for(i);
    atomic_store(&p->next, INT64_MAX / 2);
    for (int i = 1; atomic_load(&p->active) > 0; i++) pause_for(i);
}

void *pool_take(pool *p, size_t bytes) {
    pthread_mutex_lock(&p->caller);
    if (bytes > p->scratch_bytes) {
        free(p->scratch);
        p->scratch = malloc(bytes);
        p->scratch_bytes = p->scratch ? bytes : 0;
    }
    if (!p->scratch) pthread_mutex_unlock(&p->caller);
    return p->scratch;
}

int pool_threads(const pool *p) { return p->threads; }

int64_t pool_together(const pool *p, int64_t units, int64_t most) {
    int64_t together = 1;
    while (together < most && units >= 2 * together * TASKS * p->threads) together *= 2;
    return together;
}

void pool_give_back(pool *p) { pthread_mutex_unlock(&p->caller); }

int edgemoe_supported_13(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

int use_vnni = 0;

int edgemoe_vnni(int use) {
    return use_vnni = use && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

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
int edgemoe_supported_13(void) { return 0; }
#endif
