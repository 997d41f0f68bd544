"""Turns of the threads that drive one engine: one of them runs steps at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """A turn that one thread has at a time. Thread-safe.

    Attributes:
        closed: no thread gets a turn any more; set within `changing`.
        pausing: threads that wait for `paused`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken, self.closed, self.pausing = False, False, 0

    @property
    def taken(self) -> bool:
        """Whether a thread has its turn now."""
        return self._taken

    def take(self) -> bool:
        """Begins this thread's turn. Returns False where another has one, or after the end of all turns."""
        with self._changed:
            if self._taken or self.closed:
                return False
            self._taken = True
            return True

    def end(self) -> None:
        """Ends this thread's turn."""
        with self._changed:
            self._taken = False
            self._changed.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the lock, and wakes the waiting threads at the block's end, so that they see its changes."""
        with self._changed:
            yield
            self._changed.notify_all()

    def wait_for(self, until: Callable[[], bool]) -> None:
        """Waits until a condition holds, which is looked at after each change."""
        with self._changed:
            self._changed.wait_for(until)

    @contextmanager
    def alone(self, until: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Waits until no thread has a turn, or until `until`; holds the lock in the block, so that none begins."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or until())
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gives this thread the turn for the block. Not for a thread that has one."""
        with self._changed:
            self.pausing += 1
            self._changed.wait_for(lambda: not self._taken)
            self.pausing -= 1
            self._taken = True
        try:
            yield
        finally:
            self.end()
