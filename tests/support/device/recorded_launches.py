"""Captures of a device in RAM: torch's operators and Triton's kernels are recorded once, and run again as recorded.

As a CUDA graph, a record has fixed memory and no Python: what a branch decided at the capture stays decided, and a
result goes to where it went at the capture. An operator that gives the host a number is refused, as CUDA refuses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default}
_READS |= {torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default}
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
}
_EMPTY |= {torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty_strided.default}


class Recorder(TorchDispatchMode):
    """Records the operators of torch in its block, and runs them.

    Attributes:
        pieces: the records; each is a list of functions that take and return nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[list[Callable[[], object]]] = [[]]
        self._made = dict[int, torch.Tensor]()
        """Storages that recorded operators wrote, by address, with a tensor that keeps each alive."""

    def cut(self) -> None:
        """Ends a piece."""
        self.pieces.append([])

    def add(self, run: Callable[[], object]) -> None:
        """Records a function, which has run."""
        self.pieces[-1].append(run)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func in _READS and any(_storage(each) in self._made for each in inputs):
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        result = func(*args, **kwargs)
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        theirs = {_storage(each) for each in inputs}
        if func._schema.is_mutable:
            self._note(each for each in inputs + outputs)
            self.add(lambda: func(*args, **kwargs))
        elif func in _EMPTY or not outputs:
            self._note(outputs)
        elif not all(_storage(each) in theirs for each in outputs):
            self._note(outputs)

            def again() -> None:
                made = func(*args, **kwargs)
                new = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
                for old, now in zip(outputs, new, strict=True):
                    if _storage(old) not in theirs:
                        old.copy_(now)

            self.add(again)
        return result

    def _note(self, tensors: Any) -> None:
        self._made |= {_storage(each): each for each in tensors}


_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def recorded(launch: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
    """Runs launches once as Device.capture_pieces says, and returns what runs each piece again.

    In RAM no code is loaded before.
    """
    recorder = Recorder()
    token = _RECORDER.set(recorder)
    try:
        with _kernels_recorded(recorder), recorder:
            launch(recorder.cut)
    finally:
        _RECORDER.reset(token)

    def run(piece: list[Callable[[], object]]) -> Callable[[], None]:
        def again() -> None:
            with torch.inference_mode():
                for each in piece:
                    each()

        return again

    return [run(piece) for piece in recorder.pieces]


def at_each_launch(function: Callable[[], object]) -> None:
    """Runs a test's function now, outside the record, and again whenever the record runs that is being made."""
    with _disable_current_modes():
        function()
    if recorder := _RECORDER.get():
        recorder.add(function)


@contextmanager
def without_waits() -> Iterator[None]:
    """A block in which a number that an operator of the block has made must not come to the host."""
    with Recorder():
        yield


@contextmanager
def _kernels_recorded(recorder: Recorder) -> Iterator[None]:
    """Records the launches of Triton's interpreter within a block; their own operators are no part of the record."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # no kernel of Triton has been imported
        yield
        return
    original = interpreter.GridExecutor.__call__

    def call(executor: Any, *arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            result = original(executor, *arguments, **keywords)
        recorder.add(lambda: original(executor, *arguments, **keywords))
        return result

    interpreter.GridExecutor.__call__ = call
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = original
