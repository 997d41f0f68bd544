"""Contracts of storage: what an expert is called, what its planes are, and how they are read.

A *record* is one expert's planes, one after another, on disk. A *level* is the number of bits an
expert is used at; every level is a prefix of the planes, so any level is one contiguous read from
the record's start. Nothing here knows of tokens, routers or caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

BLOCK = 4096
"""Bytes that every plane and every read is aligned to: O_DIRECT's largest common block."""


class ExpertKey(NamedTuple):
    """Names one expert. Sorts in disk order."""

    layer: int
    expert: int


class Plane(IntEnum):
    """One slice of an expert's bits, in record order."""

    BASE = 0
    """Top 2 bits of every code, and the group parameters."""
    D4 = 1
    """The next 2 bits."""
    D8 = 2
    """The last 4 bits."""

    @property
    def label(self) -> str:
        """The plane's name in store.json: base, d4 or d8."""
        return _LABELS[self]


_LABELS = tuple(plane.name.lower() for plane in Plane)


LEVELS = (8, 4, 2, 0)
"""Every level, high to low. Level 0 is an expert that is skipped."""

PLANES_OF_LEVEL: dict[int, int] = {0: 0, 2: 1, 4: 2, 8: 3}
"""level -> how many planes, counted from BASE, it needs."""


class ByteRange(NamedTuple):
    """A half-open range of bytes inside a record or file."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte past the range."""
        return self.offset + self.length


@dataclass(frozen=True)
class BlockKind:
    """A kind of fixed-size block that a resident expert is made of.

    Args:
        name: unique within a form.
        size: bytes, a multiple of BLOCK.
        level: the lowest level that needs a block of this kind.
    """

    name: str
    size: int
    level: int


Blocks = dict[str, Any]
"""Block kind's name -> that block's writable bytes: in RAM a memoryview, block-aligned, so that a reader may fill it
directly; in a device's memory a tensor, uint8 [size]."""


class PlaneReader(ABC):
    """Reads planes of records from disk, verified.

    Thread-safe: workers share one reader. Holds open file descriptors until close(); a file that is
    replaced by another under the same name meanwhile goes on being read as it was.
    """

    @abstractmethod
    def read(self, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]) -> int:
        """Fills `into`, one buffer after another, with the planes first..last of a record.

        The buffers' lengths must add up to the planes' lengths, each buffer BLOCK-aligned in address
        and length. Every plane's checksum is verified before this returns; on an error the buffers'
        contents are undefined.

        Returns:
            bytes read from disk.

        Raises:
            TruncatedFile, ChecksumMismatch, ReadFailed: naming layer, expert, plane, path and offset.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes every descriptor. Idempotent. Reads after it raise ValueError."""


class ResidentForm(ABC):
    """How an expert lies in a memory tier: which blocks it has, and how planes become blocks.

    One form per layout. Stateless and thread-safe; the caller owns every block it passes.
    """

    kinds: tuple[BlockKind, ...]
    """In order of their level, lowest first."""

    @abstractmethod
    def rewritten(self, held: int, level: int) -> tuple[str, ...]:
        """Names of the kinds that raising an expert from `held` (0 if absent) to `level` needs new blocks for.

        A kind that is already held and named here is replaced, never changed in place: whoever computes
        from the old block goes on doing so.
        """

    @abstractmethod
    def fill(
        self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks, source: Source | None
    ) -> int:
        """Fills the blocks `into` so that, with `source`'s blocks, the expert is complete at `level`.

        `into` holds a block for each kind of rewritten(source.held or 0, level), plus any of source's
        that the caller wants copied (from another tier). Reads from disk only the planes that source
        lacks. Blocks of `source` are not changed.

        Returns:
            bytes read from disk.

        Raises:
            as PlaneReader.read.
        """

    def kinds_at(self, level: int) -> tuple[BlockKind, ...]:
        """The kinds that an expert resident at `level` occupies."""
        return tuple(kind for kind in self.kinds if level and kind.level <= level)

    def bytes_at(self, level: int) -> int:
        """Bytes that an expert resident at `level` occupies."""
        return sum(kind.size for kind in self.kinds_at(level))

    def demoted(self, held: int, level: int) -> int:
        """The lowest level, `level` or above, that an expert at `held` gets to by giving up whole blocks.

        Above `level` where a block would have to change as well: one that raising the expert again would
        rewrite has other bytes at the lower level. At most `held`.
        """

        def is_prefix(low: int) -> bool:
            changed = self.rewritten(low, held)
            return all(kind.name not in changed for kind in self.kinds_at(low))

        return min((low for low in LEVELS if level <= low < held and is_prefix(low)), default=held)


@dataclass(frozen=True)
class Source:
    """Planes that are already in memory: what a promotion or a move between tiers starts from."""

    held: int
    """The level they make."""
    blocks: Blocks
