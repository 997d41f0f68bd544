"""Who gets the processor's cores: edgemoe's kernel has threads of its own, torch's operators have OpenMP's.

OpenMP's threads spin for a while after each operator, and meanwhile the kernel's and those that read from disk have no
core; where another program takes one, every operator waits for it. So where the kernel does the products, a step
leaves torch one thread, but for the few operators that are worth more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from edgemoe.kernels.native import library as native


def for_step() -> AbstractContextManager[None]:
    """One of torch's threads for a step, where edgemoe's kernel does its products."""
    if not native.available():
        return nullcontext()
    native.thread_count()  # as many as torch has outside of steps
    return _torch_has(1)


def for_product(multiplications: int) -> AbstractContextManager[None]:
    """All of torch's threads within a step, for an operator of so many multiplications, if they are worth it."""
    worth_it = native.available() and multiplications >= _WORTH_WAKING
    return _torch_has(native.thread_count()) if worth_it else nullcontext()


_WORTH_WAKING = 1 << 22
"""Multiplications that take one thread about as long as waking another and waiting for it."""


@contextmanager
def _torch_has(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
