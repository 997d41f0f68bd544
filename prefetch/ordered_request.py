"""A request whose experts come in the order of their keys, whatever is resident."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence

from edgemoe.cache.base import Lease
from edgemoe.prefetch.layer_request import LayerRequest
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
        """Takes leases, and returns the leases whose turn it is now."""
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


class OrderedRequest(LayerRequest):
    """A LayerRequest that hands out each expert in its turn.

    Where blocks are few, an expert that waits for its turn leaves them to one whose turn it is, and comes again.
    """

    def __enter__(self) -> LayerRequest:
        self._turns = Turns(self._wanted)
        return super().__enter__()

    def finish(self) -> None:
        """Ends the leases that wait for their turn as well."""
        self._arrived += self._turns.waiting.values()
        self._turns.waiting.clear()
        super().finish()

    def _begin(self) -> None:
        super()._begin()
        self._missing = deque(sorted(self._missing))

    def _ready(self) -> list[Lease]:
        """Takes the leases that are ready, and whose turn it is."""
        return self._turns.take(super()._ready())

    def _add_missing(self, key: ExpertKey) -> None:
        """Adds an expert at its place in the order of keys."""
        insort(self._missing, key)

    def _give_up(self) -> bool:
        """Ends the last lease that waits for its turn, for the first missing expert; its own expert comes again."""
        lease = self._turns.give_up(self._missing[0])
        if lease is None:
            return False
        self._vram.release(lease)
        self._add_missing(lease.key)
        return True

    def _start_first(self) -> bool:
        """Leases the first missing expert again where its blocks were given up and not taken; else starts it."""
        key = self._missing[0]
        if lease := self._vram.acquire(key, self._wanted[key]):
            self._arrived.append(lease)
            self._missing.popleft()
            return True
        return super()._start_first()
