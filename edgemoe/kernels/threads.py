"""Who gets the processor's cores while few rows are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from edgemoe.kernels import native


def for_step(*, decodes: bool) -> AbstractContextManager[None]:
    """Threads for a step: torch's, unless edgemoe's kernel does every product that is worth more than one.

    OpenMP's threads spin for a while after each of torch's operators, and meanwhile the kernel's own threads and
    those that read from disk have no core. Where another program takes a core, every operator waits for it.

    Args:
        decodes: every sequence goes on by one token.
    """
    return _one_of_torchs() if decodes and native.available() else nullcontext()


@contextmanager
def _one_of_torchs() -> Iterator[None]:
    native.threads()  # the kernel has as many as torch has outside
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
