"""Steps of an engine: their contexts, their way through the model, and the records that they leave."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from edgemoe.engine.limited_memory import LimitedMemory
from edgemoe.engine.parts import EngineParts
from edgemoe.engine.rules import Rules
from edgemoe.errors import ModelRefused, UserError
from edgemoe.experts.records import StepRecord
from edgemoe.experts.step import StepContext, Study
from edgemoe.experts.use import ChoiceCounts
from edgemoe.kv.pictures import pictures_of, words_of
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.dense import Watch, watched
from edgemoe.memory.model_shape import ModelShape
from edgemoe.memory.workspace import long_step_bytes
from edgemoe.policy.importance import PromptAttention

if TYPE_CHECKING:
    from edgemoe.engine.drafts.head_runner import HeadRunner
    from edgemoe.memory.plan import MemoryPlan


class Stepping:
    """The part of an engine that runs steps.

    Attributes:
        plan, shape: the division of the limit, and the sizes of the model.
        memory: where a long step's bytes are reserved.
        rules: the settings of the next steps.
    """

    plan: MemoryPlan
    shape: ModelShape
    memory: LimitedMemory
    rules: Rules
    _parts: EngineParts
    _study: Study
    _listeners: list[list[StepRecord]]

    @property
    def most_drafts(self) -> int:
        """Most guesses of a sequence in a step; 0: the settings have none."""
        return min(self.plan.drafts, self.rules.settings.most_drafts)

    @property
    def head(self) -> HeadRunner | None:
        """The model's head for further tokens; None: the settings do not use it."""
        return self._parts.runner.head

    def watched(self, watch: Watch) -> AbstractContextManager[None]:
        """Calls `watch` with the dense layers of 4 bits and their inputs in the block's steps of prompts."""
        return watched(self._parts.model, watch)

    @contextmanager
    def recorded(self) -> Iterator[list[StepRecord]]:
        """Yields a list, to which the record of each step that ends inside the block is added."""
        records: list[StepRecord] = []
        self._listeners.append(records)
        try:
            yield records
        finally:
            self._listeners = [each for each in self._listeners if each is not records]

    def begin(self, step: Step, *, all_rows: bool = False) -> StepContext:
        """Makes the context of a step, which `run` takes. The step keeps the present settings.

        Args:
            step: a step of at most the plan's prefill_rows rows, or of as many rows as sequences; with guesses, of at
                most the plan's decode_rows rows.
            all_rows: whether logits of every row are computed; the plan's workspace holds at most scored_rows of them.

        Raises:
            ContextExceeded: a sequence's context is too small.
            ValueError: more rows, for which the plan has no workspace.
        """
        plan, most = self.plan, max(self.plan.prefill_rows, len(step.segments))
        if step.drafts:
            most = plan.decode_rows
        if step.rows > most or max(segment.drafts for segment in step.segments) > plan.drafts:
            raise ValueError(f"expected at most {most} rows in a step, got {step.rows}")
        counts = self._study.choices or self.rules.hot is not None
        return StepContext(
            self._parts.source,
            step,
            self._study.policy or self.rules.policy,
            self._study,
            all_rows=all_rows,
            choices=ChoiceCounts(self.shape.layers, self.shape.experts_per_layer) if counts else None,
            states_kept=self.head.states_kept if self.head else 0,
        )

    def run(self, context: StepContext) -> Generator[int, None, None]:
        """Runs the rows of a step and appends them to their sequences; the context has logits and record then.

        Yields the number of each layer of a prompt's step on a CPU, once it is done. Steps of new tokens may run before
        the caller goes on. Closing the generator ends the step; no sequence has changed then.

        Raises:
            DoesNotFit: a device has too little memory; no sequence has changed.
            NotFinite: naming the first layer whose output is not finite, and the segments; no sequence has changed.
            DamagedData: a read failed; no sequence has changed.
            StepCancelled: as Step; no sequence has changed.
        """
        step, record, hot = context.step, context.record, self.rules.hot
        long = self.plan.long_step_bytes
        if step.one_token_each:
            long = 0
        elif not context.all_rows:
            several = step.rows > len(step.segments)
            long = min(long_step_bytes(self.shape, step.rows), long) if several else 0
        try:
            lent = self.memory.long_step(long) if long or self.memory.returned else nullcontext()
            with lent, hot.step(record) if hot else nullcontext():
                started = time.perf_counter()
                with closing(self._parts.runner.run(context)) as layers:
                    for layer in layers:
                        record.seconds += time.perf_counter() - started
                        yield layer
                        started = time.perf_counter()
                record.seconds += time.perf_counter() - started
        finally:
            context.experts.end()
        for records in self._listeners:
            records.append(record)

    def step(self, step: Step, *, all_rows: bool = False) -> torch.Tensor:
        """Runs a step from its beginning to its end, as `begin` and `run`.

        Returns:
            float32 [segments or rows, vocab], in RAM: the logits after each segment's last token, or after each token.

        Raises:
            as begin and run.
        """
        context = self.begin(step, all_rows=all_rows)
        for _ in self.run(context):
            pass
        assert context.logits is not None
        return context.logits

    def all_logits(
        self,
        sequence: SequenceKV,
        tokens: Sequence[int],
        *,
        decode: bool,
        prompt: PromptAttention | None = None,
    ) -> torch.Tensor:
        """Appends at most the plan's prefill_rows tokens; returns the logits after each, float32 [tokens, vocab].

        With `decode` every token's levels are chosen by its own gate weights, as in a step of its own; unless exact, an
        expert is computed at the highest level that any of the tokens wants. Without `decode` they are tokens of a
        `prompt`, which its steps share; None: they are all of it.

        Raises:
            as step.
        """
        attention = None if decode else prompt or PromptAttention()
        segment = Segment(sequence, tuple(tokens), attention)
        return self.step(Step((segment,)), all_rows=True)

    def prefill(self, sequence: SequenceKV, tokens: Sequence[int]) -> torch.Tensor:
        """Appends a prompt of any length that the context holds; returns the last token's logits [vocab].

        A prompt of more tokens than the plan's prefill_rows takes several steps. Each one's experts are ranked for its
        own tokens; their attention is counted, and ranked, over all of the prompt so far.

        Raises:
            as require_prompt.
            ContextExceeded: there are too many; nothing was run.
        """
        self.require_prompt(tokens)
        sequence.require(len(tokens))
        prompt = PromptAttention()
        rows, done = self.plan.prefill_rows, 0
        sequence.whole = sequence.length + len(tokens)
        pictures = own.of_another_prompt() if (own := pictures_of(tokens)) else None
        while done < len(tokens):
            part = range(sequence.length, sequence.length + min(rows, len(tokens) - done))
            if pictures:
                pictures.prepare(part := pictures.whole(part))
            segment = Segment(sequence, tuple(tokens[done : done + len(part)]), prompt, pictures=pictures)
            logits, done = self.step(Step((segment,))), done + len(part)
        return logits[0]

    def require_prompt(self, tokens: Sequence[int]) -> None:
        """Refuses token ids that are no prompt.

        Raises:
            UserError: there is no token.
            ModelRefused: a token that the model does not have, such as one from a tokenizer of another model.
        """
        if not tokens:
            raise UserError("a prompt of at least one token", "an empty one", "type a prompt")
        words = tokens if pictures_of(tokens) is None else words_of(tokens)
        wrong = next((token for token in words if not 0 <= token < self.shape.vocab), None)
        if wrong is not None:
            raise ModelRefused(
                f"token ids of 0 or more below {self.shape.vocab}, the vocabulary that config.json has",
                f"{wrong} from the tokenizer",
                "convert the model again with its own tokenizer",
            )
