"""Relative Frobenius error of a store's experts against their source, summed up expert by expert."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from edgemoe.storage.files.untrusted import shortened

_DIGITS = 32


@dataclass
class SourceError:
    """Sums over the compared weights: the first and the middle expert of every layer.

    Args:
        squared: sum of the squared differences between the highest level and the source.
        total: sum of the source's squares.
    """

    squared: float = 0.0
    total: float = 0.0

    @property
    def relative(self) -> float:
        """||stored - source|| / ||source||; 0 where all source weights are zero."""
        return math.sqrt(self.squared / self.total) if self.total else 0.0

    def add(self, other: SourceError) -> None:
        """Adds the sums of other weights."""
        self.squared += other.squared
        self.total += other.total

    def to_digits(self) -> str:
        """32 hex digits, the two sums as big-endian float64."""
        return struct.pack(">dd", self.squared, self.total).hex()

    @classmethod
    def from_digits(cls, digits: str) -> SourceError:
        """Parses the result of to_digits.

        Raises:
            ValueError: `digits` has another length, or a sum that is negative, infinite or NaN.
        """
        sums = struct.unpack(">dd", bytes.fromhex(digits)) if len(digits) == _DIGITS else (-1.0,)
        if not all(0 <= value < math.inf for value in sums):
            raise ValueError(f"{shortened(digits)}, not two sums of squares")
        return cls(*sums)
