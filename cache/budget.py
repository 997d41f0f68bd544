"""Accounting of a memory limit: how many of its bytes are reserved."""

from __future__ import annotations

import threading

from edgemoe.errors import DoesNotFit
from edgemoe.storage.sizes import format_least, format_size


class Budget:
    """Counts the bytes reserved of a limit, which their sum never exceeds. Thread-safe.

    It allocates nothing: the caller of `reserve` allocates, and at most as many bytes as it has reserved.

    Args:
        limit: bytes.

    Attributes:
        used_bytes: bytes reserved.
        most_bytes: the most bytes that were reserved at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used_bytes = self.most_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, name: str, nbytes: int) -> None:
        """Reserves `nbytes` for the purpose `name`.

        Raises:
            DoesNotFit: the limit is too small, and nothing was reserved; `minimum` is the smallest sufficient limit.
        """
        with self._lock:
            minimum = self.used_bytes + nbytes
            if minimum > self.limit:
                raise DoesNotFit(
                    f"{format_size(nbytes)} free for {name}",
                    f"{format_size(self.limit - self.used_bytes)} of a limit of {format_size(self.limit)}",
                    f"raise the limit to {format_least(minimum)} or more",
                    minimum=minimum,
                )
            self.used_bytes = minimum
            self.most_bytes = max(self.most_bytes, minimum)

    def release(self, nbytes: int) -> None:
        """Returns `nbytes` of a reservation."""
        with self._lock:
            self.used_bytes -= nbytes
