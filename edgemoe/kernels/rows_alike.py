"""Whether products must give a row the same bits among any number of rows, or may be torch's where it is faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_wanted = ContextVar("rows_alike", default=True)


def wanted() -> bool:
    """Whether the bits of a row must not depend on the number of rows; by default they must not."""
    return _wanted.get()


@contextmanager
def rows_alike(alike: bool) -> Iterator[None]:
    """Decides it for the products of this thread within the block."""
    token = _wanted.set(alike)
    try:
        yield
    finally:
        _wanted.reset(token)
