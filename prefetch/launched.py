"""Work of a device that reads experts and may still run when their source is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LaunchedWork:
    """Waits for launched work before blocks that it reads are written, freed or moved.

    >>> launched = LaunchedWork()
    >>> launched.add(lambda: print("waited"))
    >>> with launched.in_order():
    ...     launched.settle()
    >>> launched.settle()
    waited

    Attributes:
        waits: the functions that were added; a caller that finds none need not call `settle`.
        ordered: whether blocks change in the order of the device's work. Then nothing waits on the host, and kernels
            that are launched later wait for the copies only where they read them.
    """

    def __init__(self) -> None:
        self.waits: list[Callable[[], None]] = []
        self.ordered = False

    def add(self, wait: Callable[[], None]) -> None:
        """Has `settle` call `wait`, which waits until launched work reads no block any more."""
        self.waits.append(wait)

    def clear(self) -> None:
        """Forgets all that was added, and with it the model whose launches it waits for."""
        self.waits.clear()

    def settle(self) -> None:
        """Waits on the host, on the thread that calls the source."""
        if not self.ordered:
            for wait in self.waits:
                wait()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Within the block the device writes blocks after the work that was launched before, by events."""
        self.ordered = True
        try:
            yield
        finally:
            self.ordered = False
