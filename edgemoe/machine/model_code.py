"""Imports transformers' code without torch's compiler, distributed tensors and advice, which no step uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"

_MARKS = ("disable", "allow_in_graph", "assume_constant_result")
"""Decorators that mark a function for torch.compile, and change nothing where nothing is compiled."""


_LIGHT = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""The module of the compiler that transformers imports for its masks; it needs no other one."""


class _Imported(Loader):
    """Loads a module that is imported already, and leaves it as it is.

    Args:
        module: the module.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own spec back, which the import system has replaced."""
        module.__spec__ = self._spec


class _CompilersModules(MetaPathFinder):
    """Imports the compiler before any module of it but the light one, which would be imported half otherwise.

    torchvision imports such a module, and transformers imports torchvision where it is installed.
    """

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module of the compiler as the compiler's own import has left it; None: it is found as usual."""
        stands_in = isinstance(sys.modules.get(_COMPILER), _Marks)
        if not stands_in or name == _LIGHT or not name.startswith(f"{_COMPILER}."):
            return None
        _remove()
        importlib.import_module(_COMPILER)
        imported = sys.modules.get(name)
        return ModuleSpec(name, _Imported(imported)) if imported else None


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
    marks.__path__ = [f"{torch.__path__[0]}/_dynamo"]
    torch.distributed.is_available = lambda: False
    finder = _CompilersModules()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        torch.distributed.is_available = distributed
        _remove()


def _remove() -> None:
    import torch

    if isinstance(sys.modules.get(_COMPILER), _Marks):
        del sys.modules[_COMPILER], torch._dynamo


def _unmarked(function: Callable[..., Any] | None = None, *args: Any, **options: Any) -> Callable[..., Any]:
    """A mark that leaves its function as it is, with arguments or without."""
    return function if function is not None else lambda each: each


@contextmanager
def without_advice() -> Iterator[None]:
    """Keeps transformers from advising packages, within the block: edgemoe's own code does their work."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
