"""A step of the engine: rows of tokens, each of a sequence with a KV of its own, and state that layers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers.cache_utils import Cache

from edgemoe.kv.pictures import PromptPictures
from edgemoe.kv.sequence import SequenceKV
from edgemoe.policy.drawing import Draws
from edgemoe.policy.importance import PromptAttention


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence.

    Args:
        sequence: the KV that the tokens continue; row i has number `sequence.length + i`, which is its position where
            no picture comes before it.
        tokens: token ids, at least one.
        prompt: the prompt that these tokens continue, shared by its steps; None: they are new tokens, each judged
            alone.
        drafts: number of the last tokens that are only guesses. Their keys and values are written, but they become part
            of the sequence only by `SequenceKV.commit`, once they have been accepted.
        draws: how the token after these is drawn; None: it is not known, or the likeliest one comes.
        pictures: pictures of the sequence's prompt; None: it has none.
    """

    sequence: SequenceKV
    tokens: tuple[int, ...]
    prompt: PromptAttention | None = None
    drafts: int = 0
    draws: Draws | None = None
    pictures: PromptPictures | None = None

    @property
    def numbers(self) -> range:
        """Numbers of the tokens in their sequence, before the step has ended."""
        return range(self.sequence.length, self.sequence.length + len(self.tokens))

    @property
    def positions(self) -> list[int]:
        """Positions of new tokens, before the step has ended."""
        offset = self.pictures.offset if self.pictures else 0
        return [number + offset for number in self.numbers]


@dataclass(frozen=True)
class Step:
    """Rows through the model once: the tokens of all segments, one segment after another.

    Any number of sequences may share a step, each once; all of them continue prompts, or none does.

    Args:
        segments: the segments, at least one.
        cancelled: called between two parts of every layer that runs through transformers' modules; True ends the step
            with StepCancelled. None: nothing cancels it.

    Raises:
        ValueError: a sequence twice, or prompts together with new tokens.
    """

    segments: tuple[Segment, ...]
    cancelled: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        if len({id(segment.sequence) for segment in self.segments}) < len(self.segments):
            raise ValueError("expected each sequence once in a step, got one twice")
        if len({segment.prompt is None for segment in self.segments}) != 1:
            raise ValueError("expected a step of prompts or of new tokens, got both or neither")

    @cached_property
    def decodes(self) -> bool:
        """Whether no segment is part of a prompt: each row's levels then follow its own gate weights."""
        return all(segment.prompt is None for segment in self.segments)

    @cached_property
    def rows(self) -> int:
        """Tokens in all."""
        return sum(len(segment.tokens) for segment in self.segments)

    @cached_property
    def drafts(self) -> int:
        """Tokens in all that are only guesses."""
        return sum(segment.drafts for segment in self.segments)

    @cached_property
    def pictured(self) -> bool:
        """Whether a segment's prompt has pictures."""
        return any(segment.pictures for segment in self.segments)

    @cached_property
    def one_token_each(self) -> bool:
        """Whether each sequence has one new token, and guesses at the tokens after it."""
        return self.decodes and self.rows - self.drafts == len(self.segments)


class StepCancelled(Exception):
    """A step ended because its caller does not want it any more. No sequence has changed."""


@dataclass(frozen=True, slots=True)
class SpanPlace:
    """Where a span lies in its step.

    Args:
        row: the first row of its segment in the step.
        part: the span's rows among its segment's rows; all of them, except within a block.
        rows: number of rows of its segment.
    """

    row: int
    part: range
    rows: int


class StepKV(Cache):  # type: ignore[misc]  # transformers ships no types
    """The state of one step: its sequences' KV with transformers' cache interface, and messages between its layers.

    Args:
        step: the step of these sequences.
        signal: the kind of attention that each layer's experts need (PromptAttention.ranks); None: none.

    Raises:
        ContextExceeded: a sequence's context does not hold its tokens.
    """

    def __init__(self, step: Step, *, signal: str | None = None) -> None:
        super().__init__(layers=[])
        self._cancelled, self._step = step.cancelled, step
        self.decode, self.signal = step.decodes, signal
        self.ranks: torch.Tensor | None = None
        """float32 [rows], by attention received in the layer that runs; None where `signal` is."""
        self.indices: torch.Tensor | None = None
        """int32 [1, rows, K], tokens that the last layer's index chose for the layers after it; None: it chose none."""
        self.prompts = [segment.prompt for segment in step.segments]
        """The prompt of each span; None: it is a new token."""
        self.ahead = _ahead_of(step.segments)
        """int32 [rows], how many of the rows after it a row sees in layers with a window; None: none."""
        self.spans: list[tuple[SequenceKV, int, int]] = []
        """(sequence, its first row in the step, rows); within `block` of its rows."""
        self.rows, self.places = step.rows, list[SpanPlace]()
        """Rows in all, and where each span lies in the step."""
        row = 0
        for segment in step.segments:
            tokens = len(segment.tokens)
            segment.sequence.require(tokens)
            self.spans.append((segment.sequence, row, tokens))
            self.places.append(SpanPlace(row, range(tokens), tokens))
            row += tokens

    def check_cancelled(self) -> None:
        """Raises StepCancelled where the step is not wanted any more."""
        if self._cancelled and self._cancelled():
            raise StepCancelled

    def receive(
        self,
        place: SpanPlace,
        prompt: PromptAttention | None,
        layer: int,
        received: torch.Tensor,
        window: int | None,
    ) -> None:
        """Adds the attention that tokens receive from a span; after the last span of its segment its rows have ranks.

        Args:
            place, prompt: place and prompt of the span, which has one; `signal` is set.
            layer, received, window: see PromptAttention.receive and ranks.
        """
        assert self.signal
        assert prompt
        if place.row == place.part.start == 0:
            self.ranks = torch.empty(self.rows, device=received.device)
        prompt.receive(layer, received, place.part, self.signal)
        if place.part.stop == place.rows and self.ranks is not None:
            own = slice(place.row, place.row + place.rows)
            self.ranks[own] = prompt.ranks(layer, place.rows, window, self.signal)

    def end_of_block(self, rows: range) -> int:
        """Returns the end of the longest block of first rows among `rows` that divides no picture, if there is one."""
        end = rows.stop
        while self.ahead is not None and end < len(self.ahead) and end > rows.start and self.ahead[end - 1]:
            end -= 1
        return end if end > rows.start else rows.stop

    @contextmanager
    def block(self, rows: range) -> Iterator[None]:
        """Makes some of the step's rows the whole step, for one module of one layer that takes them block by block.

        Within such a block it makes some of the block's rows the whole step.

        The tokens before them count as tokens of their sequences, whose keys and values the module has written.
        """
        whole, ahead = (self.spans, self.prompts, self.places), self.ahead
        spans, prompts, places, before = [], [], [], list[tuple[SequenceKV, int]]()
        for (sequence, row, count), prompt, place in zip(*whole, strict=True):
            first, end = max(row, rows.start), min(row + count, rows.stop)
            if first < end:
                spans.append((sequence, first - rows.start, end - first))
                prompts.append(prompt)
                part = range(place.part.start + first - row, place.part.start + end - row)
                places.append(SpanPlace(place.row, part, place.rows))
                before.append((sequence, sequence.length))
                sequence.length += first - row
        self.spans, self.prompts, self.places = spans, prompts, places
        self.ahead = None if ahead is None else ahead[rows.start : rows.stop]
        try:
            yield
        finally:
            (self.spans, self.prompts, self.places), self.ahead = whole, ahead
            for sequence, length in before:
                sequence.length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the step's keys and values [1, heads, rows, D] after each sequence's own; returns them unchanged."""
        for sequence, row, rows in self.spans:
            part = slice(row, row + rows)
            sequence.write(layer_idx, key_states[0, :, part], value_states[0, :, part])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the first sequence before this step."""
        return self.spans[0][0].length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns 0: rows have explicit positions, and no mask over them is made."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns (query_length, 0), for the same reason."""
        return query_length, 0

    def commit(self) -> None:
        """Makes the step's tokens part of their sequences, except guesses."""
        for segment in self._step.segments:
            rows = len(segment.tokens) - segment.drafts
            segment.sequence.commit(rows)
            if segment.prompt:
                segment.prompt.commit(rows)


def _ahead_of(segments: Sequence[Segment]) -> torch.Tensor | None:
    """StepKV.ahead of a step."""
    counts = list[int]()
    for each in segments:
        both_ways = each.pictures if each.pictures and each.pictures.both_ways else None
        counts += both_ways.ahead(each.numbers) if both_ways else [0] * len(each.tokens)
    return torch.tensor(counts, dtype=torch.int32) if any(counts) else None
