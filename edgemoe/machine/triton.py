"""Keeps Triton out of processes without a GPU, where it takes a second to import and reports leaks at exit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_triton() -> Iterator[None]:
    """Makes `import triton` fail within the block, as if it were not installed; without effect where there is a GPU.

    torch remembers the first answer. This program's own kernels can be imported afterwards.
    """
    if torch.cuda.is_available() or "triton" in sys.modules:
        yield
        return
    sys.modules["triton"] = None  # type: ignore[assignment]  # the import system's mark of a module to be refused
    try:
        yield
    finally:
        del sys.modules["triton"]
