"""How far a store's experts are from their source: the relative Frobenius error, summed up expert by expert."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from storage.untrusted import shortened

_DIGITS = 32


@dataclass
class SourceError:
    """Sums over the weights that were compared: of each layer's experts, the first and the middle one.

    Args:
        squared: of the differences between what is stored, at the highest level, and the source.
        total: of the source's own squares.
    """

    squared: float = 0.0
    total: float = 0.0

    @property
    def relative(self) -> float:
        """||stored - source|| / ||source||; 0 where the source is nothing but zeros."""
        return math.sqrt(self.squared / self.total) if self.total else 0.0

    def add(self, other: SourceError) -> None:
        """Counts other weights in."""
        self.squared += other.squared
        self.total += other.total

    def to_digits(self) -> str:
        """Equally long whatever the sums are."""
        return struct.pack(">dd", self.squared, self.total).hex()

    @classmethod
    def from_digits(cls, digits: str) -> SourceError:
        """The inverse of to_digits.

        Raises:
            ValueError: the text is none of to_digits.
        """
        sums = struct.unpack(">dd", bytes.fromhex(digits)) if len(digits) == _DIGITS else (-1.0,)
        if not all(0 <= value < math.inf for value in sums):
            raise ValueError(f"{shortened(digits)}, not two sums of squares")
        return cls(*sums)
