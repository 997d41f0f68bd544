"""The engine's unit of work: rows of tokens, each belonging to a sequence with a KV of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgemoe.kv import SequenceKV


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence.

    Args:
        sequence: the KV that the tokens continue; row i gets position `sequence.length + i`.
        tokens: token ids, at least one.
    """

    sequence: SequenceKV
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One pass through the model: the rows of all segments, one after another.

    Batch size 1 is a rule of the command line, not of the engine: any number of sequences may share a
    step, each once.
    """

    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """Tokens in all."""
        return sum(len(segment.tokens) for segment in self.segments)
