"""A fast tier in a device's memory: bytes are read into pinned memory, and the device copies them from there.

    SSD ── read ──► DRAM tier's block, or a staging buffer ── copy, event ──► VRAM tier's block ── publish

An expert is published as soon as the event behind its copies is recorded; its leases carry the event, kernels wait
for it. What a copy reads (a block of the DRAM tier, a staging buffer) is not used again before the event is done,
and what it writes only once the kernels that were launched before its start have passed: they may still read what
lay in the block.

The DRAM tier keeps what passes through it. An expert evicted from VRAM is forgotten there and no byte of it copied
back: its planes never change, so they are in DRAM still or on SSD, and a copy back would stand between a demand and
the block it waits for. What VRAM holds is not asked of DRAM, so it grows old there and makes room for what VRAM lacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from queue import SimpleQueue

from cache.base import Lease, Reservation, Tier
from cache.device_arena import Pinned
from prefetch.transfer import Load
from prefetch.transfer_path import Route
from storage.base import BlockKind, Blocks, ExpertKey, PlaneReader, ResidentForm, Source
from storage.device import Device, Event
from storage.errors import DoesNotFit


@dataclass(eq=False)
class _Buffer:
    """Pinned memory for one expert; `copied` is behind the last copy from it."""

    blocks: Blocks
    copied: Event | None = None


class Staging:
    """Pinned buffers for experts on their way from disk to a device. Thread-safe but for close.

    Args:
        device: that copies from them.
        kinds: of blocks that an expert may need.
        count: buffers; more of them than loads at a time, so that a read need not wait for the copy before.

    Raises:
        DoesNotFit: the system lets not even one buffer be pinned.
    """

    def __init__(self, device: Device, kinds: Sequence[BlockKind], count: int) -> None:
        self._arenas = Pinned(device, "staging")(dict.fromkeys(kinds, count))
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for index in range(min(arena.capacity for arena in self._arenas.values())):
            self._free.put(_Buffer({name: arena.view(index) for name, arena in self._arenas.items()}))
        if self._free.empty():
            size = sum(kind.size for kind in kinds)
            raise DoesNotFit(
                f"{size:,} bytes of memory for one expert were to be pinned",
                "the system refuses",
                "Raise the limit of locked memory (ulimit -l)",
                minimum=size,
            )

    def take(self) -> _Buffer:
        """A buffer that nobody copies from any more, the caller's until `give`; waits for one."""
        buffer = self._free.get()
        if buffer.copied:
            buffer.copied.wait()
            buffer.copied = None
        return buffer

    def give(self, buffer: _Buffer) -> None:
        """Takes a buffer back, behind all others: it has the latest copy under way."""
        self._free.put(buffer)

    def close(self) -> None:
        """Waits for every copy under way and gives the memory back. Idempotent; all buffers have been given back."""
        while not self._free.empty():
            self.take()
        for arena in self._arenas.values():
            arena.close()


class StagedRoute(Route):
    """See Route.

    Args:
        vram: the tier in the device's memory.
        dram: one in pinned memory, or None.
        form: of both tiers.
        device: copies.
        staging: for what finds no room in DRAM.

    Raises:
        ValueError: a form that changes blocks when it raises an expert, instead of adding to them.
    """

    def __init__(
        self, vram: Tier, dram: Tier | None, form: ResidentForm, device: Device, staging: Staging
    ) -> None:
        levels = [kind.level for kind in form.kinds]
        if any(form.demoted(high, low) != low for high, low in combinations(levels[::-1], 2)):
            raise ValueError("a device needs a form whose blocks never change")
        self.vram, self.dram, self.device, self.staging = vram, dram, device, staging
        self.launched: Event | None = None
        self._sources: deque[tuple[Event, Lease]] = deque()

    def load(self, key: ExpertKey, level: int) -> tuple[Load, bool] | None:
        """See Route. What DRAM has in full is only copied: that is enqueued at once."""
        self._release_sources()
        reservation = self.vram.reserve(key, level)
        if reservation is None:
            return None
        have, below, room = 0, None, None
        if self.dram:
            have = self.dram.level_of(key)
            below = self.dram.acquire(key, have) if have else None
            # Planes are complete from the lowest up: without those that VRAM has, DRAM cannot keep the next.
            if level > have >= (reservation.held.level if reservation.held else 0):
                room = self.dram.reserve(key, level)
        load = _Upload(self, reservation, below, room)
        return load, load.missing

    def hand_out(self, leases: Iterable[Lease]) -> None:
        """See Route."""
        self.device.await_copies(event for lease in leases for event in lease.arriving)

    def computed(self) -> None:
        """See Route. One event is enough for every block: kernels end in the order in which they are launched."""
        self.launched = self.device.computed()

    def keep(self, lease: Lease, until: Event) -> None:
        """Releases a lease of DRAM's once a copy from its blocks is done."""
        self._sources.append((until, lease))

    def close(self) -> None:
        """See Route."""
        self.staging.close()
        for event, _ in self._sources:
            event.wait()
        self._release_sources()

    def _release_sources(self) -> None:
        while self._sources and self._sources[0][0].done():
            lease = self._sources.popleft()[1]
            assert self.dram
            self.dram.release(lease)


class _Upload(Load):
    """See Load.

    Args:
        route: it belongs to.
        reservation: the device's blocks.
        below: a lease on what DRAM has of the expert, if that has something.
        room: DRAM's blocks for what is read, if it has room.
    """

    def __init__(
        self, route: StagedRoute, reservation: Reservation, below: Lease | None, room: Reservation | None
    ) -> None:
        self.reservation = reservation
        self._route, self._below, self._room = route, below, room
        self._held = max(below.level if below else 0, reservation.held.level if reservation.held else 0)
        self._after = route.launched
        self._copied: Event | None = None
        have = below.blocks if below else {}
        self.bytes_from_below = sum(len(block) for kind, block in reservation.into.items() if kind in have)
        self.link_bytes = self.bytes_from_below
        self.from_below_alone = not self.missing and below is not None

    @property
    def missing(self) -> bool:
        """Whether something has to be read."""
        return self.reservation.level > self._held

    def run(self, form: ResidentForm, reader: PlaneReader) -> int:
        """See Load. One read call, one batch of copies."""
        if not self.missing:
            self._copy({})
            return 0
        if self._room:
            return self._read(form, reader, self._room.into)
        buffer = self._route.staging.take()
        try:
            read = self._read(form, reader, buffer.blocks)
            buffer.copied = self._copied
        finally:
            self._route.staging.give(buffer)
        return read

    def end(self, *, complete: bool) -> tuple[Lease | None, int]:
        """See Load. Nothing is ever copied from VRAM into DRAM."""
        route, lease = self._route, None
        if complete:
            assert self._copied
            lease = route.vram.publish(self.reservation, self._copied)
        else:
            route.vram.abandon(self.reservation)
        if route.dram:
            self._end_below(route.dram)
        return lease, 0

    def _end_below(self, dram: Tier) -> None:
        sources = [self._below] if self._below else []
        if self._room and self._copied:
            sources.append(dram.publish(self._room))
        elif self._room:
            dram.abandon(self._room)
        for source in sources:
            if self._copied:
                self._route.keep(source, self._copied)
            else:
                dram.release(source)

    def _read(self, form: ResidentForm, reader: PlaneReader, blocks: Blocks) -> int:
        """Reads what is missing into host blocks, and has all copied that the reservation wants."""
        key, level = self.reservation.key, self.reservation.level
        into = {kind: blocks[kind] for kind in form.rewritten(self._held, level)}
        read = form.fill(reader, key, level, into, Source(self._held, {}) if self._held else None)
        self._copy(into)
        return read

    def _copy(self, read: Blocks) -> None:
        have = (self._below.blocks if self._below else {}) | read
        pairs = [(have[kind], block) for kind, block in self.reservation.into.items()]
        self._copied = self._route.device.copy(pairs, self._after)
