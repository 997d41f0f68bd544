/* Threads of the process's own for products, and memory that one product at a time may use. */
#ifndef EDGEMOE_POOL_H
#define EDGEMOE_POOL_H
#include <sched.h>

#include "bf16.h"

#if defined(__x86_64__)
typedef struct pool pool;
typedef void (*task_fn)(void *job, int64_t task);

/* Waits for whoever has the pool. Returns `bytes` of scratch, aligned as malloc's; NULL: there is no memory, and the
 * pool is not had. */
void *pool_take(pool *p, size_t bytes);
void pool_give_back(pool *p);

/* Calls fn(job, task) for every task below `tasks`, on all threads of a pool that was taken, and waits for them. Tasks
 * begin in their order. */
void pool_run(pool *p, task_fn fn, void *job, int64_t tasks);

/* The caller's own among them. */
int pool_threads(const pool *p);

/* How many of `units` a task is best made of, 1, 2, 4 .. `most`: memory gives more in long runs, and of short tasks
 * threads end together. */
int64_t pool_together(const pool *p, int64_t units, int64_t most);

/* The task's place among `tasks`, all of which are taken, when threads that take turns are each to go through neighbours. */
static inline int64_t in_runs(int64_t task, int64_t tasks, int64_t threads) {
    const int64_t run = tasks / threads;
    return task < run * threads ? task % threads * run + task / threads : task;
}

/* For others to do what they wait for. */
static inline void pause_for(int tries) {
    if (tries % 1024) _mm_pause();
    else sched_yield();
}
#endif
#endif
