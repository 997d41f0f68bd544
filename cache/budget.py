"""Accounting of a memory limit: which purpose has reserved how many bytes."""

from __future__ import annotations

import threading

from storage.errors import DoesNotFit


class Budget:
    """Counts the bytes reserved of a limit, by name; their sum never exceeds it. Thread-safe.

    It allocates nothing: the caller of `reserve` allocates, and at most as many bytes as it has reserved.

    Args:
        limit: bytes, 0 or more.

    Raises:
        ValueError: `limit` is negative.
    """

    def __init__(self, limit: int) -> None:
        self.limit = _checked(limit)
        self._reserved: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes reserved."""
        with self._lock:
            return sum(self._reserved.values())

    def reserve(self, name: str, nbytes: int) -> None:
        """Reserves `nbytes` more for `name`.

        Raises:
            DoesNotFit: the limit is too small, and nothing was reserved; `minimum` is the smallest sufficient limit.
            ValueError: `nbytes` is negative.
        """
        with self._lock:
            used = sum(self._reserved.values())
            minimum = used + _checked(nbytes)
            if minimum > self.limit:
                raise DoesNotFit(
                    f"{nbytes:,} free bytes for {name}",
                    f"{self.limit - used:,} of a limit of {self.limit:,} bytes",
                    f"raise the limit to at least {minimum:,} bytes",
                    minimum=minimum,
                )
            self._reserved[name] = self._reserved.get(name, 0) + nbytes

    def release(self, name: str, nbytes: int) -> None:
        """Returns `nbytes` of the reservation of `name`.

        Raises:
            ValueError: `name` has reserved less than `nbytes`, or `nbytes` is negative.
        """
        with self._lock:
            reserved = self._reserved.get(name, 0)
            if _checked(nbytes) > reserved:
                raise ValueError(
                    f"expected at most the {reserved} bytes reserved for {name}, got {nbytes} to release"
                )
            self._reserved[name] = reserved - nbytes


def _checked(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError(f"expected a size of 0 bytes or more, got {nbytes}: it cannot be negative")
    return nbytes
