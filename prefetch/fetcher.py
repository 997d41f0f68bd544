"""The expert source without foresight: what a layer asks for is pinned, or read now.

    vram.acquire ── hit ──────────────────────────────────────────────► lease
         │ miss
    dram.acquire, vram.reserve ── worker: spill victims, fill ── vram.publish ──► lease

Tiers change in the engine's thread only; workers do nothing but move bytes. So what a tier holds never
changes between a question and the act that follows from it, and no order of events can put an expert in
both tiers or lose a block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

from cache.base import Lease, Reservation, Tier
from prefetch.base import ExpertSource, TransferCounts
from prefetch.interrupts import Interrupt, deferred_interrupt
from prefetch.transfer import Spill, Transfer
from prefetch.workers import Workers
from storage.base import ExpertKey, PlaneReader, ResidentForm
from storage.errors import DoesNotFit


class Fetcher(ExpertSource):
    """See ExpertSource. One stream at a time; while one is open, nobody else changes the tiers.

    The tiers are exclusive: an expert moves up when it is asked for, and down when it is evicted whole, if
    there is room. An expert that has lost its upper planes only stays up, and those are forgotten.

    Args:
        vram: the tier that leases are on.
        dram: a slower tier in the same form, or None.
        form: of both tiers.
        reader: of the store. Not closed by this.
        workers: threads that read and copy.

    Raises:
        ValueError: workers is below 1.
    """

    def __init__(
        self, vram: Tier, dram: Tier | None, form: ResidentForm, reader: PlaneReader, *, workers: int = 4
    ) -> None:
        self._vram = vram
        self._dram = dram
        self._form = form
        self._reader = reader
        self._workers = Workers(workers)
        self._counts = TransferCounts()

    @contextmanager
    def stream(self, wanted: Mapping[ExpertKey, int]) -> Iterator[Iterator[Lease]]:
        """See ExpertSource.

        An error that is met only while the context is being left early is not raised: nobody waits for
        that expert any more, and it is read again when it is next asked for. Ctrl-C within the context is
        raised when the next lease is asked for, or by its end.

        Raises:
            DamagedData: as ExpertSource.stream.
            DoesNotFit: the tier cannot hold one expert at the asked level.
            ValueError: closed.
        """
        if self._workers.closed:
            raise ValueError("the fetcher is closed")
        with deferred_interrupt() as interrupt:
            stream = _Stream(self, wanted, interrupt)
            try:
                stream.begin()
                yield stream.leases()
            finally:
                stream.finish()

    def take_counts(self) -> TransferCounts:
        """See ExpertSource."""
        taken, self._counts = self._counts, TransferCounts()
        return taken

    def close(self) -> None:
        """See ExpertSource."""
        self._workers.close()


class _Stream:
    """One call of Fetcher.stream. Everything but `_work` runs in the engine's thread."""

    def __init__(self, fetcher: Fetcher, wanted: Mapping[ExpertKey, int], interrupt: Interrupt) -> None:
        self._vram, self._dram, self._form = fetcher._vram, fetcher._dram, fetcher._form
        self._reader, self._workers, self._counts = fetcher._reader, fetcher._workers, fetcher._counts
        self._interrupt = interrupt
        self._wanted = wanted
        self._hits: deque[Lease] = deque()
        self._missing: deque[ExpertKey] = deque()
        self._current: Lease | None = None
        self._in_flight: dict[ExpertKey, Transfer] = {}
        self._spilling: set[ExpertKey] = set()
        self._completed: SimpleQueue[Transfer] = SimpleQueue()
        self._stopped = False

    def begin(self) -> None:
        """Pins every hit, so that no miss evicts one, and starts the misses."""
        self._pin_hits()
        self._submit()

    def leases(self) -> Iterator[Lease]:
        """Hits, then arrivals; each valid until the next."""
        while not self._stopped and (lease := self._next()) is not None:
            self._current = lease
            yield lease
            self._release_current()
            self._submit()

    def finish(self) -> None:
        """Ends every lease, and every transfer: those not begun yet never are. Idempotent."""
        self._stopped = True
        self._missing.clear()
        self._release_current()
        while self._hits:
            self._vram.release(self._hits.popleft())
        for transfer in list(self._in_flight.values()):
            # An interrupt may have lost a notice after it was taken from the queue; `done` is never lost.
            while not transfer.done:
                self._completed.get()
            lease = self._settle(transfer)
            if lease:
                self._vram.release(lease)

    def _pin_hits(self) -> None:
        levels = self._counts.levels
        for key in sorted(self._wanted):
            level = self._wanted[key]
            levels[level] = levels.get(level, 0) + 1
            lease = self._vram.acquire(key, level)
            if lease:
                self._hits.append(lease)
            else:
                self._missing.append(key)
        self._counts.requests += len(self._wanted)
        self._counts.vram_hits += len(self._hits)

    def _next(self) -> Lease | None:
        """The next expert that is ready, waiting for one if need be; None: all have been handed out."""
        self._interrupt.check()
        if self._hits:
            return self._hits.popleft()
        if not self._in_flight:
            if not self._missing:
                return None
            self._submit_alone()
        transfer = self._completed.get()
        lease = self._settle(transfer)
        if transfer.error:
            self.finish()
            raise transfer.error
        return lease

    def _release_current(self) -> None:
        if self._current:
            lease, self._current = self._current, None
            self._vram.release(lease)

    def _submit(self) -> None:
        """Starts transfers, in disk order, as far as the tier gives room."""
        while self._missing and self._submit_first():
            pass

    def _submit_alone(self) -> None:
        """Starts the first transfer where nothing is pinned or under way, and still there was no room.

        In a tier of one expert that is a promotion, whose new block cannot stand beside its old one.
        """
        key = self._missing[0]
        self._vram.drop(key)
        if not self._submit_first():
            level = self._wanted[key]
            size = self._form.bytes_at(level)
            raise DoesNotFit(
                f"expert {key.expert} of layer {key.layer} was wanted at level {level}, {size:,} bytes",
                "the fastest tier is too small for it",
                "Raise --vram-limit, or ask for a lower level",
                minimum=size,
            )

    def _submit_first(self) -> bool:
        key = self._missing[0]
        below, level = self._below(key, self._wanted[key])
        reservation = self._vram.reserve(key, level)
        if reservation is None:
            if below and self._dram:
                self._dram.release(below)
            return False
        self._missing.popleft()
        transfer = Transfer(key, reservation, below, self._spills(reservation))
        self._in_flight[key] = transfer
        self._workers.submit(partial(self._work, transfer))
        return True

    def _below(self, key: ExpertKey, level: int) -> tuple[Lease | None, int]:
        """A lease on what DRAM has of the expert, and the level it then comes up to.

        That is above the asked one where blocks of the asked one are not among those DRAM has.
        """
        have = self._dram.level_of(key) if self._dram else 0
        if self._dram is None or not have:
            return None, level
        return self._dram.acquire(key, have), self._form.demoted(have, level) if have > level else level

    def _spills(self, reservation: Reservation) -> list[Spill]:
        """Room in DRAM for the victims that VRAM has nothing left of; what finds none is forgotten."""
        spills: list[Spill] = []
        if self._dram is None:
            return spills
        for victim in reservation.victims:
            # A victim whose spill is under way came back and was evicted again; the first spill may stay.
            if self._vram.level_of(victim.key) or victim.key in self._spilling:
                continue
            room = self._dram.reserve(victim.key, victim.level)
            if room:
                self._spilling.add(victim.key)
                spills.append(Spill(victim, room))
        return spills

    def _work(self, transfer: Transfer) -> None:
        """In a worker."""
        try:
            if not self._stopped:
                transfer.run(self._form, self._reader)
        except BaseException as error:  # the engine's thread raises it
            transfer.error = error
        transfer.done = True
        self._completed.put(transfer)

    def _settle(self, transfer: Transfer) -> Lease | None:
        """Makes a transfer that is done visible in the tiers. None: it failed, or never began."""
        del self._in_flight[transfer.key]
        for spill in transfer.spills:
            self._settle_spill(spill, transfer.spilled)
        lease = None
        if transfer.read is None:
            self._vram.abandon(transfer.reservation)
        else:
            self._count(transfer, transfer.read)
            lease = self._vram.publish(transfer.reservation)
        if self._dram:
            if transfer.below:
                self._dram.release(transfer.below)
            if lease:
                self._dram.drop(transfer.key)
        return lease

    def _settle_spill(self, spill: Spill, copied: bool) -> None:
        if self._dram is None:
            return
        key = spill.victim.key
        self._spilling.remove(key)
        # One that is on its way back stays here until it has arrived: its own settling drops it.
        if copied and not self._vram.level_of(key):
            self._counts.spilled_bytes += self._form.bytes_at(spill.victim.level)
            self._dram.release(self._dram.publish(spill.room))
        else:
            self._dram.abandon(spill.room)

    def _count(self, transfer: Transfer, read: int) -> None:
        self._counts.ssd_bytes += read
        self._counts.dram_bytes += transfer.bytes_from_below
        if transfer.source is transfer.below is not None and not read:
            self._counts.dram_hits += 1
