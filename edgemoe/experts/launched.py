"""A router's choice in a capture, where no step runs and the host does not see which experts were chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

Launched = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, hidden, choice, gates) -> result, as ExpertLayer.routed, of which `layer` is the ExpertLayer."""

_LAUNCHED: ContextVar[Launched | None] = ContextVar("launched", default=None)


def launched() -> Launched | None:
    """The function that takes the place of ExpertLayer.routed now; None: a step computes the experts."""
    return _LAUNCHED.get()


@contextmanager
def launching(function: Launched) -> Iterator[None]:
    """Makes a function take the place of ExpertLayer.routed within the block."""
    token = _LAUNCHED.set(function)
    try:
        yield
    finally:
        _LAUNCHED.reset(token)
