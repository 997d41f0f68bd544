"""Requests of one engine: which of them wait, which one's prompt runs, and which decode together.

Steps are homogeneous: a chunk of one prompt, or one token of every running sequence. While sequences decode, a chunk
comes after every `Pace.every` of their steps, and as many of their steps run between two layers of the chunk for each
WORK_BETWEEN of its work, so running answers go on while a prompt comes in. Sequences join and leave between steps.

    submit ──► arrivals ──► KV fits the budget ──► chunks of its prompt ──► decodes with the others ──► end
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from edgemoe.engine.arrivals import Arrivals
from edgemoe.engine.engine import Engine
from edgemoe.engine.kept_sequences import KeptSequences
from edgemoe.engine.sampling import Sampler
from edgemoe.errors import DoesNotFit, NotFinite, UserError
from edgemoe.experts.use import ExpertUse
from edgemoe.kernels import threads
from edgemoe.kv.prefix_cache import PrefixCache
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step, StepCancelled
from edgemoe.machine.process import return_free_memory
from edgemoe.machine.sigint import DeferredInterrupt
from edgemoe.policy.importance import PromptAttention
from edgemoe.prefetch.counts import TransferCounts

CHUNK_BESIDE_OTHERS = 2048
"""Most tokens of a prompt's chunk where several sequences may run: one layer of it bounds the gap between two of their
tokens."""

WORK_BETWEEN = 128
"""Tokens of a prompt that the model computes while other sequences wait for their next tokens. A layer of a larger
chunk is not divided: no other step may run while its experts are computed."""

REQUESTS_A_TRIM = 64
"""Ended requests after which free memory goes back to the system: that takes a millisecond."""

CANCELLED = "cancelled"
"""The reason of a request that was cancelled."""


@dataclass
class Trace:
    """Times and counts of one request. A step's counts are those of all its rows.

    Args:
        start: seconds of time.perf_counter() at arrival.
        admitted: when the request got its KV; None: it waits.
        token_times: of each token, when the host has it.
        prefill, decode: transfers.
        prefill_use, decode_use: experts by level.
        decode_steps, decode_rows: decode steps that the request took part in, and all rows of these.
    """

    start: float
    admitted: float | None = None
    token_times: list[float] = field(default_factory=list)
    prefill: TransferCounts = field(default_factory=TransferCounts)
    decode: TransferCounts = field(default_factory=TransferCounts)
    prefill_use: ExpertUse = field(default_factory=ExpertUse)
    decode_use: ExpertUse = field(default_factory=ExpertUse)
    decode_steps: int = 0
    decode_rows: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from the start to the first token."""
        return self.token_times[0] - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens after it.

    Args:
        tokens: ids of the prompt; grows by the answer's ids, of which the sequence lacks the last.
        sampler: chooses tokens; its settings end the answer.
        start: seconds of time.perf_counter() at arrival.
        on_token: called with each token, one of `stop` included, and the float32 logits [vocab] it was chosen from, in
            the thread that drives the scheduler; True ends the answer.
        on_end: called once, when the request has ended.
        sequence: of the caller's, which has the prompt's first tokens, less than all, and stays as it is at the end;
            None: one is made and freed.
        on_rows: called with the number of rows before it and float32 logits [rows, vocab], for all rows of the prompt
            in turn; None: these are not computed.
        scored: ends the request with its prompt; otherwise the prompt is answered.
        rows_from: rows of the prompt before this one are not wanted of `on_rows`.
        client: requests of several clients that wait are admitted in turn.

    Attributes:
        cached: tokens of the prompt that are not computed again.
        done: tokens of the prompt that the sequence has.
        partly: tokens that the layers of the step under way amount to.
        reason: why it ended: stop, length, context, CANCELLED, or "scored"; None before, and after an error.
        error: that ended it.
    """

    tokens: list[int]
    sampler: Sampler
    start: float = field(default_factory=time.perf_counter)
    on_token: Callable[[int, torch.Tensor], bool] = lambda token, logits: False
    on_end: Callable[[], None] = lambda: None
    sequence: SequenceKV | None = None
    on_rows: Callable[[int, torch.Tensor], None] | None = None
    scored: bool = False
    rows_from: int = 0
    client: str = ""
    reason: str | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.prompt, self.trace = len(self.tokens), Trace(self.start)
        self.cancelled, self.kept = False, self.sequence is not None
        self.attention = PromptAttention()
        self.cached = self.done = self.sequence.length if self.sequence else 0
        self.partly = 0

    @property
    def ended(self) -> bool:
        """Whether no step will run for it any more."""
        return self.reason is not None or self.error is not None


@dataclass(frozen=True)
class Pace:
    """How prompts and answers share the steps.

    Args:
        chunk: tokens of a prompt in one step, 1 to the plan's prefill_rows; None: as many, but at most
            CHUNK_BESIDE_OTHERS where several sequences may run. It never depends on what runs, so neither do answers.
        every: decode steps between two chunks, while any sequence decodes; 0: prompts first, so answers wait for them.
    """

    chunk: int | None = None
    every: int = 4

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise UserError("a chunk of 1 token or more", f"{self.chunk}", "choose another one")
        if self.every < 0:
            raise UserError("0 or more decode steps between two chunks", f"{self.every}", "choose 4")

    def rows(self, engine: Engine) -> int:
        """Tokens of a prompt in one step of an engine.

        Raises:
            UserError: a chunk of more rows than the plan has memory for.
        """
        most = engine.plan.prefill_rows
        if self.chunk is not None:
            if self.chunk > most:
                raise UserError(
                    f"a chunk of 1 to {most} tokens", f"{self.chunk}", f"give --prefill-rows {self.chunk} too"
                )
            return self.chunk
        if engine.plan.parallel == 1:
            return most
        # On a device no other step runs between two layers.
        return WORK_BETWEEN if engine.device else min(most, CHUNK_BESIDE_OTHERS)


class Scheduler:
    """Runs the requests of one engine together, admitted client by client in turn (engine.arrivals).

    Thread-safe: any thread may submit, cancel and wait. The threads that wait drive the steps in turn, one at a time;
    `start` adds a thread that drives whenever there is work.

    Args:
        engine: runs the steps; no other caller uses it while requests run.
        pace: how prompts and answers share the steps.
        keep: the KV of ended requests stays, as long as there is memory, for prompts that begin with the same tokens.
        disk: has their blocks on disk, where `keep`; closed with the scheduler. None: memory alone.
    """

    def __init__(
        self, engine: Engine, pace: Pace | None = None, *, keep: bool = False, disk: PrefixCache | None = None
    ) -> None:
        self.engine, self._pace, self.disk = engine, pace or Pace(), disk
        self._kept = KeptSequences(engine, disk) if keep else None
        self._chunk = self._pace.rows(engine)
        self._work, self._work_between = 0, WORK_BETWEEN * len(engine.store.manifest.layers)
        self._arrived = Arrivals[Request]()
        self._prompt: Request | None = None
        self._running: list[Request] = []
        self._sampled: deque[tuple[Request, torch.Tensor]] = deque()
        self._since_chunk, self._ended = 0, 0
        self._turn = threading.Condition()
        self._driving, self._closed, self._pausing = False, False, 0
        self._thread: threading.Thread | None = None
        self.prefill, self.prefill_use = TransferCounts(), ExpertUse()
        """What all chunks of prompts have moved, and the levels that they used."""
        self.decode, self.decode_use = TransferCounts(), ExpertUse()
        """What all decode steps have moved, and the levels that they used."""

    @property
    def active(self) -> int:
        """Requests that have arrived and not ended."""
        return self.waiting + self.running

    @property
    def kept_bytes(self) -> int:
        """Bytes of KV that no request has, but that are kept."""
        return self._kept.nbytes if self._kept else 0

    def forget(self) -> None:
        """Frees the KV that is kept. Not to be called by a callback."""
        with self.paused():
            if self._kept:
                self._kept.clear()

    def save(self, tokens: Sequence[int]) -> None:
        """Begins to keep KV on disk, with that of the first tokens as far as it is kept; returns when it is written.

        Not to be called by a callback.
        """
        if self._kept and self.disk:
            with self.paused():
                self._kept.save(tokens)
                self.disk.flush()

    def saved(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        """Returns a hash of all that KV depends on beside tokens, and how many of the tokens have theirs on disk.

        None: no KV is kept on disk.
        """
        return self._kept.saved(tokens) if self._kept and self.disk else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Waits until the step that runs has ended; no other one runs within the block. Not for callbacks."""
        with self._turn:
            self._pausing += 1
            self._turn.wait_for(lambda: not self._driving)
            self._pausing -= 1
            self._driving = True
        try:
            yield
        finally:
            self._end_turn()

    @property
    def waiting(self) -> int:
        """Requests that wait for their KV."""
        return len(self._arrived)

    @property
    def running(self) -> int:
        """Requests whose prompt runs, or that decode."""
        return len(self._running) + (self._prompt is not None)

    def submit(self, request: Request) -> None:
        """Adds a request behind its client's others.

        Raises:
            UserError: the prompt is empty, or the scheduler is closed.
            ModelRefused: a token that the model does not have.
            ContextExceeded: the context does not hold the prompt.
        """
        self.engine.require_prompt(request.tokens)
        context = request.sequence.context if request.sequence else self.engine.plan.context
        SequenceKV.require_tokens(len(request.tokens), context)
        with self._turn:
            if self._closed:
                raise _closed()
            self._arrived.add(request)
            self._turn.notify_all()

    def run(self, request: Request) -> None:
        """Submits a request and drives until it has ended.

        Raises:
            the error that ended it; KeyboardInterrupt: it is cancelled, and its KV is free.
            as submit.
        """
        self.submit(request)
        self.wait(request)

    def wait(self, request: Request, until: Callable[[], bool] = lambda: False) -> None:
        """Drives until a submitted request has ended, or until `until`.

        Raises:
            as run.
        """
        try:
            self._drive(lambda: request.ended or until())
        except BaseException:
            self.drop(request)
            raise
        if request.error:
            raise request.error

    def cancel(self, request: Request) -> None:
        """Ends a request at the next step, a prompt's at its next layer. Its KV is free then."""
        request.cancelled = True
        with self._turn:
            self._turn.notify_all()

    def drop(self, request: Request) -> None:
        """Cancels a request and waits until its KV is free."""
        self.cancel(request)
        with self._turn:
            self._turn.wait_for(lambda: request.ended or not self._driving)
            # Where it has ended, another thread's step may run, with requests that are cancelled.
            if not request.ended:
                self._end_cancelled()

    def start(self, *, fill: bool = False) -> None:
        """Starts a thread that drives until `close`, if there is none.

        Args:
            fill: while no request is active, the thread reads experts into free blocks.
        """
        with self._turn:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._serve, args=(fill,), name="edgemoe-scheduler", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Ends every request with an error, and the thread. Idempotent."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._driving)
            for request in [*self._arrived, *self._running, *([self._prompt] if self._prompt else [])]:
                self._end(request, error=_closed())
            if self._kept:
                self._kept.clear()
            if self.disk:
                self.disk.close()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self, fill: bool) -> None:
        while not self._closed:
            self._drive(lambda: self._closed or not self.active)
            if fill and self._take_turn():
                self._fill()
            with self._turn:
                self._turn.wait_for(lambda: self._closed or self.active > 0)

    def _fill(self) -> None:
        """Reads experts into free blocks, in this thread's turn, until there is work. Errors are only logged."""
        try:
            self.engine.fill(lambda: not (self._closed or self.active or self._pausing))
        except Exception as error:
            logging.getLogger(__name__).warning("prefetch into free blocks failed: %s", error)
        finally:
            self._end_turn()

    def _drive(self, until: Callable[[], bool]) -> None:
        """Runs steps, in turn with other threads that wait, until `until`."""
        while not until():
            with self._turn:
                self._turn.wait_for(lambda: until() or not self._driving)
            with DeferredInterrupt():  # Ctrl-C comes within the engine's step, or behind all of it
                if self._take_turn():
                    try:
                        # OpenMP would give each thread that drives a worker of its own.
                        with threads.for_step():
                            self._step()
                    finally:
                        self._end_turn()

    def _take_turn(self) -> bool:
        with self._turn:
            if self._driving or self._closed:
                return False
            self._driving = True
            return True

    def _end_turn(self) -> None:
        with self._turn:
            self._driving = False
            self._turn.notify_all()

    def _step(self) -> None:
        """Runs one step, if there is one to run, and hands out its tokens."""
        self._end_cancelled()
        self._hand_out()
        self._admit()
        chunk_is_due = not self._running or self._since_chunk >= self._pace.every
        if self._prompt and chunk_is_due:
            self._since_chunk = 0
            self._prefill(self._prompt)
        elif self._running:
            self._since_chunk += 1
            self._decode(self._running)
        self._hand_out()

    def _end_cancelled(self, within: Request | None = None) -> None:
        """Ends requests that were cancelled, except one whose step is under way."""
        for request in [*self._arrived, *self._running, *([self._prompt] if self._prompt else [])]:
            if request.cancelled and request is not within:
                self._end(request, CANCELLED)

    def _admit(self) -> None:
        """Gives the request whose turn it is its KV, if the budget has it."""
        request = self._arrived.first()
        if self._prompt or request is None or len(self._running) >= self.engine.plan.parallel:
            return
        if request.sequence is None:
            wanted = request.prompt + request.sampler.sampling.max_new_tokens
            try:
                self._give_sequence(request, min(wanted, self.engine.plan.context))
            except Exception as error:
                if not (self._running and isinstance(error, DoesNotFit)):
                    self._end(request, error=error)
                return
        request.trace.admitted = time.perf_counter()
        self._prompt = self._arrived.take()

    def _give_sequence(self, request: Request, context: int) -> None:
        """Gives a request its KV, with what is kept of the prompt's first tokens; all but one at most."""
        if self._kept is None:
            request.sequence = self.engine.new_sequence(context)
            return
        most = min(request.prompt - 1, request.prompt if request.on_rows is None else request.rows_from)
        running = [(other.tokens, other.sequence) for other in self._running if other.sequence]
        request.sequence, request.cached = self._kept.sequence_for(request.tokens[:most], running)
        request.done = request.cached

    def _read_blocks(self, request: Request) -> bool:
        """Reads the next blocks of a prompt that are on disk; False: there are none."""
        assert request.sequence
        try:
            read = self._kept.read_blocks(request.sequence) if self._kept else None
        except Exception as error:
            self._end(request, error=error)
            return True
        if read is not None:
            request.done = request.cached = read
        return read is not None

    def _prefill(self, request: Request) -> None:
        if self._read_blocks(request):
            return
        assert request.sequence
        chunk = min(self._chunk, self.engine.plan.scored_rows) if request.on_rows else self._chunk
        part = tuple(request.tokens[request.done : request.done + chunk])
        step = Step(
            (Segment(request.sequence, part, request.attention),),
            lambda: self._unwanted(request),
            partial(self._between, request, len(part)),
        )
        logits = self._run(step, [request], all_rows=request.on_rows is not None)
        request.partly = 0
        if logits is None:
            return
        if request.on_rows:
            self._score(request, request.on_rows, logits)
        request.done += len(part)
        self._count_prefill(request)
        if request.done == request.prompt and not request.ended:
            request.attention = PromptAttention()  # new tokens have no ranks: the prompt's sums go
            self._sampled.append((request, logits[-1]))
            self._running.append(request)
            self._prompt = None
            if self._kept:
                self._kept.has_prompt(request.sequence, request.tokens)

    def _count_prefill(self, request: Request) -> None:
        counts, use = self.engine.take_counts(), self.engine.take_use()
        self.prefill, self.prefill_use = self.prefill + counts, self.prefill_use + use
        request.trace.prefill += counts
        request.trace.prefill_use += use

    def _between(self, request: Request, rows: int, layer: int) -> None:
        """Notes how far a prompt's step is, before a layer's experts; runs decode steps of the others where it is time.

        Args:
            request: of the prompt.
            rows: of the step.
            layer: of the model.
        """
        request.partly = rows * layer // self.engine.shape.layers
        self._work += rows
        if not self._running or self._work < self._work_between or self.engine.device:
            return
        self._work = 0
        self._count_prefill(request)
        for _ in range(self._pace.every):
            self._end_cancelled(within=request)
            if not self._running or self._unwanted(request):
                return
            self._decode(self._running)
            self._hand_out()

    def _score(
        self, request: Request, on_rows: Callable[[int, torch.Tensor], None], logits: torch.Tensor
    ) -> None:
        try:
            on_rows(request.done, logits)
        except BaseException as error:  # of the callback: its caller gets it
            self._end(request, error=error)
        if request.scored and request.done + len(logits) == request.prompt:
            self._end(request, "scored")

    def _decode(self, requests: Sequence[Request]) -> None:
        segments = [Segment(r.sequence, (r.tokens[-1],)) for r in requests if r.sequence]
        logits = self._run(Step(tuple(segments)), requests)
        if logits is None:
            return
        counts, use = self.engine.take_counts(), self.engine.take_use()
        self.decode, self.decode_use = self.decode + counts, self.decode_use + use
        for request in requests:
            trace = request.trace
            trace.decode, trace.decode_use = trace.decode + counts, trace.decode_use + use
            trace.decode_steps += 1
            trace.decode_rows += len(requests)
        self._sampled.extend(zip(requests, logits, strict=True))

    def _unwanted(self, request: Request) -> bool:
        return request.cancelled or self._closed

    def _run(self, step: Step, requests: Sequence[Request], *, all_rows: bool = False) -> torch.Tensor | None:
        """Runs a step; None where it failed, and the requests that an error belongs to have ended."""
        self.engine.take_counts()
        self.engine.take_use()
        try:
            if self._kept:
                for segment in step.segments:
                    self._kept.reserve(segment.sequence, len(segment.tokens))
            return self.engine.step(step, all_rows=all_rows)
        except StepCancelled:
            self._end_cancelled()
        except NotFinite as error:
            # The others run again, without those whose logits are not finite.
            for i in error.segments:
                self._end(requests[i], error=error)
        except Exception as error:
            for request in list(requests):
                self._end(request, error=error)
        return None

    def _hand_out(self) -> None:
        """Chooses and hands out the token behind each row of the last step."""
        while self._sampled:
            request, logits = self._sampled[0]
            if not request.ended:
                try:
                    self._token(request, logits)
                except BaseException as error:  # of a callback: its caller gets it
                    self._end(request, error=error)
            self._sampled.popleft()

    def _token(self, request: Request, logits: torch.Tensor) -> None:
        sampling, sequence = request.sampler.sampling, request.sequence
        assert sequence
        new = len(request.tokens) - request.prompt
        token = request.sampler.next(request.tokens, logits, new)
        times = request.trace.token_times
        times.append(time.perf_counter())
        request.tokens.append(token)
        if new and request is self._running[0]:
            before, now = request.trace.token_times[-2:]
            self.engine.observe_token(now - before)
        if request.on_token(token, logits) or token in sampling.stop:
            self._end(request, "stop")
        elif new + 1 >= sampling.max_new_tokens:
            self._end(request, "length")
        elif sequence.length >= sequence.context:
            self._end(request, "context")

    def _end(self, request: Request, reason: str | None = None, error: BaseException | None = None) -> None:
        """Takes a request out and frees its KV; without effect where it has ended."""
        if request.ended:
            return
        self._arrived.remove(request)
        self._running = [other for other in self._running if other is not request]
        self._prompt = None if self._prompt is request else self._prompt
        if request.sequence and not request.kept:
            self._free(request.sequence, request.tokens, error)
            request.sequence = None
        request.reason, request.error = reason, error
        self._ended += 1
        if self._ended % REQUESTS_A_TRIM == 0:
            return_free_memory()  # malloc keeps the holes that a rare long prompt leaves between other blocks
        request.on_end()

    def _free(self, sequence: SequenceKV, tokens: Sequence[int], error: BaseException | None) -> None:
        """Keeps the KV of an ended request, or frees it; after a value that is not finite, all that may have it."""
        if self._kept is None:
            self.engine.end_sequence(sequence)
        elif isinstance(error, NotFinite):
            self._kept.discard(sequence, tokens)
        else:
            self._kept.keep(sequence, tokens)


def _closed() -> UserError:
    return UserError("an open model", "one that was closed", "load it again")
