"""The requests of one batch size: their arrivals, and the steps that the engine runs for them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from edgemoe.bench.run import BenchRequest
from edgemoe.bench.sample import Phase, greedy
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import Request, Trace
from edgemoe.engine.scheduler import Scheduler
from edgemoe.experts.records import StepRecord, StepTotals
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings


@dataclass(frozen=True)
class Arrivals:
    """How requests come.

    Args:
        batch: sequences that run at once.
        rate: requests per second by chance (Poisson); None: each of `batch` clients sends its next request when its
            answer has ended.
        pace: how prompts and answers share the steps.
        seed: seed of the random arrival times.
    """

    batch: int
    rate: float | None
    pace: Pace
    seed: int


@dataclass(frozen=True)
class Run:
    """One batch's requests, and the records of the engine's steps for them. Seconds."""

    traces: list[Trace]
    wall_s: float
    steps: list[StepRecord]
    peak_bytes: int

    @property
    def most_rows(self) -> int:
        """The most sequences that a step of new tokens had."""
        return max(step.sequences for step in self.steps if step.decodes)

    @property
    def decode(self) -> Phase:
        """Counts of the steps of new tokens, each step once."""
        total = StepTotals.of(step for step in self.steps if step.decodes)
        return Phase(total.transfers, total.use)

    def active(self, *, decode: bool) -> dict[int, list[int]]:
        """Layer -> distinct experts that each step of one phase activated."""
        found: dict[int, list[int]] = {}
        for step in self.steps:
            if step.decodes == decode:
                for layer, experts in step.active.items():
                    found.setdefault(layer, []).append(experts)
        return found


def run_batch(
    store: StoreModel,
    plan: MemoryPlan,
    settings: RunSettings,
    arrivals: Arrivals,
    request: BenchRequest,
    tokens: Sequence[list[int]],
) -> Run:
    """Runs the requests of one batch size on an engine of its own.

    Args:
        store: the model's store.
        plan: the memory plan for as many sequences as the batch has.
        settings: the engine's settings.
        arrivals: when requests arrive, and how many run at once.
        request: `runs` is the number of requests for each place of the batch; with the tokens of an answer.
        tokens: prompts, one more than requests: the last one runs first and is not counted.
    """
    with Engine(store, plan, settings) as engine:
        engine.fill()
        Scheduler(engine, arrivals.pace).run(_request(tokens[-1], request.new_tokens))
        scheduler = Scheduler(engine, arrivals.pace)
        prompts = list(tokens[: request.runs * arrivals.batch])
        start = time.perf_counter()
        try:
            with engine.recorded() as steps:
                ended = _arrive(scheduler, prompts, request.new_tokens, arrivals)
        finally:
            scheduler.close()
        wall = time.perf_counter() - start
        return Run([each.trace for each in ended], wall, steps, engine.peak.bytes)


def _request(tokens: list[int], new_tokens: int) -> Request:
    return Request(list(tokens), greedy(new_tokens))


def _arrive(scheduler: Scheduler, prompts: list[list[int]], new: int, arrivals: Arrivals) -> list[Request]:
    """Submits all requests as they arrive, and drives until all have ended."""
    left, sent, draw = list(reversed(prompts)), list[Request](), random.Random(arrivals.seed)
    rate = arrivals.rate

    def submit() -> None:
        request = _request(left.pop(), new)
        if rate is None:
            request.on_end = lambda: submit() if left else None
        sent.append(request)
        scheduler.submit(request)

    for _ in range(min(arrivals.batch, len(left)) if rate is None else 1):
        submit()
    while rate is not None and left:
        _drive_until(scheduler, sent, time.perf_counter() + draw.expovariate(rate))
        submit()
    _drive_until(scheduler, sent, math.inf)
    return sent


def _drive_until(scheduler: Scheduler, requests: list[Request], end: float) -> None:
    """Drives until a time (time.perf_counter) or, where that is infinite, until all requests have ended."""
    for request in requests:  # closed arrivals add to the list meanwhile
        scheduler.wait(request, lambda: time.perf_counter() >= end)
    if end < math.inf:
        time.sleep(max(end - time.perf_counter(), 0))
