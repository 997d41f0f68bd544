"""Contracts of storage: the name of an expert, its planes on disk, and its blocks in memory.

A *record* is one expert on disk: its planes, one after another. A *level* is the number of bits per weight that an
expert is used at. Every level needs a prefix of the planes, so a level is one contiguous read from the record's
start. This package does not depend on tokens, routers or caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

BLOCK = 4096
"""Bytes: alignment of every plane and every read, the largest block size that O_DIRECT requires."""


class ExpertKey(NamedTuple):
    """Names one expert of a model. Immutable and hashable; keys sort in the order of their records on disk.

    >>> sorted([ExpertKey(1, 0), ExpertKey(0, 5)])
    [ExpertKey(layer=0, expert=5), ExpertKey(layer=1, expert=0)]
    """

    layer: int
    expert: int


class Plane(IntEnum):
    """One slice of the bits of an expert's codes, in record order.

    >>> [plane.label for plane in list(Plane)[: PLANES_OF_LEVEL[4]]]
    ['base', 'd4']
    """

    BASE = 0
    """Top 2 bits of every code, and the group parameters."""
    D4 = 1
    """The next 2 bits."""
    D8 = 2
    """The last 4 bits."""

    @property
    def label(self) -> str:
        """The plane's name in store.json: base, d4 or d8."""
        return self.name.lower()


LABELS = tuple(plane.label for plane in Plane)
"""Plane -> its label."""

LEVELS = (8, 4, 2, 0)
"""Every level, high to low. An expert at level 0 is skipped."""

PLANES_OF_LEVEL: dict[int, int] = {0: 0, 2: 1, 4: 2, 8: 3}
"""level -> number of planes that it needs, counted from BASE."""


class ByteRange(NamedTuple):
    """A half-open range of bytes inside a record or file. Ranges sort by their offset.

    >>> ByteRange(offset=4096, length=8192).end
    12288
    """

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte past the range."""
        return self.offset + self.length


@dataclass(frozen=True)
class BlockKind:
    """A kind of fixed-size block that a resident expert consists of. Immutable.

    Args:
        name: unique within a form.
        size: bytes, a multiple of BLOCK.
        level: the lowest level that needs a block of this kind.

    >>> kinds = (BlockKind("base", 8192, level=2), BlockKind("d4", 4096, level=4))
    >>> [kind.name for kind in kinds if kind.level <= 2]
    ['base']
    """

    name: str
    size: int
    level: int


Blocks = dict[str, Any]
"""Block kind's name -> the writable bytes of one block: in RAM a memoryview, BLOCK-aligned, so that a reader fills it
directly; in a device's memory a tensor, uint8 [size]."""


class PlaneReader(ABC):
    """Reads planes of records from disk and verifies their checksums.

    Threads: any number of threads call `read` at the same time on one reader. The caller owns the buffers. A record
    file that is replaced under its name after opening is still read as it was when it was opened.
    """

    @property
    def retries(self) -> int:
        """Attempts after failures, of all reads since opening that succeeded in the end."""
        return 0

    @abstractmethod
    def read(self, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]) -> int:
        """Fills `into`, one buffer after another, with the planes first..last of a record.

        The checksum of every plane is verified before this returns. After an error the contents of the buffers are
        undefined.

        Args:
            key: the expert.
            first: first plane to read.
            last: last plane to read, inclusive.
            into: writable buffers, BLOCK-aligned in address and length; their lengths add up to the planes' lengths.

        Returns:
            Bytes read from disk.

        Raises:
            TruncatedFile, ChecksumMismatch, ReadFailed: with layer, expert, plane, path and offset.
        """


class ResidentForm(ABC):
    """The blocks that an expert consists of in a memory tier, and the conversion of planes into blocks.

    There is one form per memory layout. Threads: a form has no state, so any thread uses it at any time. Ownership:
    the caller allocates, pins and frees every block; a form keeps no reference to a block after a call.

    >>> from edgemoe.storage.record.forms import PlaneForm
    >>> from edgemoe.storage.record.layout import LAYOUTS
    >>> from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
    >>> matrices = (MatrixSpec.of("gate_up", 128, 64), MatrixSpec.of("down", 64, 64))
    >>> form = PlaneForm(RecordGeometry(matrices, max_level=8), LAYOUTS["cuda"], LAYOUTS["cuda"])
    >>> form.rewritten(2, 8)
    ('d4', 'd8')
    >>> [form.bytes_at(level) for level in (2, 4, 8)]
    [8192, 12288, 20480]
    """

    kinds: tuple[BlockKind, ...]
    """Every kind of block, lowest level first."""

    @abstractmethod
    def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
        """Names of the kinds that need a new block when an expert is promoted.

        A kind that the resident expert has already is replaced, never changed in place: a kernel that computes from
        the old block is not disturbed.

        Args:
            resident: the expert's present level, 0 if it is absent.
            level: the level to reach.
        """

    @abstractmethod
    def fill(
        self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks, source: Source | None
    ) -> int:
        """Fills new blocks so that, together with the source's blocks, the expert is complete at `level`.

        Only planes that the source lacks are read from disk. Blocks of the source are not changed.

        Args:
            reader: the reader of the expert's store.
            key: the expert.
            level: the level to reach.
            into: a block for each kind of rewritten(source level, level), and for each kind of the source that is to
                be copied, as in a move between tiers.
            source: blocks of the expert that are already in memory; None if there are none.

        Returns:
            Bytes read from disk.

        Raises:
            TruncatedFile, ChecksumMismatch, ReadFailed: with layer, expert, plane, path and offset.
        """

    def level_in(self, layer: int, level: int) -> int:
        """`level`, or the highest level of a layer of the store if that is lower."""
        return level

    def builds_on(self, resident: int, level: int) -> bool:
        """Whether blocks at level `resident` are of use to `fill` on the way to `level`."""
        return resident > 0

    def kinds_at(self, level: int) -> tuple[BlockKind, ...]:
        """Kinds of the blocks that an expert at `level` occupies."""
        return tuple(kind for kind in self.kinds if level and kind.level <= level)

    def bytes_at(self, level: int) -> int:
        """Bytes that an expert at `level` occupies."""
        return sum(kind.size for kind in self.kinds_at(level))

    def demoted(self, resident: int, level: int) -> int:
        """The lowest level, `level` or above, that a resident expert reaches by freeing whole blocks.

        The result is above `level` where a remaining block would have other bytes at the lower level. It is at most
        `resident`.
        """

        def is_prefix(low: int) -> bool:
            changed = self.rewritten(low, resident)
            return all(kind.name not in changed for kind in self.kinds_at(low))

        return min((low for low in LEVELS if level <= low < resident and is_prefix(low)), default=resident)


@dataclass(frozen=True)
class Source:
    """Blocks of an expert that are in memory: the start of a promotion or of a move between tiers.

    The caller keeps the blocks pinned for as long as the source is used.

    >>> Source(2, {"base": memoryview(bytearray(8192))}).level
    2

    Args:
        level: the level that the blocks make.
        blocks: kind's name -> block.
    """

    level: int
    blocks: Blocks
