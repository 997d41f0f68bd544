"""Leases in the order of their keys, for a request whose experts come in a fixed order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from edgemoe.cache.base import Lease
from edgemoe.storage.base import ExpertKey


class Turns:
    """Hands out leases in the order of their keys, in whatever order they come.

    Args:
        keys: the experts of a request.

    Attributes:
        waiting: leases whose turn has not come.
    """

    def __init__(self, keys: Iterable[ExpertKey]) -> None:
        self._keys = deque(sorted(keys))
        self.waiting: dict[ExpertKey, Lease] = {}

    def take(self, leases: Sequence[Lease]) -> list[Lease]:
        """Takes leases, and returns those whose turn it is now."""
        self.waiting |= {lease.key: lease for lease in leases}
        now = []
        while self._keys and self._keys[0] in self.waiting:
            now.append(self.waiting.pop(self._keys.popleft()))
        return now

    def give_up(self, key: ExpertKey) -> Lease | None:
        """Gives the last waiting lease back, for an expert that lacks blocks. Its own expert must come again.

        Returns:
            None: no lease waits, or it is not the turn of `key`.
        """
        if not self.waiting or self._keys[0] != key:
            return None
        return self.waiting.pop(max(self.waiting))
