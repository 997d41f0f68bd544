"""Reads of compensators, verified by their checksums."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from storage.base import ByteRange, ExpertKey
from storage.compensator_index import FOLDER, CompensatorIndex
from storage.errors import ChecksumMismatch
from storage.lock import StoreLock
from storage.record_file import RecordFile
from storage.unbuffered import aligned

if TYPE_CHECKING:
    from storage.planes import Bytes

RECALCULATE = "run `edgemoe verify` on the store, and `edgemoe compensate` to write the compensators again"
"""Action of errors about a compensator."""

_log = logging.getLogger("edgemoe")


class CompensatorReader(AbstractContextManager["CompensatorReader"]):
    """Reads the compensators of a store past the page cache, and verifies their checksums.

    Opens every layer's file, and locks the store against writers until `close`. Thread-safe except for `close`.

    Args:
        directory: of the store.
        index: of its manifest.

    Raises:
        MissingTensor, TruncatedFile: a file is missing, or shorter than the index says.
        ReadFailed: a file cannot be opened.
        StoreBusy: another process is writing the store.

    Attributes:
        bytes_read: from disk since opening, by every thread.
        retries: attempts after failures, of all reads that succeeded in the end.
    """

    def __init__(self, directory: Path, index: CompensatorIndex) -> None:
        self._index, self._files = index, dict[int, RecordFile]()
        self._resources, self._lock = ExitStack(), threading.Lock()
        self._buffered = False
        self.bytes_read = self.retries = 0
        try:
            self._resources.enter_context(StoreLock(directory, exclusive=False))
            for layer, found in index.layers.items():
                path, end = directory / FOLDER / found.file, max(e.offset + e.length for e in found.entries)
                wanted = f"the compensators of layer {layer} in {path}"
                self._files[layer] = RecordFile(
                    path, end, wanted, RECALCULATE, self._resources, self._went_buffered
                )
        except BaseException:
            self.close()
            raise

    def read(self, key: ExpertKey, into: memoryview) -> int:
        """Fills a buffer with a compensator.

        Args:
            key: the expert.
            into: writable, BLOCK-aligned, of exactly the entry's length.

        Returns:
            Bytes read from disk.

        Raises:
            TruncatedFile, ChecksumMismatch, ReadFailed: with layer, expert, path and offset.
            ValueError: the buffer has another length.
        """
        entry, file = self._index.entry(key), self._files[key.layer]
        wanted = f"the compensator of layer {key.layer}, expert {key.expert}"
        if len(into) != entry.length:
            raise ValueError(f"expected a buffer of {entry.length} bytes for {wanted}, got {len(into)}")
        retried = file.fill(ByteRange(entry.offset, entry.length), [into], wanted)
        with self._lock:
            self.bytes_read += entry.length
            self.retries += retried
        if (found := xxhash.xxh3_64_intdigest(into)) != entry.checksum:
            raise ChecksumMismatch(
                f"checksum {entry.checksum:016x} for {wanted}",
                f"{found:016x} from {file.path} at offset {entry.offset}",
                RECALCULATE,
            )
        return entry.length

    def load(self, key: ExpertKey) -> Bytes:
        """Reads a compensator into new memory, uint8 [length], BLOCK-aligned. Errors are those of `read`."""
        out = aligned(self._index.entry(key).length)
        self.read(key, out.data)
        return out

    def close(self) -> None:
        """Closes every descriptor and unlocks the store. Idempotent. All reads of other threads must have returned."""
        self._resources.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _went_buffered(self, path: Path) -> None:
        already, self._buffered = self._buffered, True
        if not already:
            _log.warning("%s: the file system refuses O_DIRECT; reading through the page cache, slower", path)
