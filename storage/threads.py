"""Work on every core in a fixed order, with a bound on the memory of what is begun."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from edgemoe.machine.cgroups import cores
from edgemoe.storage.files.retry import GivingUp

_T = TypeVar("_T")


def reading_threads() -> int:
    """Threads that read and compute: two per usable core, so that one computes while the other waits for the disk."""
    return 2 * cores()


@contextmanager
def one_core_each(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yields a pool whose threads compute on one core each; by default torch gives every thread all cores."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "encode", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        with GivingUp():
            pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def in_order(
    pool: ThreadPoolExecutor, tasks: Iterable[tuple[int, Callable[[], _T]]], limit: int
) -> Generator[_T]:
    """Yields the results of tasks in their order, while the pool works on later ones.

    Args:
        pool: the pool that runs them.
        tasks: (bytes that the task and its result take, call that returns the result).
        limit: bytes of all tasks that are begun and whose results are not used up; one task is always allowed.

    Raises:
        Exception: what a task raises, in its place. Tasks that have not begun are then cancelled, as on close.
    """
    begun: deque[tuple[int, Future[_T]]] = deque()
    taken = 0
    try:
        for nbytes, run in tasks:
            while begun and taken + nbytes > limit:
                yield begun[0][1].result()
                taken -= begun.popleft()[0]
            begun.append((nbytes, pool.submit(run)))
            taken += nbytes
        while begun:
            yield begun.popleft()[1].result()
    finally:
        for _, future in begun:
            future.cancel()
