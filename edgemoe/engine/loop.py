"""The steps of an engine's requests: which prompts run together, when others decode, and what comes of each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from itertools import zip_longest

import torch

from edgemoe.engine.drafts.drafting import Drafting
from edgemoe.engine.drafts.head import new_drafter
from edgemoe.engine.engine import Engine
from edgemoe.engine.pace import Pace
from edgemoe.engine.queue import RequestQueue
from edgemoe.engine.request import CANCELLED, Request, Sampled
from edgemoe.errors import DoesNotFit, NotFinite
from edgemoe.experts.records import StepTotals
from edgemoe.experts.step import StepContext
from edgemoe.kv.rotary_lengths import RotaryLengths
from edgemoe.kv.step import Segment, Step, StepCancelled
from edgemoe.machine.process import return_free_memory
from edgemoe.policy.importance import PromptAttention

REQUESTS_A_TRIM = 64
"""Ended requests after which free memory goes back to the system: that takes a millisecond."""


class StepLoop:
    """Runs one step after another. Used by the thread that has its turn.

    A prompt's step pauses after each layer; for each `pace.work` of its tokens some steps of the running sequences come
    between, so that running answers go on while a prompt comes in.

    Args:
        engine: runs the steps.
        queue: the requests.
        pace: how prompts and answers share the steps.
        is_closed: True ends a prompt's step at its next layer.

    Attributes:
        prefill, decode: sums over all steps of prompts, and over all steps of new tokens.
        drafting: guesses at further tokens.
    """

    def __init__(
        self, engine: Engine, queue: RequestQueue, pace: Pace, is_closed: Callable[[], bool]
    ) -> None:
        self._engine, self._queue, self._pace, self._closed = engine, queue, pace, is_closed
        self._chunk, self._lengths = pace.rows(engine), RotaryLengths.of(engine.store.config)
        self._work, self._since_chunk, self._ended = 0, 0, 0
        self._prompt_s = 0.0
        """Seconds of prompts' layers since the last new token."""
        self._sampled: deque[Sampled] = deque()
        make, rows = lambda: new_drafter(engine.head), engine.plan.decode_rows
        self.drafting = Drafting(lambda: engine.most_drafts, rows, self._lengths, make)
        self.prefill, self.decode = StepTotals(), StepTotals()

    def step(self) -> None:
        """Runs one step, if there is one to run, and hands out its tokens."""
        self.end_cancelled()
        self._hand_out()
        if refused := self._queue.admit():
            self.end(refused[0], error=refused[1])
        chunk_is_due = not self._queue.running or self._since_chunk >= self._pace.every
        if self._queue.prompts and chunk_is_due:
            self._since_chunk = 0
            self._prefill()
        elif self._queue.running:
            self._since_chunk += 1
            self._decode()
        self._hand_out()

    def end_cancelled(self, within: Collection[Request] = ()) -> None:
        """Ends cancelled requests whose step is not under way."""
        for request in self._queue:
            if request.cancelled and request not in within:
                self.end(request, CANCELLED)

    def _prefill(self) -> None:
        """Computes a picture of the first prompt; runs a chunk of one prompt, or of several that fit into a step."""
        first = self._queue.prompts[0]
        try:
            if self._queue.read_blocks(first):
                return
            self._prompt_s += self._queue.prepare_picture(first, self._chunk)
        except Exception as error:
            self.end(first, error=error)
            return
        parts = self._reserved(self._queue.next_prompts(self._chunk))
        if not parts:
            return
        requests = [request for request, _ in parts]
        segments = [
            Segment(r.sequence, tuple(r.tokens[r.length : r.length + rows]), r.attention, pictures=r.pictures)
            for r, rows in parts
            if r.sequence
        ]
        step = Step(tuple(segments), lambda: self._unwanted(requests))
        all_rows = requests[0].on_rows is not None
        context = self._run(requests, lambda: self._run_prompts(step, requests, all_rows=all_rows))
        for request in requests:
            request.partly = 0
        if context is None or context.logits is None:
            return
        self.prefill = self.prefill.plus(context.record)
        rows_of = [context.logits] if all_rows else context.logits.split(1)
        for i, ((request, rows), logits) in enumerate(zip(parts, rows_of, strict=True)):
            for states in context.states[i : i + 1]:
                self.drafting.saw(request, request.length + rows - len(states), states)
            request.trace.prefill = request.trace.prefill.plus(context.record)
            if request.on_rows:
                self._score(request, request.on_rows, logits)
            request.length += rows
            if request.length == request.prompt_tokens and not request.ended:
                request.attention = PromptAttention()  # new tokens have no ranks: the prompt's sums go
                self._sampled.append(Sampled(request, logits[-1:], (), context.record, (request,)))
                self._queue.prompt_done(request)

    def _reserved(self, parts: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """The first parts of a step for which there is memory. A request that finds too little alone ends."""
        reserved: list[tuple[Request, int]] = []
        for request, rows in parts:
            try:
                self._queue.reserve(request, rows)
            except Exception as error:
                if not (reserved and isinstance(error, DoesNotFit)):
                    self.end(request, error=error)
                break
            reserved.append((request, rows))
        return reserved

    def _run_prompts(self, step: Step, requests: Sequence[Request], *, all_rows: bool) -> StepContext:
        """Runs a step of prompts, and steps of the running sequences between its layers where it is time."""
        context, layers = self._engine.begin(step, all_rows=all_rows), self._engine.shape.layers
        before = 0.0
        with closing(self._engine.run(context)) as run:
            for layer in run:
                self._prompt_s += context.record.seconds - before
                before = context.record.seconds
                for request, segment in zip(requests, step.segments, strict=True):
                    request.partly = len(segment.tokens) * (layer + 1) // layers
                self._work += step.rows
                if self._queue.running and self._work >= self._pace.work * layers:
                    self._work = 0
                    self._decode_between(requests)
        self._prompt_s += context.record.seconds - before
        return context

    def _decode_between(self, prompts: Sequence[Request]) -> None:
        """Runs the steps of new tokens that come between two layers of a prompt's step."""
        for _ in range(self._pace.every):
            self.end_cancelled(within=prompts)
            if not self._queue.running or self._unwanted(prompts):
                return
            self._decode()
            self._hand_out()

    def _score(
        self, request: Request, on_rows: Callable[[int, torch.Tensor], None], logits: torch.Tensor
    ) -> None:
        try:
            on_rows(request.length, logits)
        except BaseException as error:  # raised by the callback: the request's caller gets it
            self.end(request, error=error)
        if request.scored and request.length + len(logits) == request.prompt:
            self.end(request, "scored")

    def _decode(self) -> None:
        """Runs a step of one new token of each running sequence, with guesses at the tokens after them."""
        requests = list(self._queue.running)
        drafts = self.drafting.propose(requests)
        segments = [
            Segment(r.sequence, (r.tokens[-1], *guesses), None, len(guesses), r.sampler.draws, r.pictures)
            for r, guesses in zip(requests, drafts, strict=True)
            if r.sequence
        ]
        context = self._run(requests, lambda: self._run_tokens(Step(tuple(segments)), requests), drafts)
        self.drafting.charge(requests, context.record if context else None)
        if context is None or context.logits is None:
            return
        record, together = context.record, tuple(requests)
        self.decode = self.decode.plus(record)
        rows = context.logits.split([len(segment.tokens) for segment in segments])
        for request, logits, guesses in zip(requests, rows, drafts, strict=True):
            request.trace.decode = request.trace.decode.plus(record)
            request.trace.drafted += len(guesses)
            self._sampled.append(Sampled(request, logits, guesses, record, together))
        self.drafting.saw_tokens(requests, context.states)

    def _run_tokens(self, step: Step, requests: Sequence[Request]) -> StepContext:
        for request, segment in zip(requests, step.segments, strict=True):
            self._queue.reserve(request, len(segment.tokens))
        context = self._engine.begin(step, all_rows=step.drafts > 0)
        for _ in self._engine.run(context):
            pass
        return context

    def _unwanted(self, requests: Sequence[Request]) -> bool:
        return self._closed() or all(request.cancelled for request in requests)

    def _run(
        self,
        requests: Sequence[Request],
        run: Callable[[], StepContext],
        drafts: Sequence[tuple[int, ...]] = (),
    ) -> StepContext | None:
        """Runs a step; None where it failed, and the requests that an error belongs to have ended.

        A step that had guesses runs again without them: an error may belong to them alone.
        """
        try:
            return run()
        except StepCancelled:
            self.end_cancelled()
        except Exception as error:
            guessed = [request for request, guesses in zip(requests, drafts, strict=False) if guesses]
            for request in guessed:
                self.drafting.stop(request)
            if not guessed:
                self._fail(requests, error)
        return None

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        """Ends the requests of a step that an error belongs to."""
        # The others run again, without those whose logits are not finite.
        failed = error.segments if isinstance(error, NotFinite) else range(len(requests))
        for i in failed:
            self.end(requests[i], error=error)

    def _hand_out(self) -> None:
        """Chooses and hands out the tokens after the rows of the last step."""
        while self._sampled:
            self._hand_out_rows(self._sampled[0])
            record = self._sampled.popleft().record
            if record.decodes and not (self._sampled and self._sampled[0].record is record):
                self.drafting.observe_step(record)

    def _hand_out_rows(self, sampled: Sampled) -> None:
        """Chooses a token, and further ones as long as each is the one that was guessed.

        Each is chosen as without guesses, from the same logits and random numbers: so is the answer.
        """
        request, drafts, before = sampled.request, sampled.drafts, sampled.request.trace.accepted
        for row, draft in zip_longest(sampled.logits, drafts):
            if request.ended:
                break
            try:
                self._token(request, row)
            except BaseException as error:  # raised by a callback: the request's caller gets it
                self.end(request, error=error)
            if draft is None or request.ended or request.tokens[-1] != draft:
                break
            self._accept(sampled)
        self.drafting.observe(request, len(drafts), request.trace.accepted - before)

    def _accept(self, sampled: Sampled) -> None:
        """Makes a request's next guess part of its sequence: it was right."""
        request = sampled.request
        assert request.sequence
        request.sequence.commit(1, guesses=True)
        request.trace.accepted += 1
        sampled.record.accepted += 1
        self.decode = self.decode.accepting(1)
        for each in sampled.together:  # a step's counts are added for all of its rows
            each.trace.decode = each.trace.decode.accepting(1)

    def _token(self, request: Request, logits: torch.Tensor) -> None:
        sampling, sequence = request.sampler.sampling, request.sequence
        assert sequence
        new = len(request.tokens) - request.prompt
        token = request.next_token(logits)
        times = request.trace.token_times
        times.append(time.perf_counter())
        if request is self._queue.running[0]:
            if new:
                # Prompts' layers between two tokens say nothing about the bits of new tokens.
                self._engine.rules.observe_token(times[-1] - times[-2] - self._prompt_s)
            self._prompt_s = 0.0
        if request.on_token(token, logits) or token in sampling.stop:
            self.end(request, "stop")
        elif new + 1 >= sampling.max_new_tokens:
            self.end(request, "length")
        elif sequence.length >= sequence.context:
            self.end(request, "context")
        elif self._lengths and self._lengths.crosses(sequence.length + 1):
            self._queue.compute_again(request)

    def end(self, request: Request, reason: str | None = None, error: BaseException | None = None) -> None:
        """Takes a request out and frees its KV; without effect where it has ended."""
        if request.ended:
            return
        self._queue.remove(request, error)
        request.reason, request.error = reason, error
        self._ended += 1
        if self._ended % REQUESTS_A_TRIM == 0:
            return_free_memory()  # malloc keeps the holes that a rare long prompt leaves between other blocks
        request.on_end()
