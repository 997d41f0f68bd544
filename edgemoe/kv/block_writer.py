"""Writes KV blocks into a shared directory, on an event loop of its own thread, while steps run.

Rows are written straight from their sequences, which stay as they are until `release` returns; from a device's memory
they are copied block by block, on the writer's thread. One process at a time
writes, under the directory's lock, so files that are incomplete then belong to a process that was killed.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import aiofiles
import aiofiles.os

from edgemoe.errors import StoreBusy
from edgemoe.kv import block_files, blocks
from edgemoe.kv.block_files import Block, Entry
from edgemoe.kv.blocks import Tokens, window_digest
from edgemoe.kv.sequence import SequenceKV
from edgemoe.storage.files.atomic import PARTIAL, partial_file, write_all
from edgemoe.storage.files.lock import StoreLock

PATIENCE = 10.0
"""Seconds in which a sequence that must leave waits for its blocks to be written; computing them took longer."""

LOCK_PAUSE = 0.05
"""Seconds between two attempts to write where another process writes."""


@dataclass(eq=False)
class Chain:
    """Blocks of a sequence that are to be on disk.

    Args:
        sequence: the sequence that has the rows.
        hashes: the hashes of its beginnings (kv.blocks.chain).
        tokens: int64 [n], at least the tokens of all blocks.
        windowed: blocks of which layers with a window have all rows.
        cancelled: no further block is wanted; its rows may change soon.
    """

    sequence: SequenceKV
    hashes: Sequence[bytes]
    tokens: Tokens
    windowed: frozenset[int] = frozenset()
    cancelled: bool = False

    def pieces(self) -> Iterator[Piece]:
        """Yields the parts that have files of their own, the first block first."""
        for index, digest in enumerate(self.hashes[1:]):
            yield Piece(index, digest, windowed=False)
            if index in self.windowed:
                yield Piece(index, window_digest(digest), windowed=True)


@dataclass(frozen=True)
class Piece:
    """The part of a block that one file has.

    Args:
        index: the number of the block.
        digest: names the file.
        windowed: True: the rows of layers with a window; False: of all other layers.
    """

    index: int
    digest: bytes
    windowed: bool


class BlockWriter:
    """Writes the blocks of sequences in the background. `offer`, `release`, `flush` and `close` are for one thread.

    Args:
        directory: the directory of the blocks, which exists.
        limit: most bytes of all blocks in it.
        failed: called with an error of a chain, on the writer's thread.

    Attributes:
        used_bytes: bytes of all blocks in the directory, when it was last listed or written to.
        evicted: files that have left for others.
        written, written_bytes: files that are complete.
        stuck: whether a write has not returned; nothing is written any more.
    """

    def __init__(self, directory: Path, limit: int, secret: int, failed: Callable[[Exception], None]) -> None:
        self._directory, self._limit, self._secret, self._failed = directory, limit, secret, failed
        self.used_bytes = self.evicted = self.written = self.written_bytes = 0
        self.stuck = False
        self._offered = dict[SequenceKV, list[tuple[Chain, Future[None]]]]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def trim(self) -> None:
        """Removes the least recently used files until the others fit the limit, unless another process writes.

        Raises:
            OSError, UserError: the directory cannot be locked, listed or changed.
        """
        try:
            with StoreLock(self._directory, exclusive=True):
                room = Room(self._directory, self._limit, time.time_ns())
                room.take(0)
                self.used_bytes, self.evicted = room.used_bytes, self.evicted + room.evicted
        except StoreBusy:
            pass

    def offer(self, chain: Chain) -> None:
        """Has the blocks of a chain written that have no file yet."""
        if self._loop is None:
            self._start()
        assert self._loop
        written = asyncio.run_coroutine_threadsafe(self._write(chain), self._loop)
        pending = [each for each in self._offered.get(chain.sequence, ()) if not each[1].done()]
        self._offered[chain.sequence] = [*pending, (chain, written)]

    def release(self, sequence: SequenceKV) -> None:
        """Waits until no block of a sequence is being written; blocks that take longer than PATIENCE are given up."""
        self._wait(self._offered.pop(sequence, []))

    def flush(self) -> None:
        """Waits until everything offered is written, or given up after PATIENCE."""
        offered, self._offered = self._offered, {}
        self._wait([each for chains in offered.values() for each in chains])

    def close(self) -> None:
        """Flushes, and ends the thread. Idempotent."""
        if self._thread and self._loop:
            self.flush()
            self._loop.call_soon_threadsafe(self._loop.stop)
            if not self.stuck:
                self._thread.join()
            self._thread = None

    def _start(self) -> None:
        self._loop, self._turn = asyncio.new_event_loop(), asyncio.Lock()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop,), name="edgemoe-prefix-cache", daemon=True
        )
        self._thread.start()

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        # One thread: a file is closed after its last write, hung or not.
        loop.set_default_executor(ThreadPoolExecutor(1))
        loop.run_forever()
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    def _wait(self, chains: Sequence[tuple[Chain, Future[None]]]) -> None:
        _, late = wait([written for _, written in chains], PATIENCE)
        for chain, _ in chains:
            chain.cancelled = True
        if late and wait(late, PATIENCE).not_done:  # not even one block was written meanwhile
            self.stuck = True
            self._failed(TimeoutError(f"a write takes more than {PATIENCE:g} s, so none follows"))

    async def _write(self, chain: Chain) -> None:
        """Writes the blocks of a chain that have no file; marks the others as used."""
        async with self._turn:
            try:
                now, missing = time.time_ns(), list[Piece]()
                for piece in chain.pieces():
                    path = block_files.path_of(self._directory, piece.digest)
                    if path.exists():
                        block_files.touch(path, now, piece.index)
                    else:
                        missing.append(piece)
                if missing and (lock := await self._locked(chain)):
                    with lock:
                        await self._write_missing(chain, missing, now)
            except Exception as error:  # its answer has been given; a later prompt computes the KV again
                self._failed(error)

    async def _locked(self, chain: Chain) -> StoreLock | None:
        """Locks the directory against other writers; None where the chain is cancelled before."""
        while not chain.cancelled:
            try:
                return StoreLock(self._directory, exclusive=True)
            except StoreBusy:
                await asyncio.sleep(LOCK_PAUSE)
        return None

    async def _write_missing(self, chain: Chain, missing: Sequence[Piece], now: int) -> None:
        """Writes files of blocks, the first first, as far as they fit the limit. The directory is locked."""
        room, evicted = Room(self._directory, self._limit, now - len(chain.hashes)), self.evicted
        for piece in missing:
            end = (piece.index + 1) * blocks.BLOCK
            block = Block(chain.hashes[0], piece.digest, chain.tokens[:end], self._secret)
            path = block_files.path_of(self._directory, block.digest)
            if chain.cancelled or path.exists():
                continue
            rows = chain.sequence.rows(end - blocks.BLOCK, end, windowed=piece.windowed).load()
            size = block_files.header_bytes(end) + sum(map(len, rows))
            fits = room.take(size)
            self.used_bytes, self.evicted = room.used_bytes, evicted + room.evicted
            if not fits or not await _write_block(chain, path, block, rows, size):
                return
            block_files.touch(path, now, piece.index)
            self.written += 1
            self.written_bytes += size


class _Cancelled(Exception):
    """A file is not wanted any more."""


async def _write_block(chain: Chain, path: Path, block: Block, rows: Sequence[memoryview], size: int) -> bool:
    """Writes a file; False, and no file, where the chain was cancelled meanwhile, so that rows may have changed."""
    try:
        with partial_file(path, size) as partial:
            async with aiofiles.open(partial, "xb", buffering=0, opener=_private) as file:
                await _write_rows(file.fileno(), block, rows)
            if chain.cancelled:
                raise _Cancelled
    except _Cancelled:
        return False
    return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


@aiofiles.os.wrap  # type: ignore[untyped-decorator]  # aiofiles ships no types
def _write_rows(fd: int, block: Block, rows: Sequence[memoryview]) -> None:
    """Writes and syncs a whole file, on a thread of the loop's pool."""
    write_all(fd, block.header(sum(map(len, rows)), block_files.checksum(rows, block.secret)))
    for part in rows:
        write_all(fd, part)
    os.fsync(fd)


class Room:
    """The bytes of a locked directory, and the files that leave for new ones.

    Args:
        directory: the locked directory; files of killed writers are removed from it.
        limit: bytes.
        before: files whose last use came before this time, in nanoseconds, may leave.

    Attributes:
        used_bytes: bytes of all files.
        evicted: files that have left.
    """

    def __init__(self, directory: Path, limit: int, before: int) -> None:
        self._limit, self.evicted = limit, 0
        whole = list[Entry]()
        for each in block_files.entries(directory):
            if each.path.name.endswith(PARTIAL):
                each.path.unlink(missing_ok=True)
            else:
                whole.append(each)
        self.used_bytes = sum(each.size for each in whole)
        self._old = sorted((each for each in whole if each.used_at < before), reverse=True)
        """The oldest last."""

    def take(self, size: int) -> bool:
        """Frees bytes for a file; False where all that may leave are too few."""
        size = block_files.on_disk(size)
        while self._old and self.used_bytes + size > self._limit:
            oldest = self._old.pop()
            oldest.path.unlink(missing_ok=True)
            self.used_bytes -= oldest.size
            self.evicted += 1
        fits = self.used_bytes + size <= self._limit
        self.used_bytes += size if fits else 0
        return fits
