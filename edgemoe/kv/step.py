"""The engine's unit of work: rows of tokens, each belonging to a sequence with a KV of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgemoe.kv.sequence import SequenceKV, StepKV


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
    def decodes(self) -> bool:
        """Whether every sequence goes on by one token: each row is then judged by its own gate weights."""
        return all(len(segment.tokens) == 1 for segment in self.segments)

    @property
    def rows(self) -> int:
        """Tokens in all."""
        return sum(len(segment.tokens) for segment in self.segments)


@dataclass
class StepState:
    """What the layers of one pass tell each other.

    Args:
        decode: the phase that levels are chosen for.
        signal: the kind of attention that each layer's experts want to know of (importance.token_scores);
            None: none.
    """

    decode: bool
    signal: str | None
    scores: torch.Tensor | None = None
    """float32 [rows], attention received in the layer that is running."""
    passed: int = 0
    """Layers that a step of a single token is through, counted from the model's first."""
    one_by_one: bool = False
    """Every layer is gone through when it is called, and not before."""
    between: Callable[[Callable[[StepKV], torch.Tensor]], torch.Tensor] | None = None
    """Takes what depends on the host while a step is noted (graphs), and runs it; None: no step is."""
