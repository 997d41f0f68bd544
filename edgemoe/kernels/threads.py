"""The number of torch's threads within a step, beside the threads of the compiled kernel.

OpenMP's threads spin for a while after each of torch's operators. Meanwhile the kernel's threads and the threads that
read from disk have no core, and each operator waits for a thread that another program displaced. So where the compiled
kernel does the products, torch has one thread in a step, and all its threads in the few large operators only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from edgemoe.kernels.native import library as native

_WORTH_WAKING = 1 << 22
"""Multiplications that take one thread about as long as waking another thread and waiting for it."""


def for_step() -> AbstractContextManager[None]:
    """Limits torch to one thread for a step, where the compiled kernel does the products."""
    if not native.available():
        return nullcontext()
    native.thread_count()  # cached here, because it is the number of torch's threads outside of steps
    return _torch_threads(1)


def for_product(multiplications: int) -> AbstractContextManager[None]:
    """Gives torch all its threads for an operator within a step, if its multiplications are worth waking them."""
    worth_it = native.available() and multiplications >= _WORTH_WAKING
    return _torch_threads(native.thread_count()) if worth_it else nullcontext()


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
