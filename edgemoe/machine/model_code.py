"""Imports transformers' code without torch's compiler and distributed tensors, which no step uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"

_MARKS = ("disable", "allow_in_graph", "assume_constant_result")
"""Decorators that mark a function for torch.compile, and change nothing where nothing is compiled."""


class _Marks(ModuleType):
    """Stands for the compiler where only its marks are used; any other name imports the compiler itself."""

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return _unmarked
        if name.startswith("__"):
            raise AttributeError(name)
        _remove()
        return getattr(importlib.import_module(_COMPILER), name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Imports of transformers' code within the block leave out torch's compiler, which takes longer than torch itself.

    Does nothing where the compiler is imported already.
    """
    import torch.compiler
    import torch.distributed

    if _COMPILER in sys.modules:
        yield
        return
    distributed = torch.distributed.is_available
    sys.modules[_COMPILER] = torch._dynamo = marks = _Marks(_COMPILER)
    marks.__path__ = [f"{torch.__path__[0]}/_dynamo"]  # its modules are imported as they are
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = distributed
        _remove()


def _remove() -> None:
    import torch

    if isinstance(sys.modules.get(_COMPILER), _Marks):
        del sys.modules[_COMPILER], torch._dynamo


def _unmarked(function: Callable[..., Any] | None = None, *args: Any, **options: Any) -> Callable[..., Any]:
    """A mark that leaves its function as it is, with arguments or without."""
    return function if function is not None else lambda each: each
