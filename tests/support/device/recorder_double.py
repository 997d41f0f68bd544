"""A recorder in RAM that notes torch's operators, and runs them again in the same memory.

What is noted has to be run once to know its shapes; its results are spoiled at once, so that whoever reads them before
the piece is launched reads nonsense. What a piece was told by Python while it was noted it is told for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_FORBIDDEN = (aten.lift_fresh.default, aten._local_scalar_dense.default, aten.nonzero.default)
"""What brings numbers from the host, or to it: a device refuses to note it."""


class _Piece(TorchDispatchMode):
    """The operators of one piece, with what they were called with and what they gave."""

    def __init__(self, broken: list[str]) -> None:
        super().__init__()
        self._broken = broken
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in _FORBIDDEN:
            self._broken.append(f"{function} in a piece")
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def launch(self) -> None:
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(_made(args, kwargs, result), _made(args, kwargs, again), strict=True):
                old.copy_(new)

    def spoil(self) -> None:
        for _, args, kwargs, result in self.calls:
            for tensor in _made(args, kwargs, result):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def _made(args: tuple, kwargs: dict, result: Any) -> list[torch.Tensor]:
    """Tensors of a result with memory of their own: no views of an argument, and no argument itself."""
    given = {
        t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
    }
    tensors = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in given]


class DoubleRecorder:
    """See the module.

    Args:
        device: whose `broken` it adds to, and whose `pieces` and `launches` it counts.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._open: _Piece | None = None
        device.pieces = device.launches = 0

    @contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._open:
                self.end()

    def begin(self) -> None:
        if self._open:
            self._device.broken.append("a piece began within another")
        self._open = _Piece(self._device.broken)
        self._open.__enter__()

    def end(self) -> Callable[[], None]:
        piece, self._open = self._open, None
        assert piece
        piece.__exit__(None, None, None)
        piece.spoil()
        self._device.pieces += 1

        def launch() -> None:
            self._device.launches += 1
            piece.launch()

        return launch
