"""The path into a device's memory: bytes are read into pinned memory, and the device copies them from there.

    SSD ── read ──► DRAM tier's block, or a staging buffer ── copy, event ──► VRAM tier's block ── publish

An expert is published as soon as the event after its copies is recorded; its leases carry the event, and kernels wait
for it. The source of a copy (a block of the DRAM tier, a staging buffer) is not used again before that event, and its
target is written only after the kernels launched before it, which may still read the block's last content.

The DRAM tier keeps every expert that passes through it. An expert evicted from VRAM is not copied back: its planes
never change, so they are in DRAM or on SSD, and a copy back would delay a demanded one. Experts that VRAM has are not
requested from DRAM, so they grow old there and are evicted for experts that VRAM lacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from queue import SimpleQueue

from edgemoe.cache.base import Lease, Reservation
from edgemoe.cache.device_arena import pinned
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import DoesNotFit
from edgemoe.machine.device import Device, Event
from edgemoe.prefetch.transfer_path import Load, TransferPath
from edgemoe.storage.base import BlockKind, Blocks, ExpertKey, PlaneReader, ResidentForm, Source
from edgemoe.storage.sizes import format_size


@dataclass(eq=False)
class _Buffer:
    """Pinned memory for one expert; `copied` is recorded after the last copy from it."""

    blocks: Blocks
    copied: Event | None = None


class Staging:
    """Pinned buffers for experts on their way from disk to a device. Thread-safe but for close.

    Args:
        device: the device that copies from them.
        kinds: kinds of blocks that an expert may need.
        count: number of buffers; more than loads at a time, so that a read does not wait for the copy before it.

    Raises:
        DoesNotFit: the system pins not even one buffer.
    """

    def __init__(self, device: Device, kinds: Sequence[BlockKind], count: int) -> None:
        self._arenas = pinned(device, "staging", dict.fromkeys(kinds, count))
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for index in range(min(arena.capacity for arena in self._arenas.values())):
            self._free.put(_Buffer({name: arena.views[index] for name, arena in self._arenas.items()}))
        if self._free.empty():
            size = sum(kind.size for kind in kinds)
            raise DoesNotFit(
                f"{format_size(size)} of pinned memory for one expert",
                "a refusal of the system",
                "raise the limit of locked memory (ulimit -l)",
                minimum=size,
            )

    def take(self) -> _Buffer:
        """Waits for a buffer without a copy under way; it is the caller's until `give`."""
        buffer = self._free.get()
        if buffer.copied:
            buffer.copied.wait()
            buffer.copied = None
        return buffer

    def give(self, buffer: _Buffer) -> None:
        """Returns a buffer to the end of the queue: its copy is the latest."""
        self._free.put(buffer)

    def close(self) -> None:
        """Waits for every copy under way and frees the memory. Idempotent; every buffer has been returned."""
        while not self._free.empty():
            self.take()
        for arena in self._arenas.values():
            arena.close()


class DevicePath(TransferPath):
    """Implements TransferPath.

    Args:
        vram: the tier in the device's memory.
        dram: a tier in pinned memory; None: there is none.
        form: the form of experts in both tiers.
        device: the device that copies.
        staging: buffers of experts that have no free blocks in DRAM.

    Raises:
        ValueError: a form that changes blocks when it raises an expert, instead of adding to them.
    """

    asynchronous = True

    def __init__(
        self, vram: PlaneTier, dram: PlaneTier | None, form: ResidentForm, device: Device, staging: Staging
    ) -> None:
        levels = [kind.level for kind in form.kinds]
        pairs = combinations(levels[::-1], 2)
        if any(form.builds_on(low, high) and form.demoted(high, low) != low for high, low in pairs):
            raise ValueError("a device needs a form whose blocks never change")
        self.vram, self.dram, self.form, self.device, self.staging = vram, dram, form, device, staging
        self.launched: Event | None = None
        self._sources: deque[tuple[Event, Lease]] = deque()

    def load(self, key: ExpertKey, level: int, *, evict: bool = True) -> Load | None:
        """Reserves blocks. An expert that DRAM has whole is only copied: its load is instant."""
        self._release_sources()
        reservation = self.vram.reserve(key, level, keep_victims=False, evict=evict)
        if reservation is None:
            return None
        have, in_dram, into_dram = 0, None, None
        if self.dram:
            have = self.dram.level_of(key)
            in_dram = self.dram.acquire(key, have) if self.form.builds_on(have, level) else None
            # Planes are complete from the lowest up: without the planes that VRAM has, DRAM cannot keep the next.
            if level > have >= (reservation.lease.level if reservation.lease else 0):
                into_dram = self.dram.reserve(key, level, keep_victims=False, evict=evict)
        return _Upload(self, reservation, in_dram, into_dram)

    def hand_out(self, leases: Iterable[Lease]) -> None:
        """Makes kernels wait for the copies of leases."""
        self.device.await_copies(event for lease in leases for event in lease.arriving)

    def computed(self) -> None:
        """Records one event for every block: kernels end in the order in which they were launched."""
        self.launched = self.device.computed()

    def keep(self, lease: Lease, until: Event) -> None:
        """Releases a lease of the DRAM tier once a copy from its blocks is done."""
        self._sources.append((until, lease))

    def close(self) -> None:
        """Waits for copies and releases their sources."""
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
    """Implements Load.

    Args:
        path: the path that it belongs to.
        reservation: the device's blocks.
        in_dram: a lease on the planes that DRAM has of the expert; None: it has none.
        into_dram: DRAM's blocks for the planes that are read; None: it has no free blocks.
    """

    def __init__(
        self, path: DevicePath, reservation: Reservation, in_dram: Lease | None, into_dram: Reservation | None
    ) -> None:
        self.reservation = reservation
        self._path, self._in_dram, self._into_dram = path, in_dram, into_dram
        self._held = max(in_dram.level if in_dram else 0, reservation.lease.level if reservation.lease else 0)
        self._after = path.launched
        self._copied: Event | None = None
        have = in_dram.blocks if in_dram else {}
        self.dram_bytes = sum(len(block) for kind, block in reservation.into.items() if kind in have)
        self.link_bytes = self.dram_bytes
        self.instant = reservation.level <= self._held
        self.dram_alone = self.instant and in_dram is not None

    @property
    def landed(self) -> bool:
        """Whether the device has made the copies; they are enqueued when `run` ends."""
        return self._copied is None or self._copied.done()

    def run(self, form: ResidentForm, reader: PlaneReader) -> int:
        """Reads what is missing in one call, and enqueues the copies as one batch."""
        if self.instant:
            self._copy({})
            return 0
        if self._into_dram:
            return self._read(form, reader, self._into_dram.into)
        buffer = self._path.staging.take()
        try:
            read = self._read(form, reader, buffer.blocks)
            buffer.copied = self._copied
        finally:
            self._path.staging.give(buffer)
        return read

    def end(self, *, complete: bool) -> tuple[Lease | None, int]:
        """Publishes or abandons both tiers' blocks. Nothing is ever copied from VRAM into DRAM."""
        path, lease = self._path, None
        if complete:
            assert self._copied
            lease = path.vram.publish(self.reservation, self._copied)
        else:
            path.vram.abandon(self.reservation)
        if path.dram:
            self._end_dram(path.dram)
        return lease, 0

    def _end_dram(self, dram: PlaneTier) -> None:
        sources = [self._in_dram] if self._in_dram else []
        if self._into_dram and self._copied:
            sources.append(dram.publish(self._into_dram))
        elif self._into_dram:
            dram.abandon(self._into_dram)
        for source in sources:
            if self._copied:
                self._path.keep(source, self._copied)
            else:
                dram.release(source)

    def _read(self, form: ResidentForm, reader: PlaneReader, blocks: Blocks) -> int:
        """Reads what is missing into host blocks, and enqueues the copies that the reservation needs."""
        key, level = self.reservation.key, self.reservation.level
        into = {kind: blocks[kind] for kind in form.rewritten(self._held, level)}
        read = form.fill(reader, key, level, into, Source(self._held, {}) if self._held else None)
        self._copy(into)
        return read

    def _copy(self, read: Blocks) -> None:
        have = (self._in_dram.blocks if self._in_dram else {}) | read
        pairs = [(have[kind], block) for kind, block in self.reservation.into.items()]
        self._copied = self._path.device.copy(pairs, self._after)
