/* The thread pool, and the check of the processor's instructions.
 *
 * Loaded with ctypes (library.py) and free of Python.h, so that a C compiler is enough to build it. Where these files
 * cannot be compiled, or the processor has neither AVX2 nor NEON, torch's operators do the same work (torch_int4.py).
 */
#include "pool.h"
#include "paths.h"

#if COMPILED
#include <pthread.h>
#include <stdatomic.h>

enum { MIN_TASKS = 8 }; /* per thread, where a task has more than one unit */

/* Busy-wait iterations of a worker before it sleeps. They outlast the gap between two products of a token, since waking
 * a thread takes longer than most products; sched_yield leaves the core to other runnable threads. */
enum { SPINS = 4096, YIELD_EVERY = 64 };

struct pool {
    int threads; /* the caller's included */
    int stop;
    pthread_t *workers;
    pthread_mutex_t caller; /* serialises the calls */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_uint epoch;   /* number of runs: a worker that sees a change has work */
    atomic_int sleeping; /* workers in pthread_cond_wait, or about to enter it */
    atomic_int active;   /* workers inside a run */
    _Atomic int64_t next, left;
    _Atomic int64_t tasks;
    task_fn fn;
    void *job;
    void *scratch; /* only grows */
    size_t scratch_bytes;
};

static void run_tasks(pool *p) {
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
        /* A worker touches the job only while `active` counts it; pool_run waits for that count to reach 0. */
        atomic_fetch_add(&p->active, 1);
        seen = atomic_load(&p->epoch);
        if (p->stop) break;
        run_tasks(p);
        atomic_fetch_sub(&p->active, 1);
    }
    return NULL;
}

static void wake_workers(pool *p) {
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
    /* A late worker of the previous run may still request tasks: it gets none until `next` is reset. */
    p->fn = fn, p->job = job, p->tasks = tasks;
    atomic_store(&p->left, tasks);
    atomic_store(&p->next, 0);
    wake_workers(p);
    run_tasks(p);
    for (int i = 1; atomic_load(&p->left) > 0; i++) spin_once(i);
    atomic_store(&p->next, INT64_MAX / 2);
    for (int i = 1; atomic_load(&p->active) > 0; i++) spin_once(i);
}

void *pool_acquire(pool *p, size_t bytes) {
    pthread_mutex_lock(&p->caller);
    if (!p->scratch || bytes > p->scratch_bytes) {
        free(p->scratch);
        p->scratch_bytes = (bytes / 64 + 1) * 64;
        p->scratch = aligned_alloc(64, p->scratch_bytes);
        if (!p->scratch) p->scratch_bytes = 0;
    }
    if (!p->scratch) pthread_mutex_unlock(&p->caller);
    return p->scratch;
}

int pool_threads(const pool *p) { return p->threads; }

int64_t pool_units_per_task(const pool *p, int64_t units, int64_t most) {
    int64_t per_task = 1;
    while (per_task < most && units >= 2 * per_task * MIN_TASKS * p->threads) per_task *= 2;
    return per_task;
}

void pool_release(pool *p) { pthread_mutex_unlock(&p->caller); }

#if defined(__x86_64__)
int edgemoe_supported_49(void) { return has_avx2(); }
#else
int edgemoe_supported_49(void) { return 1; }
#endif

void edgemoe_close(pool *p) {
    if (!p) return;
    p->stop = 1;
    wake_workers(p);
    for (int i = 0; i < p->threads - 1; i++) pthread_join(p->workers[i], NULL);
    pthread_mutex_destroy(&p->caller);
    pthread_mutex_destroy(&p->mutex);
    pthread_cond_destroy(&p->wake);
    free(p->workers);
    free(p->scratch);
    free(p);
}

/* NULL: out of memory, or a thread could not be started. */
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
int edgemoe_supported_49(void) { return 0; }
#endif
