"""Runs a model's head for further tokens (docs/decisions/0075)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch

from edgemoe.engine.drafts.base import Drafter
from edgemoe.experts.records import StepTotals
from edgemoe.experts.step import StepContext, Study
from edgemoe.kernels import torch_rules
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.head import HeadModel
from edgemoe.layers.head_decode import HeadDecode
from edgemoe.machine.sigint import DeferredInterrupt
from edgemoe.models.store_head import HEAD_STATES, HEAD_TOKENS
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings

if TYPE_CHECKING:
    from edgemoe.memory.plan import MemoryPlan
    from edgemoe.models.store_model import StoreModel
    from edgemoe.prefetch.base import ExpertSource


class HeadPart(NamedTuple):
    """Tokens of one sequence that the head computes.

    Args:
        sequence: the head's keys and values of the sequence.
        tokens: token ids, at least one.
        states: bf16 [rows, H], for each token the normed state after the token before it.
    """

    sequence: SequenceKV
    tokens: Sequence[int]
    states: torch.Tensor


class HeadRunner:
    """Runs the head of an engine, with keys and values of its own for the latest tokens of some sequences.

    Args:
        model: the head's modules.
        decode: runs these modules by the compiled kernel.
        source: reads the head's experts from the store.
        shape: the shape of its keys and values.
        policy: the rule of its experts' levels.
        parallel: sequences that have keys and values at once.

    Attributes:
        states_kept: number of latest states that each sequence keeps for its drafter.
    """

    states_kept = HEAD_STATES

    def __init__(
        self,
        model: HeadModel,
        decode: HeadDecode,
        source: ExpertSource,
        shape: KVShape,
        policy: LevelPolicy,
        parallel: int,
    ) -> None:
        self._model, self._decode, self._source, self._policy = model, decode, source, policy
        self._owners: list[tuple[ref[Drafter] | None, SequenceKV]] = [
            (None, SequenceKV(shape, HEAD_TOKENS)) for _ in range(parallel)
        ]
        """Keys and values, and the drafter that they belong to, whose states are freed with its request; the least
        recently used ones come first."""
        self._spent = StepTotals()

    @classmethod
    def of(
        cls, model: HeadModel, decode: HeadDecode, store: StoreModel, plan: MemoryPlan, source: ExpertSource
    ) -> HeadRunner:
        """Makes the runner of a store's head. Its experts have one level, the plan's highest: no answer needs others.

        Args:
            model: the head's modules.
            decode: runs these modules by the compiled kernel.
            source: reads the head's experts from the store.
            store: the store, which has a head.
            plan: the division of the limit.
        """
        assert store.head
        settings = RunSettings.uniform(plan.levels[0])
        policy = LevelPolicy(settings, [store.head.family.layer], store.shape.experts_per_layer)
        return cls(model, decode, source, store.head.kv(store.shape.kv), policy, plan.parallel)

    def sequence_of(self, drafter: Drafter) -> SequenceKV:
        """Returns the keys and values of a drafter; empty ones in place of another drafter's if it has none."""
        owners = [owner() if owner else None for owner, _ in self._owners]
        # An ended request loses its keys and values first, then the least recent one.
        at = next((i for which in (drafter, None) for i, owner in enumerate(owners) if owner is which), 0)
        _, sequence = self._owners.pop(at)
        if owners[at] is not drafter:
            sequence.crop(0)
        self._owners.append((ref(drafter), sequence))
        return sequence

    def forget(self, drafter: Drafter) -> None:
        """Empties the keys and values of a drafter."""
        self.sequence_of(drafter).crop(0)

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """States bf16 [rows, H] of the model's last layer after its last norm, as `run` takes them."""
        with torch.inference_mode():
            return self._model.normed(states)

    def run(self, parts: Sequence[HeadPart]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Appends tokens to the keys and values of some sequences, together as far as they fit into a step.

        Returns:
            for each sequence the float32 [vocab] logits of the token after its last one, and bf16 [1, H], the normed
            state that they are of.

        Raises:
            DamagedData: an expert could not be read; a part of the tokens may have been appended.
        """
        done, last = (
            [0] * len(parts),
            list[tuple[torch.Tensor, torch.Tensor]]([(torch.empty(0),) * 2] * len(parts)),
        )
        while taken := self._next_rows(
            [len(part.tokens) - count for part, count in zip(parts, done, strict=True)]
        ):
            segments, states = list[Segment](), list[torch.Tensor]()
            for i, rows in taken:
                part, own = parts[i], slice(done[i], done[i] + rows)
                segments.append(Segment(part.sequence, tuple(part.tokens[own]), drafts=rows - 1))
                states.append(part.states[own])
                done[i] += rows
            tokens = tuple(token for segment in segments for token in segment.tokens)
            with self._running(Step(tuple(segments))) as context:
                logits, normed = self._decode.run(tokens, torch.cat(states), context)
            end = 0
            for i, rows in taken:
                parts[i].sequence.commit(rows)
                end += rows
                last[i] = logits[end - 1], normed[end - 1 : end]
        return last

    def _next_rows(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """The parts of the next step by number, and how many rows of each fit.

        Args:
            counts: tokens of each part that are not computed yet.
        """
        taken, room = list[tuple[int, int]](), self._decode.most_rows
        for i, count in enumerate(counts):
            if rows := min(count, room):
                taken.append((i, rows))
                room -= rows
        return taken

    @contextmanager
    def _running(self, step: Step) -> Iterator[StepContext]:
        """The context of a step of the head, and the state of this thread while it runs."""
        context, started = StepContext(self._source, step, self._policy, Study()), time.perf_counter()
        try:
            with DeferredInterrupt(), torch.inference_mode(), torch_rules.one_thread(), context.entered():
                yield context
        finally:
            context.experts.end()
            context.record.seconds = time.perf_counter() - started
            self._spent = self._spent.plus(context.record)

    def take_spent(self) -> StepTotals:
        """Returns what the head's steps have taken since the last call."""
        spent, self._spent = self._spent, StepTotals()
        return spent
