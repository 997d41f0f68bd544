"""A device in RAM that does its work late and out of order, and notices callers that do not wait for it.

Bytes that are copied arrive at some time between the call and a wait for its event, in any order that the contract
allows; until then the target holds poison. A kernel computes at its launch, from the bytes that are there then; the
blocks that it reads must keep their bytes until it ends, some time later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from random import Random

import torch
from recorded_launches import recorded, without_waits

from edgemoe.cache.blocks import FreeList
from edgemoe.cache.device_arena import on_device
from edgemoe.machine.device import Device, Event
from edgemoe.storage.base import BlockKind

POISON = 0xEE
DRIVER_BYTES = 1000
"""Bytes that the driver of the double takes in addition to its allocations."""


class Work(Event):
    """Pending work of a device: `act` changes the memory `touches`, once `after` is done."""

    def __init__(
        self,
        device: DoubleDevice,
        act: Callable[[], None],
        touches: Iterable[torch.Tensor],
        after: Event | None,
    ) -> None:
        self.device, self.act, self.after = device, act, after
        self.touches = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in touches]
        self.finished = False

    def overlaps(self, other: Work) -> bool:
        """Whether both change some of the same bytes. In a pool blocks of different kinds share them."""
        return any(
            start < their_end and their_start < end
            for start, end in self.touches
            for their_start, their_end in other.touches
        )

    def done(self) -> bool:
        self.device.go_on()
        return self.finished

    def wait(self) -> None:
        self.device.finish(self)


class DoubleDevice(Device):
    """A device whose copies and kernels end late, in an order drawn at random.

    Args:
        seed: seed of the random order.
        haste: chance that pending work is done in a call; 0: work is done by a wait alone.
        threaded: a thread does pending work all the time, in an order of its own.
        pinnable: bytes of host memory that may be pinned.
    """

    def __init__(
        self, seed: int = 0, *, haste: float = 0.3, threaded: bool = False, pinnable: int = 1 << 40
    ) -> None:
        self.place = torch.device("cpu")
        self.reads_host_memory = True
        self.waits = 0
        self.broken: list[str] = []
        self.pinned: dict[int, int] = {}
        self.batches = self.allocated = self.emptied = 0
        self.capped: int | None = None
        self._haste, self._pinnable = haste, pinnable
        self._random = Random(seed)
        self._pending: list[Work] = []
        self._kernel: Work | None = None
        self._lock = threading.RLock()
        self._begun: dict[int, list[Callable[[], None]]] = {}
        """Pool -> the capture whose first piece has run, and whose next piece comes next."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        if threaded:
            self._thread.start()

    @property
    def name(self) -> str:
        """Differs from the place's name, so that blocks on the double differ from blocks in RAM."""
        return "double"

    def allocate(self, size: int) -> torch.Tensor:
        self.allocated += size
        return torch.full((size,), POISON, dtype=torch.uint8)

    def pin(self, memory: memoryview) -> bool:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if address % 4096 or len(memory) % 4096:
            self.broken.append("pinned in the middle of a page")
        if sum(self.pinned.values()) + len(memory) > self._pinnable:
            return False
        self.pinned[address] = len(memory)
        return True

    def unpin(self, memory: memoryview) -> None:
        del self.pinned[torch.frombuffer(memory, dtype=torch.uint8).data_ptr()]

    def copy(self, pairs: Sequence[tuple[memoryview, torch.Tensor]], after: Event | None) -> Event:
        sources = [(torch.frombuffer(source, dtype=torch.uint8), target) for source, target in pairs]
        for source, _ in sources:
            if not self._is_pinned(source):
                self.broken.append("copied from memory that is not pinned as a whole")
        targets = [target for _, target in pairs]

        def bring() -> None:
            for source, target in self._random.sample(sources, len(sources)):
                target.copy_(source)

        self.poison(targets, after)
        self.batches += 1
        return self._later(bring, targets, after)

    def await_copies(self, events: Iterable[Event]) -> None:
        for event in events:
            event.wait()

    def computed(self) -> Event:
        return self._kernel or self._later(lambda: None, (), None)

    def await_computed(self) -> None:
        self.waits += 1
        if self._kernel:
            self._kernel.wait()

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def capture_pieces(
        self, launch: Callable[[Callable[[], None]], None], pool: object | None = None
    ) -> list[Callable[[], None]]:
        pieces = recorded(launch)
        if pool is None:
            return pieces
        return [partial(self._run_piece, id(pool), pieces, number) for number in range(len(pieces))]

    def _run_piece(self, pool: int, pieces: list[Callable[[], None]], number: int) -> None:
        """Runs a piece of a capture; memory of its pool has what earlier pieces of the same capture left there."""
        begun = self._begun.pop(pool, None)
        if begun is not None and begun is not pieces and len(pieces) == 1:
            self.broken.append("a launch used memory of a pool between two pieces of another capture")
        if number + 1 < len(pieces):
            self._begun[pool] = pieces
        pieces[number]()

    def without_waits(self) -> AbstractContextManager[None]:
        return without_waits()

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.waits += 1
        if self._kernel:
            self._kernel.wait()
        return [tensor.clone() for tensor in tensors]

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        with torch.inference_mode(False):  # the copy may end in another mode
            now, there = tensor.clone(), torch.full(tensor.shape, POISON, dtype=tensor.dtype)
        return there, self._later(lambda: there.copy_(now), (), self._kernel)

    def free_unused(self) -> None:
        self.emptied += 1

    def cap(self, size: int | None) -> None:
        self.capped = size

    def driver_bytes(self) -> int:
        return DRIVER_BYTES

    def available_bytes(self) -> int:
        return 1 << 40

    def peak(self) -> int:
        return self.allocated + DRIVER_BYTES

    def launch(self, blocks: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """Launches a kernel that reads blocks; returns their bytes, which must stay until it ends."""
        read = {kind: block.numpy().tobytes() for kind, block in blocks.items()}

        def end() -> None:
            if any(block.numpy().tobytes() != read[kind] for kind, block in blocks.items()):
                self.broken.append("a block was overwritten under a kernel")

        self._kernel = self._later(end, (), self._kernel)
        return read

    def poison(self, blocks: Iterable[torch.Tensor], after: Event | None) -> None:
        """Overwrites memory that no work may read any more, once `after` is done."""
        blocks = list(blocks)

        def spoil() -> None:
            for block in blocks:
                block.fill_(POISON)

        work = self._later(spoil, blocks, after)
        if after is None or (isinstance(after, Work) and after.finished):
            self.finish(work)

    def go_on(self) -> None:
        """Does some of the pending work, by chance."""
        with self._lock:
            while self._pending and self._random.random() < self._haste:
                self.finish(self._random.choice(self._pending))

    def catch_up(self) -> None:
        """Does all pending work, in the order of the calls."""
        with self._lock:
            while self._pending:
                self.finish(self._pending[0])

    def finish(self, work: Work) -> None:
        """Does a piece of work, after the work that must come before it."""
        with self._lock:
            if work.finished:
                return
            if work.after:
                work.after.wait()
            # Copies into the same bytes are in the order of the calls.
            for earlier in self._pending[: self._pending.index(work)]:
                if earlier.overlaps(work):
                    self.finish(earlier)
            self._pending.remove(work)
            work.act()
            work.finished = True

    def end(self) -> None:
        """Does all pending work, and asserts that no rule of the contract was broken."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            while self._pending:
                self.finish(self._random.choice(self._pending))
        assert self.broken == []

    def _later(self, act: Callable[[], None], touches: Iterable[torch.Tensor], after: Event | None) -> Work:
        work = Work(self, act, touches, after)
        with self._lock:
            self._pending.append(work)
        self.go_on()
        return work

    def _is_pinned(self, source: torch.Tensor) -> bool:
        at = source.data_ptr()
        return any(start <= at and at + len(source) <= start + size for start, size in self.pinned.items())

    def _work(self) -> None:
        while not self._closed.wait(0.0005):
            with self._lock:
                if self._pending:
                    self.finish(self._random.choice(self._pending))


class _PoisonedArena(FreeList):
    def __init__(self, blocks: Sequence[torch.Tensor], device: DoubleDevice) -> None:
        super().__init__(blocks)
        self._device = device

    def free(self, index: int) -> None:
        super().free(index)
        self._device.poison([self.views[index]], self._device.computed())


def poisoned(device: DoubleDevice, counts: Mapping[BlockKind, int]) -> dict[str, FreeList]:
    """Makes arenas whose free blocks are poisoned as soon as the kernels launched before have ended."""
    return {name: _PoisonedArena(arena.views, device) for name, arena in on_device(device, counts).items()}
