"""Reads of compensators, verified by their checksums."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from storage.base import ByteRange, ExpertKey
from storage.compensator_index import FOLDER, CompensatorIndex
from storage.errors import ChecksumMismatch
from storage.record_file import RecordFiles
from storage.unbuffered import aligned

if TYPE_CHECKING:
    from storage.planes import Bytes

RECALCULATE = "run `edgemoe verify` on the store, and `edgemoe compensate` to write the compensators again"
"""Action of errors about a compensator."""


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
    """

    def __init__(self, directory: Path, index: CompensatorIndex) -> None:
        self._index = index
        with ExitStack() as opened:
            self._files = opened.enter_context(RecordFiles(directory, RECALCULATE))
            for layer, found in index.layers.items():
                path, end = directory / FOLDER / found.file, max(e.offset + e.length for e in found.entries)
                self._files.open(layer, path, end, f"the compensators of layer {layer} in {path}")
            opened.pop_all()

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk since opening, by every thread."""
        return self._files.bytes_read

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
        entry = self._index.entry(key)
        wanted = f"the compensator of layer {key.layer}, expert {key.expert}"
        if len(into) != entry.length:
            raise ValueError(f"expected a buffer of {entry.length} bytes for {wanted}, got {len(into)}")
        self._files.fill(key.layer, ByteRange(entry.offset, entry.length), [into], wanted)
        if (found := xxhash.xxh3_64_intdigest(into)) != entry.checksum:
            raise ChecksumMismatch(
                f"checksum {entry.checksum:016x} for {wanted}",
                f"{found:016x} from {self._files.path(key.layer)} at offset {entry.offset}",
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
        self._files.close()

    def __exit__(self, *error: object) -> None:
        self.close()
