"""Accounting of a memory limit: how many of its bytes are reserved."""

from __future__ import annotations

import threading

from storage.errors import DoesNotFit


class Budget:
    """Counts the bytes reserved of a limit, which their sum never exceeds. Thread-safe.

    It allocates nothing: the caller of `reserve` allocates, and at most as many bytes as it has reserved.

    Args:
        limit: bytes.

    Attributes:
        used: bytes reserved.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()

    def reserve(self, name: str, nbytes: int) -> None:
        """Reserves `nbytes` for the purpose `name`.

        Raises:
            DoesNotFit: the limit is too small, and nothing was reserved; `minimum` is the smallest sufficient limit.
        """
        with self._lock:
            minimum = self.used + nbytes
            if minimum > self.limit:
                raise DoesNotFit(
                    f"{nbytes:,} free bytes for {name}",
                    f"{self.limit - self.used:,} of a limit of {self.limit:,} bytes",
                    f"raise the limit to at least {minimum:,} bytes",
                    minimum=minimum,
                )
            self.used = minimum

    def release(self, nbytes: int) -> None:
        """Returns `nbytes` of a reservation."""
        with self._lock:
            self.used -= nbytes
