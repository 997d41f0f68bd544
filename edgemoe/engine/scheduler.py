"""Requests of one engine, from any number of threads: submitted, driven, cancelled, ended.

Steps are homogeneous: chunks of prompts, or one token of every running sequence (engine.loop). Sequences join and leave
between steps.

    submit ──► arrivals ──► KV fits the budget ──► chunks of its prompt ──► decodes with the others ──► end
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from edgemoe.engine.engine import Engine
from edgemoe.engine.kept_sequences import KeptSequences
from edgemoe.engine.loop import StepLoop
from edgemoe.engine.pace import Pace
from edgemoe.engine.queue import RequestQueue
from edgemoe.engine.request import Request
from edgemoe.engine.turns import Turns
from edgemoe.errors import UserError
from edgemoe.experts.records import StepTotals
from edgemoe.kernels import torch_rules
from edgemoe.kv.prefix_cache import PrefixCache
from edgemoe.kv.sequence import SequenceKV
from edgemoe.machine.sigint import DeferredInterrupt


class Scheduler:
    """Runs the requests of one engine together, admitted client by client in turn (engine.arrivals).

    Thread-safe: any thread may submit, cancel and wait. The threads that wait drive the steps in turn, one at a time;
    `start` adds a thread that drives whenever there is work.

    Args:
        engine: runs the steps; no other caller uses it while requests run.
        pace: how prompts and answers share the steps.
        keep: whether the KV of ended requests stays, while there is memory, for prompts with the same first tokens.
        disk: keeps blocks of that KV on disk, with `keep`; closed with the scheduler. None: memory alone.

    Attributes:
        loop, queue: the steps and the requests, for the thread that has its turn.
        kept_sequences: the KV of ended requests; None: none is kept.
    """

    def __init__(
        self, engine: Engine, pace: Pace | None = None, *, keep: bool = False, disk: PrefixCache | None = None
    ) -> None:
        self.engine, self.disk = engine, disk
        self.kept_sequences = KeptSequences(engine, disk) if keep else None
        self.queue = RequestQueue(engine, self.kept_sequences)
        self._turns = Turns()
        self.loop = StepLoop(engine, self.queue, pace or Pace(), lambda: self._turns.closed)
        self._thread: threading.Thread | None = None

    @property
    def totals(self) -> tuple[StepTotals, StepTotals]:
        """Sums over all steps of prompts so far, and over all steps of new tokens."""
        return self.loop.prefill, self.loop.decode

    @property
    def active(self) -> int:
        """Requests that have arrived and not ended."""
        return self.waiting + self.running

    @property
    def waiting(self) -> int:
        """Requests that wait for their KV."""
        return len(self.queue.arrived)

    @property
    def running(self) -> int:
        """Requests whose prompts run, or that decode."""
        return self.queue.admitted

    @property
    def kept_bytes(self) -> int:
        """Bytes of KV that no request has, but that are kept."""
        return self.kept_sequences.nbytes if self.kept_sequences else 0

    def forget(self) -> None:
        """Frees the KV that is kept. Not to be called by a callback."""
        with self.paused(), self.engine.peak.counting():
            if self.kept_sequences:
                self.kept_sequences.clear()

    def save(self, tokens: Sequence[int], into: PrefixCache | None = None) -> None:
        """Begins to keep KV on disk, with the KV of the first tokens as far as it is kept; returns when it is written.

        Not to be called by a callback.

        Args:
            tokens: token ids.
            into: a cache other than the scheduler's own, which gets all KV that is kept.
        """
        if self.kept_sequences and into:
            with self.paused(), self.engine.peak.counting():
                for kept in self.kept_sequences.index.entries:
                    into.offer(kept.sequence, kept.hashes, kept.tokens)
                into.flush()
        elif self.kept_sequences and self.disk:
            with self.paused(), self.engine.peak.counting():
                self.kept_sequences.save(tokens)
                self.disk.flush()

    def saved(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        """Returns a hash of all that KV depends on except tokens, and how many of the tokens have KV on disk.

        None: no KV is kept on disk.
        """
        return self.kept_sequences.saved(tokens) if self.kept_sequences and self.disk else None

    def paused(self) -> AbstractContextManager[None]:
        """Waits until the step that runs has ended; no other one runs within the block. Not for callbacks."""
        return self._turns.paused()

    def submit(self, request: Request) -> None:
        """Adds a request after its client's others.

        Raises:
            UserError: the prompt is empty, or the scheduler is closed.
            ModelRefused: a token that the model does not have.
            ContextExceeded: the context does not hold the prompt.
        """
        self.engine.require_prompt(request.tokens)
        context = request.sequence.context if request.sequence else self.engine.plan.context
        SequenceKV.require_tokens(len(request.tokens), context)
        with self._turns.changing():
            if self._turns.closed:
                raise _closed()
            self.queue.arrived.add(request)

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
        with self._turns.changing():
            request.cancelled = True

    def drop(self, request: Request) -> None:
        """Cancels a request and waits until its KV is free."""
        self.cancel(request)
        with self._turns.alone(lambda: request.ended):
            # Where it has ended, another thread's step may run, with requests that are cancelled.
            if not request.ended:
                with self.engine.peak.counting():
                    self.loop.end_cancelled()

    def start(self, *, fill: bool = False) -> None:
        """Starts a thread that drives until `close`, if there is none.

        Args:
            fill: while no request is active, the thread reads experts into free blocks.
        """
        with self._turns.changing():
            if self._thread is None and not self._turns.closed:
                self._thread = threading.Thread(
                    target=self._serve, args=(fill,), name="edgemoe-scheduler", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Ends every request with an error, and the thread. Idempotent."""
        with self._turns.changing():
            self._turns.closed = True
        with self._turns.alone():
            for request in self.queue:
                self.loop.end(request, error=_closed())
            if self.kept_sequences:
                self.kept_sequences.clear()
            if self.disk:
                self.disk.close()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self, fill: bool) -> None:
        turns = self._turns
        while not turns.closed:
            self._drive(lambda: turns.closed or not self.active)
            if fill and turns.take():
                self._fill()
            turns.wait_for(lambda: turns.closed or self.active > 0)

    def _fill(self) -> None:
        """Reads experts into free blocks, in this thread's turn, until there is work. Errors are only logged."""
        try:
            self.engine.fill(lambda: not (self._turns.closed or self.active or self._turns.pausing))
        except Exception as error:
            logging.getLogger(__name__).warning("prefetch into free blocks failed: %s", error)
        finally:
            self._turns.end()

    def _drive(self, until: Callable[[], bool]) -> None:
        """Runs steps, in turn with other threads that wait, until `until`."""
        with self.engine.peak.counting():
            while not until():
                self._turns.wait_for(lambda: until() or not self._turns.taken)
                with DeferredInterrupt():  # Ctrl-C comes within the engine's step, or after all of it
                    if self._turns.take():
                        try:
                            # OpenMP would give each thread that drives a worker of its own.
                            with torch_rules.one_thread():
                                self.loop.step()
                        finally:
                            self._turns.end()


def _closed() -> UserError:
    return UserError("an open model", "one that was closed", "load it again")
