/* A thread pool, and scratch memory that one call at a time may use. */
#pragma once
#include <sched.h>

#include "vectors/bf16.h"

#if COMPILED
/* Results of a call that did nothing: no memory; sizes that contradict those of the caller's buffers. */
enum { OUT_OF_MEMORY = -1, WRONG_SHAPE = -2 };

typedef struct pool pool;
typedef void (*task_fn)(void *job, int64_t task);

/* Locks the pool for one call and returns `bytes` of scratch at a multiple of 64, a cache line. NULL: out of memory, and
 * the pool is not locked. Blocks while another call has the pool. */
void *pool_acquire(pool *p, size_t bytes);
void pool_release(pool *p);

/* Calls fn(job, task) for every task in [0, tasks), on all threads of an acquired pool, and waits for the end. Tasks
 * start in ascending order. */
void pool_run(pool *p, task_fn fn, void *job, int64_t tasks);

/* Threads of the pool, the caller's included. */
int pool_threads(const pool *p);

/* Units of work per task: the largest of 1, 2, 4 .. `most` that leaves every thread enough tasks. Large tasks read
 * memory in long runs; small ones let the threads end together. */
int64_t pool_units_per_task(const pool *p, int64_t units, int64_t most);

/* A bijection on [0, tasks) that gives threads which take tasks in turn a contiguous range each. */
static inline int64_t contiguous_per_thread(int64_t task, int64_t tasks, int64_t threads) {
    const int64_t run = tasks / threads;
    return task < run * threads ? task % threads * run + task / threads : task;
}

/* One iteration of a busy wait; `tries` counts them from 1. */
static inline void spin_once(int tries) {
    if (tries % 1024) _mm_pause();
    else sched_yield();
}
#endif
