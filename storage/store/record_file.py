"""Files of records: written one record after another, and read into the caller's buffers, past the page cache."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Self

import xxhash

from edgemoe.errors import ReadFailed, TruncatedFile
from edgemoe.storage.base import BLOCK, ByteRange, PlaneReader
from edgemoe.storage.files.atomic import replacing, write_all
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.files.retry import Retries, open_regular, read_errors
from edgemoe.storage.files.unbuffered import aligned, bypass_cache, forget, use_cache

if TYPE_CHECKING:
    from edgemoe.storage.record.planes import Bytes

_log = logging.getLogger("edgemoe")

VERIFY = "run `edgemoe verify` on the store; convert the model again if it is damaged"
"""Action of errors about a record."""


def write_records(
    path: Path,
    sizes: Sequence[int],
    parts: Sequence[ByteRange] | None,
    records: Iterable[Bytes],
    header: Callable[[Sequence[tuple[int, ...]]], bytes],
) -> list[tuple[int, ...]]:
    """Writes a file of records atomically, with one record in memory at a time.

    Args:
        path: the path of the file.
        sizes: bytes of each record.
        parts: the parts of a record, each with a checksum of its own; None: a record has one checksum.
        records: uint8 [size] each; BLOCK-aligned ones are written past the page cache.
        header: makes the file's start from the checksums of every record; its length does not depend on them, and it is
            called a second time once the last record is taken.

    Returns:
        xxh3_64 of every part of every record.

    Raises:
        ValueError: another number or length of records; no file is written.
        DoesNotFit, WriteFailed: the disk is full, or refuses a write.
    """
    first = _aligned(header([(0,) * (len(parts) if parts else 1)] * len(sizes)))
    checksums: list[tuple[int, ...]] = []
    with replacing(path, len(first) + sum(sizes)) as fd:
        # Past the cache, records are written as they arrive instead of all at once by the file's fsync.
        bypass_cache(fd)
        write_all(fd, first.data)
        for size, record in zip(sizes, records, strict=True):
            if record.nbytes != size:
                raise ValueError(f"expected a record of {size} bytes, got {record.nbytes}")
            data = record.data
            spans = parts or (ByteRange(0, size),)
            checksums.append(tuple(xxhash.xxh3_64_intdigest(data[span.offset : span.end]) for span in spans))
            write_all(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        write_all(fd, _aligned(header(checksums)).data)
    return checksums


def _aligned(raw: bytes) -> Bytes:
    out = aligned(len(raw))
    out.data[:] = raw
    return out


class RecordFile:
    """A file of records, open for reads by any number of threads.

    Args:
        path: the path of the file.
        end: bytes that it must have.
        content: its contents, for messages.
        action: the advice in messages of the errors.
        resources: closes the file.
        buffered: called with the path when the file system refuses to go past the page cache.

    Attributes:
        path: the path of the file.
        direct: whether reads go past the page cache; any thread may set it to False, and never back to True.
        bytes_read: bytes that all threads have read.
        retries: attempts after failures, of all reads that succeeded in the end.

    Raises:
        MissingTensor, TruncatedFile: the file is missing, or shorter than `end`.
        ReadFailed: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        end: int,
        content: str,
        action: str,
        resources: ExitStack,
        buffered: Callable[[Path], None],
    ) -> None:
        self.path, self._action, self._buffered, self.direct = path, action, buffered, True
        self._lock, self.bytes_read, self.retries = threading.Lock(), 0, 0
        with read_errors(content, action):
            self._fd = resources.enter_context(open_regular(path)).fileno()
        if (size := os.fstat(self._fd).st_size) < end:
            raise TruncatedFile(content, f"{size} bytes instead of {end}", action)
        if not bypass_cache(self._fd):
            self._go_buffered()

    def fill(self, span: ByteRange, into: Sequence[memoryview], content: str) -> None:
        """Reads `span`, if possible by one preadv; goes on where a short read stopped.

        Args:
            span: the span of the file, whole blocks.
            into: writable buffers, BLOCK-aligned in address and length, of the span's length together.
            content: the data that is read, for messages.

        Raises:
            TruncatedFile, ReadFailed: with path and offset.
        """
        done, retries = 0, None
        while done < span.length:
            direct = self.direct
            try:
                rest = list(pieces(into, done, span.length - done)) if done else into
                got = os.preadv(self._fd, rest, span.offset + done)
                # A short read was interrupted, or cut by the end of the file.
                if done + got < span.length and (size := os.fstat(self._fd).st_size) < span.end:
                    found = f"the end of {self.path} at {size}, before offset {span.end}"
                    raise TruncatedFile(content, found, self._action)
                # O_DIRECT continues at whole blocks only: an incomplete last block is read again.
                end = (done + got) // BLOCK * BLOCK
                if end == done:
                    raise OSError(errno.EIO, "no bytes")
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._go_buffered()
                elif failure := (retries := retries or Retries(self.path)).failed(error):
                    place = f"from {self.path} at offset {span.offset + done}"
                    raise ReadFailed(content, f"{failure}, {place}", self._action) from error
            else:
                done = end
                if retries:
                    retries.progress()
        if not self.direct:
            forget(self._fd, span.offset, span.length)
        with self._lock:
            self.bytes_read += span.length
            self.retries += retries.count if retries else 0

    def _go_buffered(self) -> None:
        # In this order: a thread that sees False must find the descriptor changed.
        use_cache(self._fd)
        self.direct = False
        self._buffered(self.path)


class RecordFiles(AbstractContextManager["RecordFiles"]):
    """Files of records of a store, one for each layer, open for reads. Locks the store against writers until `close`.

    Thread-safe except for `open` and `close`.

    Args:
        directory: the directory of the store.
        action: the advice in messages of the errors.

    Raises:
        StoreBusy: another process is writing the store.
        UserError: the platform has no flock.

    Attributes:
        of_layer: layer -> its file.
        closed: whether `close` was called.
    """

    def __init__(self, directory: Path, action: str) -> None:
        self._action, self.of_layer = action, dict[int, RecordFile]()
        self._lock, self._buffered, self.closed = threading.Lock(), False, False
        self._resources = ExitStack()
        self._resources.enter_context(StoreLock(directory, exclusive=False))

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk since opening, by every thread."""
        return sum(map(attrgetter("bytes_read"), self.of_layer.values()))

    @property
    def retries(self) -> int:
        """Attempts after failures, of all reads since opening that succeeded in the end."""
        return sum(map(attrgetter("retries"), self.of_layer.values()))

    @property
    def direct(self) -> bool:
        """Whether every read so far went past the page cache."""
        return not self._buffered

    def open(self, layer: int, path: Path, end: int, content: str) -> None:
        """Opens a layer's file. Arguments and errors: see RecordFile."""
        self.of_layer[layer] = RecordFile(
            path, end, content, self._action, self._resources, self._went_buffered
        )

    def close(self) -> None:
        """Closes every descriptor and unlocks the store. Idempotent. All reads of other threads must have returned."""
        self.closed = True
        self._resources.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _went_buffered(self, path: Path) -> None:
        with self._lock:
            already, self._buffered = self._buffered, True
        if not already:
            _log.warning("%s: the file system refuses O_DIRECT; reading through the page cache, slower", path)


def pieces(into: Sequence[memoryview], offset: int, length: int) -> Iterator[memoryview]:
    """Yields the parts of the buffers that make up bytes offset..offset + length of their concatenation."""
    for buffer in into:
        piece = buffer[max(offset, 0) : max(offset + length, 0)]
        if len(piece):
            yield piece
        offset -= len(buffer)


class FileReader(PlaneReader):
    """A reader of the open files of a store. Thread-safe except for `close`.

    Args:
        files: open files, one for each layer; the reader closes them.
    """

    def __init__(self, files: RecordFiles) -> None:
        self._files = files

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk since opening, by every thread."""
        return self._files.bytes_read

    @property
    def retries(self) -> int:
        """Attempts after failures, of all reads since opening that succeeded in the end."""
        return self._files.retries

    def close(self) -> None:
        """Closes every descriptor and unlocks the store. Idempotent. All reads of other threads must have returned."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
