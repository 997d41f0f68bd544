"""Runs a model's head for further tokens (docs/decisions/0075)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

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


class HeadRunner:
    """Runs the head of an engine, with keys and values of its own for the latest tokens of one sequence.

    Args:
        model: the head's modules.
        decode: runs these modules by the compiled kernel.
        source: reads the head's experts from the store.
        shape: the shape of its keys and values.
        policy: the rule of its experts' levels.

    Attributes:
        states_kept: number of latest states that each sequence keeps for its drafter.
        owner: the drafter that the keys and values belong to. None: they belong to no drafter.
    """

    states_kept = HEAD_STATES

    def __init__(
        self,
        model: HeadModel,
        decode: HeadDecode,
        source: ExpertSource,
        shape: KVShape,
        policy: LevelPolicy,
    ) -> None:
        self._model, self._decode, self._source, self._policy = model, decode, source, policy
        self._sequence = SequenceKV(shape, HEAD_TOKENS)
        self.owner: Drafter | None = None
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
        return cls(model, decode, source, store.head.kv(store.shape.kv), policy)

    @property
    def length(self) -> int:
        """Tokens that the keys and values have."""
        return self._sequence.length

    def crop(self, length: int) -> None:
        """Drops all tokens after the first `length`."""
        self._sequence.crop(length)

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """States bf16 [rows, H] of the model's last layer after its last norm, as `run` takes them."""
        with torch.inference_mode():
            return self._model.normed(states)

    def run(self, tokens: Sequence[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends tokens to the keys and values.

        Args:
            tokens: token ids.
            states: bf16 [rows, H], for each token the normed state after the token before it.

        Returns:
            float32 [vocab], the logits of the token after the last one; bf16 [1, H], the normed state that they are of.

        Raises:
            DamagedData: an expert could not be read; the keys and values are as before.
        """
        most, logits, normed = self._decode.most_rows, states, states
        for start in range(0, len(tokens), most):
            rows = tuple(tokens[start : start + most])
            with self._running(rows) as context:
                logits, normed = self._decode.run(rows, states[start : start + most], context)
            self._sequence.commit(len(rows))
        return logits[-1], normed[-1:]

    @contextmanager
    def _running(self, rows: tuple[int, ...]) -> Iterator[StepContext]:
        """The context of a step of the head, and the state of this thread while it runs."""
        step = Step((Segment(self._sequence, rows, drafts=len(rows) - 1),))
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
