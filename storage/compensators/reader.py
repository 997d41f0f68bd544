"""Reads of compensators, verified by their checksums, and their form in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from edgemoe.errors import ChecksumMismatch
from edgemoe.storage.base import (
    BLOCK,
    BlockKind,
    Blocks,
    ByteRange,
    ExpertKey,
    Plane,
    PlaneReader,
    ResidentForm,
    Source,
)
from edgemoe.storage.compensators.index import FOLDER, CompensatorIndex
from edgemoe.storage.files.unbuffered import aligned
from edgemoe.storage.store.record_file import FileReader, RecordFiles

if TYPE_CHECKING:
    from edgemoe.storage.record.planes import Bytes

RECALCULATE = "run `edgemoe verify` on the store, and `edgemoe compensate` to write the compensators again"
"""Action of errors about a compensator."""


KIND = "compensator"
"""Name of the one kind of block in a tier of compensators."""

LEVEL = 2
"""The one level in a tier of compensators: they are whole or absent, whatever level's error they are of."""


class CompensatorReader(FileReader):
    """Reads the compensators of a store past the page cache, and verifies their checksums.

    Opens every layer's file, and locks the store against writers until `close`. Thread-safe except for `close`.

    Args:
        directory: the directory of the store.
        index: the index of its manifest.

    Raises:
        MissingTensor, TruncatedFile: a file is missing, or shorter than the index says.
        ReadFailed: a file cannot be opened.
        StoreBusy: another process is writing the store.
    """

    def __init__(self, directory: Path, index: CompensatorIndex) -> None:
        self._index = index
        with ExitStack() as opened:
            files = opened.enter_context(RecordFiles(directory, RECALCULATE))
            for layer, found in index.layers.items():
                path, end = directory / FOLDER / found.file, max(e.offset + e.length for e in found.entries)
                files.open(layer, path, end, f"the compensators of layer {layer} in {path}")
            opened.pop_all()
        super().__init__(files)

    def read(self, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]) -> int:
        """Fills a buffer with a compensator, which is one plane.

        Args:
            key: the expert.
            first, last: the base plane.
            into: one buffer, writable, BLOCK-aligned, of exactly the entry's length.

        Returns:
            Bytes read from disk.

        Raises:
            TruncatedFile, ChecksumMismatch, ReadFailed: with layer, expert, path and offset.
            ValueError: the buffer has another length.
        """
        entry = self._index.entry(key)
        wanted = f"the compensator of layer {key.layer}, expert {key.expert}"
        sizes = [len(buffer) for buffer in into]
        if sizes != [entry.length] or first != last:
            raise ValueError(f"expected a buffer of {entry.length} bytes for {wanted}, got {sizes}")
        self._files.of_layer[key.layer].fill(ByteRange(entry.offset, entry.length), into, wanted)
        if (found := xxhash.xxh3_64_intdigest(into[0])) != entry.checksum:
            raise ChecksumMismatch(
                f"checksum {entry.checksum:016x} for {wanted}",
                f"{found:016x} from {self._files.of_layer[key.layer].path} at offset {entry.offset}",
                RECALCULATE,
            )
        return entry.length

    def load(self, key: ExpertKey) -> Bytes:
        """Reads a compensator into new memory, uint8 [length], BLOCK-aligned. Raises what `read` raises."""
        out = aligned(self._index.entry(key).length)
        self.read(key, Plane.BASE, Plane.BASE, [out.data])
        return out


class CompensatorForm(ResidentForm):
    """One block, of the compensator's bytes as they are on disk.

    Args:
        index: the index of the compensators.
    """

    def __init__(self, index: CompensatorIndex) -> None:
        self.kinds = (BlockKind(KIND, index.largest or BLOCK, LEVEL),)

    def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
        """The block of a compensator that is absent."""
        return (KIND,) if level > resident == 0 else ()

    def fill(
        self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks, source: Source | None
    ) -> int:
        """Reads a compensator into its block."""
        return reader.read(key, Plane.BASE, Plane.BASE, [into[KIND]])
