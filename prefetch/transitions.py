"""Experts that change their level in the background, for steps to come (DynaExq, sections 3.3 and 3.4).

    change ── demote ── at the start of a step: the upper planes' blocks are free at once
       │
       └──── promote ── a free block? ── read on a thread of its own ── published at the start of a later step,
                            │                                             once a device's copies are made
                            │ none
                            └── deferred until there is one

No step waits for a promotion as long as it has other blocks: it computes from the planes that are published, and a
promotion evicts nothing. A demanded expert that is on its way is taken over by its request
(speculation.Speculation.adopt). A read that fails leaves its expert as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from edgemoe.machine.sigint import CHECK_EVERY, DeferredInterrupt
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.transfers import Transfer, Transfers
from edgemoe.storage.base import ExpertKey

IN_FLIGHT = 2
"""Most promotions that are read at once, each on its own thread."""

COPIES = 16
"""Most promotions under way at once, with the ones that a device only copies."""


class Transitions:
    """Promotions that wait or are under way. Used by the engine's thread, between two requests.

    Args:
        transfers: runs them.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._rate: float | None = None
        self._allowed, self._since = 0.0, transfers.clock()
        self._demote: dict[ExpertKey, int] = {}
        self._promote: deque[tuple[ExpertKey, int]] = deque()
        self._flying: list[Transfer] = []
        self._waiting: ExpertKey | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not (self._demote or self._promote or self._flying)

    def change(
        self, demote: Mapping[ExpertKey, int], promote: Mapping[ExpertKey, int], rate: float | None
    ) -> None:
        """Replaces the changes that wait. Promotions that have not begun are cancelled. A begun one goes on; once it is
        complete it is taken back, unless it is among the new ones.

        Args:
            demote: expert -> the level that stays of it, above 0.
            promote: expert -> its level, the most urgent first.
            rate: bytes per second that promotions may take on average; None: no limit.
        """
        self._drop_waiting()
        self._demote, self._promote = dict(demote), deque(promote.items())
        for transfer in self._flying:
            if self._mine(transfer) and transfer.key not in promote and transfer.reservation.lease:
                self._demote.setdefault(transfer.key, transfer.reservation.lease.level)
        if rate != self._rate:
            self._rate, self._allowed, self._since = rate, 0.0, self._transfers.clock()

    def advance(self, counts: TransferCounts, *, start: bool = True) -> None:
        """Publishes what has arrived, demotes, and starts promotions as far as blocks and the rate allow.

        Args:
            counts: the counters of what is published and demoted now.
            start: False only publishes: a prompt needs the disk for itself.
        """
        self._publish(counts)
        if not start:
            return
        for key in [key for key in self._demote if key not in self._transfers.moving]:
            before, level = self._transfers.vram.level_of(key), self._demote.pop(key)
            if before > level:
                self._transfers.vram.drop(key, level)
                counts.demoted += self._transfers.vram.level_of(key) < before
        while self._promote and self._has_room() and self._may_move():
            if not self._start(*self._promote[0], counts):
                return
            self._promote.popleft()

    def settle(self, counts: TransferCounts) -> None:
        """Makes all changes that wait, at any rate, and waits for them; a change that finds no block is dropped."""
        self._rate = None
        with DeferredInterrupt() as interrupt:
            while not self.idle:
                self._publish(counts, landed=False)
                self.advance(counts)
                interrupt.check()
                if self._flying:
                    self._transfers.await_done(self._flying, CHECK_EVERY)
                elif self._promote:
                    self._promote.popleft()

    def end(self, counts: TransferCounts) -> None:
        """Drops what waits, waits for what is under way and publishes it; counted in `counts`."""
        self._demote.clear()
        self._drop_waiting()
        while self._flying:
            mine = [each for each in self._flying if self._mine(each)]
            if mine:
                self._transfers.await_done(mine)
            self._publish(counts, landed=False)

    def _publish(self, counts: TransferCounts, *, landed: bool = True) -> None:
        """Publishes what has arrived, and forgets what a request has taken over.

        Args:
            counts: the counters of what is published.
            landed: leave out experts whose blocks a device still copies: kernels would wait for them.
        """
        for transfer in list(self._flying):
            mine = self._mine(transfer)
            if mine and not (transfer.done and (transfer.load.landed or not landed)):
                continue
            self._flying.remove(transfer)
            if mine:
                self._transfers.end_move(transfer, counts)

    def _has_room(self) -> bool:
        """Whether another promotion may begin."""
        reads = sum(not transfer.load.instant for transfer in self._flying)
        return reads < IN_FLIGHT and len(self._flying) < COPIES

    def _drop_waiting(self) -> None:
        self._promote.clear()
        self._waiting = None
        for transfer in list(self._flying):
            if self._mine(transfer) and self._transfers.cancel(transfer):
                self._flying.remove(transfer)

    def _mine(self, transfer: Transfer) -> bool:
        """Whether no request has taken a transfer over."""
        return self._transfers.moving.get(transfer.key) is transfer

    def _start(self, key: ExpertKey, level: int, counts: TransferCounts) -> bool:
        """Starts a promotion, unless it is needless. Returns False where no block is free."""
        transfers = self._transfers
        if transfers.vram.level_of(key) >= level or key in transfers.under_way or key in transfers.moving:
            return True
        transfer = transfers.move(key, level, counts, threads=IN_FLIGHT)
        if transfer is None:
            counts.deferred += self._waiting != key
            self._waiting = key
            return False
        self._flying.append(transfer)
        if self._rate is not None:
            self._allowed -= sum(map(len, transfer.reservation.into.values()))
        return True

    def _may_move(self) -> bool:
        """Whether the rate allows a promotion: it adds up for a second at most, and one expert may overdraw it."""
        if self._rate is None:
            return True
        now = self._transfers.clock()
        self._allowed = min(self._allowed + self._rate * (now - self._since), self._rate)
        self._since = now
        return self._allowed >= 0
