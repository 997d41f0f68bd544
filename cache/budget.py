"""Who owns every byte of a memory limit."""

from __future__ import annotations

import threading

from storage.errors import DoesNotFit


class Budget:
    """Hands out a fixed number of bytes by name and never one more. Thread-safe.

    It only counts: whoever reserves allocates, and allocates no more than it reserved.

    Args:
        limit: bytes, 0 or more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = _checked(limit)
        self._reserved: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes reserved now."""
        with self._lock:
            return sum(self._reserved.values())

    @property
    def free(self) -> int:
        """Bytes that a reservation could still have."""
        return self.limit - self.used

    def breakdown(self) -> dict[str, int]:
        """A snapshot of name -> bytes reserved, in the order of first reservation."""
        with self._lock:
            return dict(self._reserved)

    def try_reserve(self, name: str, nbytes: int) -> bool:
        """Adds `nbytes` to what `name` has, or changes nothing and returns False.

        Raises:
            ValueError: nbytes is negative.
        """
        return self._shortfall(name, nbytes) == 0

    def reserve(self, name: str, nbytes: int) -> None:
        """Adds `nbytes` to what `name` has.

        Raises:
            DoesNotFit: nothing was reserved; `minimum` is the smallest limit that would have done.
            ValueError: nbytes is negative.
        """
        short = self._shortfall(name, nbytes)
        if short:
            minimum = self.limit + short
            raise DoesNotFit(
                f"{nbytes:,} bytes for {name} were wanted",
                f"{minimum - nbytes:,} of the limit's {self.limit:,} bytes are in use",
                f"Raise the limit to at least {minimum:,} bytes, or ask for less",
                minimum=minimum,
            )

    def release(self, name: str, nbytes: int | None = None) -> None:
        """Gives back `nbytes` of what `name` has; None: all of it.

        Raises:
            ValueError: `name` has nothing, or less than `nbytes`; or nbytes is negative.
        """
        with self._lock:
            have = self._reserved.get(name)
            if have is None or (nbytes is not None and _checked(nbytes) > have):
                raise ValueError(f"{name} has {have or 0} bytes reserved, {nbytes} cannot be released")
            if nbytes is None or nbytes == have:
                del self._reserved[name]
            else:
                self._reserved[name] = have - nbytes

    def _shortfall(self, name: str, nbytes: int) -> int:
        """Bytes by which the limit is too small for `nbytes` more; reserves them where that is 0."""
        with self._lock:
            short = sum(self._reserved.values()) + _checked(nbytes) - self.limit
            if short <= 0:
                self._reserved[name] = self._reserved.get(name, 0) + nbytes
            return max(short, 0)


def _checked(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError(f"{nbytes} bytes: a size is not negative")
    return nbytes
