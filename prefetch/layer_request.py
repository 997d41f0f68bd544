"""One layer's experts: hits first, then arrivals, in whatever room there is."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from cache.base import Lease
from prefetch.base import Leases, Split
from prefetch.sigint import Interrupt
from prefetch.speculation import Speculation
from prefetch.transfer import Transfer
from prefetch.transfers import Traffic
from storage.base import ExpertKey
from storage.errors import DoesNotFit


class LayerStream(Leases):
    """One call of Fetcher.stream. Used by the engine's thread.

    Args:
        traffic: carries demands out.
        speculation: whose guess this call confirms or refutes.
        wanted: as ExpertSource.stream.
        interrupt: checked before every lease.
        split: which experts are handed out in the slower tier; None: none.
        passing: as ExpertSource.stream.
    """

    def __init__(
        self,
        traffic: Traffic,
        speculation: Speculation,
        wanted: Mapping[ExpertKey, int],
        interrupt: Interrupt,
        split: Split | None = None,
        *,
        passing: bool = False,
    ) -> None:
        self._traffic, self._speculation = traffic, speculation
        self._vram = traffic.vram
        self._interrupt, self._split = interrupt, split
        self._wanted = wanted
        self._hits: deque[Lease] = deque()
        self._arrived: deque[Lease] = deque()
        self._missing: deque[ExpertKey] = deque()
        self._awaited: dict[ExpertKey, Transfer] = {}
        self._current: list[Lease] = []
        self._below: deque[Lease] = deque()
        self._current_below: Lease | None = None
        self._stopped = False
        self._passing = passing
        self._brought: list[ExpertKey] = []
        """Where it is passing, those of `wanted` of which nothing was resident before somebody guessed or asked."""

    def begin(self) -> None:
        """Pins every hit, so that no miss evicts one, takes over what is on its way, and starts the misses."""
        came = self._speculation.resolve(self._wanted)
        if not self._passing:
            self._vram.all_alike()
        counts = self._traffic.counts
        counts.ask(list(self._wanted.values()))
        for key in sorted(self._wanted):
            level = self._wanted[key]
            lease = self._vram.acquire(key, level)
            if lease:
                (self._arrived if lease.arriving else self._hits).append(lease)
            elif not self._take_over(key, level):
                self._missing.append(key)
        if self._passing:
            asked = [key for key in (*self._missing, *self._awaited) if not self._vram.level_of(key)]
            self._brought = came + asked
        counts.vram_hits += len(self._hits) + len(self._arrived)
        self._leave_below()
        # What is there in part goes first: a whole expert's transfer might evict it meanwhile.
        self._missing = deque(sorted(self._missing, key=lambda key: not self._vram.level_of(key)))
        self.advance()

    def __next__(self) -> Lease:
        """Hits, then arrivals, and what stays below as soon as there is nothing else to launch; each valid until the
        next."""
        if self._current or self._current_below:
            self._release_current()
            self.advance()
        lease = None if self._stopped else self._next()
        if lease is None:
            raise StopIteration
        return lease if lease is self._current_below else self._hand_out([lease])[0]

    def ready(self) -> list[Lease]:
        """See Leases. What a device's copy is still bringing is ready only beside what waits for one as well: its
        kernel would keep the others' from starting."""
        waits = any(lease.arriving for lease in self._current)
        self._collect()
        leases, arrived = list(self._hits), list(self._arrived)
        self._hits.clear()
        self._arrived.clear()
        for lease in arrived:
            now = waits or all(event.done() for event in lease.arriving)
            (leases if now else self._arrived).append(lease)
        return self._hand_out(leases)

    def advance(self) -> None:
        """Starts transfers, in disk order, as far as the tier gives room; with room to spare, guesses."""
        while self._missing:
            if not self._start_first():
                return
        self._speculation.pump()

    def finish(self) -> None:
        """Ends every lease, and every transfer: those not begun yet never are. Idempotent."""
        self._stopped = True
        self._missing.clear()
        begun = [transfer for transfer in self._awaited.values() if not self._withdraw(transfer)]
        self._awaited.clear()
        self._release_current()
        for leases in (self._hits, self._arrived):
            while leases:
                self._vram.release(leases.popleft())
        while self._below:
            self._release_below(self._below.popleft())
        for transfer in begun:
            lease = self._settle(self._traffic.next_done((transfer,)))
            if lease:
                self._vram.release(lease)
        self._vram.go_first(self._brought)

    def _leave_below(self) -> None:
        """Takes from what is missing what stays in the slower tier: some of what only has to be moved, and whole.

        It does not come up behind its computing either: that copy would stand in the way of those that are waited
        for, now and in the next layer. Asked for again it is missing again, and comes up unless it is again the last.
        """
        dram, wanted = self._traffic.dram, self._wanted
        if self._split is None or dram is None:
            return
        missing = set(self._missing)
        moved = [
            key
            for key, level in wanted.items()
            if key in missing and not self._vram.level_of(key) and dram.level_of(key) >= level
        ]
        left = self._split([wanted[key] for key in moved])
        for key in moved[len(moved) - left :]:
            lease = dram.acquire(key, wanted[key])
            assert lease
            self._below.append(lease)
            self._missing.remove(key)
        self._traffic.counts.dram_hits += left
        self._traffic.counts.left_below += left

    def _take_over(self, key: ExpertKey, level: int) -> bool:
        """Waits for a guess under way instead of reading its expert again. False: it is read now.

        One that began at a lower level is waited for as well: only what it lacks is read then.
        """
        transfer = self._traffic.under_way.get(key)
        if transfer is None:
            return False
        if transfer.reservation.level >= level:
            self._traffic.workers.hasten(transfer)
        elif self._withdraw(transfer):
            return False
        self._awaited[key] = transfer
        return True

    def _next(self) -> Lease | None:
        """The next expert that is ready, waiting for one if need be; None: all have been handed out."""
        while True:
            self._interrupt.check()
            if self._below and not self._hits:
                self._collect()
            if self._hits or self._arrived:
                return (self._hits or self._arrived).popleft()
            if self._below:
                self._current_below = self._below.popleft()
                return self._current_below
            if not self._awaited and not self._missing:
                return None
            if not self._traffic.under_way:
                self._start_alone()
            lease = self._arrival(self._traffic.next_done(self._traffic.under_way.values()))
            if lease:
                return lease
            self.advance()

    def _collect(self) -> None:
        """Takes in every transfer that is done."""
        for transfer in self._traffic.done():
            if lease := self._arrival(transfer):
                self._arrived.append(lease)

    def _arrival(self, transfer: Transfer) -> Lease | None:
        """Settles a transfer that is done. None: it brings nothing to hand out."""
        key = transfer.key
        if self._awaited.pop(key, None) is None:
            self._speculation.land(transfer)
            return None
        lease = self._settle(transfer)
        if transfer.error and not transfer.ahead:
            self.finish()
            raise transfer.error
        if lease and lease.level >= self._wanted[key]:
            self._traffic.counts.dram_hits += transfer.from_below_alone
            return lease
        if lease:
            self._vram.release(lease)
        self._missing.append(key)
        return None

    def _settle(self, transfer: Transfer) -> Lease | None:
        return (self._speculation if transfer.ahead else self._traffic).settle(transfer)

    def _withdraw(self, transfer: Transfer) -> bool:
        return (self._speculation if transfer.ahead else self._traffic).withdraw(transfer)

    def _hand_out(self, leases: list[Lease]) -> list[Lease]:
        self._current += leases
        self._traffic.route.hand_out(leases)
        return leases

    def _release_current(self) -> None:
        if self._current:
            self._traffic.route.computed()
        while self._current:
            self._vram.release(self._current.pop())
        if self._current_below:
            self._release_below(self._current_below)
            self._current_below = None

    def _release_below(self, lease: Lease) -> None:
        assert self._traffic.dram
        self._traffic.dram.release(lease)

    def _start_alone(self) -> None:
        """Starts the first transfer where nothing is pinned or under way, and still there was no room.

        In a tier of one expert that is a promotion, whose new block cannot stand beside its old one.
        """
        key = self._missing[0]
        self._vram.drop(key)
        if not self._start_first():
            level = self._wanted[key]
            size = self._traffic.form.bytes_at(level)
            raise DoesNotFit(
                f"expert {key.expert} of layer {key.layer} was wanted at level {level}, {size:,} bytes",
                "the fastest tier is too small for it",
                "Raise --vram-limit, or ask for a lower level",
                minimum=size,
            )

    def _start_first(self) -> bool:
        """Starts the first transfer, with room taken back from guesses if need be. False: there is none."""
        key = self._missing[0]
        level = self._wanted[key]
        while (transfer := self._traffic.start(key, level, ahead=False)) is None:
            if not self._speculation.yield_room():
                return False
        self._missing.popleft()
        self._awaited[key] = transfer
        return True
