"""Rules of torch's operators within a step: their number of threads, and whether a row's bits may vary.

OpenMP's threads spin for a while after each of torch's operators. Meanwhile the kernel's threads and the threads that
read from disk have no core, and each operator waits for a thread that another program displaced. So where the compiled
kernel does the products, torch has one thread in a step, and all its threads in the few large operators only.

A product of torch may give a row other bits among more rows. A step decides whether it takes such products where they
are faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from edgemoe.kernels.native import library as native

_WORTH_WAKING = 1 << 22
"""Multiplications that take one thread about as long as waking another thread and waiting for it."""

_rows_alike = ContextVar("rows_alike", default=True)


def one_thread() -> AbstractContextManager[None]:
    """Limits torch to one thread for a step, where the compiled kernel does the products."""
    if not native.available():
        return nullcontext()
    native.thread_count()  # cached here, because it is the number of torch's threads outside of steps
    return _threads(1)


def threads_for(multiplications: int) -> AbstractContextManager[None]:
    """Gives torch all its threads for an operator within a step, if its multiplications are worth waking them."""
    worth_it = native.available() and multiplications >= _WORTH_WAKING
    return _threads(native.thread_count()) if worth_it else nullcontext()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def are_rows_alike() -> bool:
    """Whether the bits of a row must not depend on the number of rows; by default they must not."""
    return _rows_alike.get()


@contextmanager
def rows_alike(alike: bool) -> Iterator[None]:
    """Decides `are_rows_alike` for the products of this thread within the block."""
    token = _rows_alike.set(alike)
    try:
        yield
    finally:
        _rows_alike.reset(token)
