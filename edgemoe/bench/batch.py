"""Several requests at once: times from arrival, throughput beside its bound, and experts that a step touches.

Each batch size has an engine of its own, whose plan has so many sequences. Arrivals are closed (as many clients, each
sends its next request when its answer has ended) or Poisson. One request that is not counted comes first.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from edgemoe.bench import bandwidth
from edgemoe.bench.bandwidth import Bandwidth
from edgemoe.bench.environment import environment
from edgemoe.bench.prompts import make_prompts
from edgemoe.bench.run import BenchRequest, Notify
from edgemoe.bench.sample import Phase
from edgemoe.bench.summary import decode_bound, summary
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import Request, Trace
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import UserError
from edgemoe.experts.step import StepRecord, StepTotals
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.plans.requirements import MOST_PARALLEL
from edgemoe.policy.settings import RunSettings

PAPER_BATCHES = (1, 2, 4, 8, 16, 32)
PAPER_ACTIVE = {
    "decode": (0.063, 0.116, 0.201, 0.319, 0.465, 0.620),
    "prefill": (0.469, 0.600, 0.734, 0.844, 0.928, 0.966),
}
"""Fraction of a layer's experts that a step of PAPER_BATCHES activates: DynaExq's Tables 1 and 2, Qwen3-30B-A3B."""


@dataclass(frozen=True)
class BatchRequest:
    """What a benchmark of batches measures.

    Args:
        batches: sequences at once, each 1 to MOST_PARALLEL.
        rate: requests a second that arrive; None: closed.
        pace: how prompts and answers share the steps.
    """

    batches: tuple[int, ...]
    rate: float | None = None
    pace: Pace = field(default_factory=Pace)

    @classmethod
    def parse(cls, batches: str, arrival: str, pace: Pace) -> BatchRequest:
        """Reads "1,2,4" and "closed" or "poisson:RATE".

        Raises:
            UserError: one is neither.
        """
        try:
            sizes = tuple(int(size) for size in batches.split(","))
        except ValueError:
            sizes = ()
        if not sizes or not all(1 <= size <= MOST_PARALLEL for size in sizes):
            wanted = f"batches of 1 to {MOST_PARALLEL} in --batch, such as 1,2,4,8"
            raise UserError(wanted, repr(batches), "write them with commas between")
        kind, _, rate = arrival.partition(":")
        if arrival == "closed":
            return cls(sizes, None, pace)
        try:
            number = float(rate)
        except ValueError:
            number = 0.0
        if kind != "poisson" or not 0 < number < float("inf"):
            raise UserError("closed or poisson:RATE for --arrival", repr(arrival), "write poisson:0.5")
        return cls(sizes, number, pace)


def run_batches(
    store: StoreModel, wanted: BatchRequest, request: BenchRequest, settings: RunSettings, notify: Notify
) -> dict[str, Any]:
    """Measures every batch size and returns the report.

    Args:
        store: of the model.
        wanted: batches and arrivals.
        request: limits and prompts; `runs` is the number of requests for each place of a batch.
        settings: of the engine.
        notify: called before every batch.

    Raises:
        UserError, DoesNotFit, DamagedData: as run_bench.
    """
    plans = [_plan(store, request, settings, batch) for batch in wanted.batches]
    count = request.runs * max(wanted.batches) + 1
    (prompts,) = make_prompts(
        store, request.prompts, request.prompt_file, request.prompt_tokens, count, request.seed
    )[:1]
    tokens = [encode() for encode in prompts.prompts]
    notify("warming up")  # one-time costs of the process would count as the first batch's
    _run(
        store,
        plans[0],
        settings,
        replace(wanted, rate=None),
        replace(request, runs=1),
        tokens,
        wanted.batches[0],
    )
    gc.collect()
    probes = [bandwidth.measure(store, set(settings.levels))]
    rows = []
    for batch, plan in zip(wanted.batches, plans, strict=True):
        notify(f"batch {batch}")
        rows.append((batch, plan, _run(store, plan, settings, wanted, request, tokens, batch)))
        gc.collect()
    probes.append(bandwidth.measure(store, set(settings.levels)))
    facts = environment(store) | {
        "prompt": prompts.source,
        "prompt_tokens": request.prompt_tokens,
        "new_tokens": request.new_tokens,
        "arrival": "closed" if wanted.rate is None else f"poisson:{wanted.rate:g}",
        "chunk": wanted.pace.chunk,
        "every": wanted.pace.every,
        "seed": request.seed,
        "notes": list(request.notes),
    }
    measured = bandwidth.best(probes)
    return {"environment": facts, "rows": [_row(store, settings, measured, *row) for row in rows]}


def _plan(store: StoreModel, request: BenchRequest, settings: RunSettings, batch: int) -> MemoryPlan:
    return store.plan(
        vram_limit=request.vram_limit,
        dram_limit=request.dram_limit,
        settings=settings,
        context=request.context or request.tokens,
        parallel=batch,
        prefill_rows=request.prefill_rows,
    )


@dataclass(frozen=True)
class Run:
    """One batch's requests, and the records of the engine's steps for them. Seconds."""

    traces: list[Trace]
    wall_s: float
    steps: list[StepRecord]
    peak_bytes: int

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


def _run(
    store: StoreModel,
    plan: MemoryPlan,
    settings: RunSettings,
    wanted: BatchRequest,
    request: BenchRequest,
    tokens: Sequence[list[int]],
    batch: int,
) -> Run:
    with Engine(store, plan, settings) as engine:
        engine.fill()
        Scheduler(engine, wanted.pace).run(_request(tokens[-1], request.new_tokens))
        scheduler = Scheduler(engine, wanted.pace)
        prompts = list(tokens[: request.runs * batch])
        start = time.perf_counter()
        try:
            with engine.recorded() as steps:
                ended = _arrive(scheduler, prompts, request.new_tokens, wanted.rate, batch, request.seed)
        finally:
            scheduler.close()
        wall = time.perf_counter() - start
        return Run([each.trace for each in ended], wall, steps, engine.peak.bytes)


def _request(tokens: list[int], new_tokens: int) -> Request:
    return Request(list(tokens), Sampler(Sampling(0, 1, 0, 1, 0, new_tokens, frozenset())))


def _arrive(
    scheduler: Scheduler, prompts: list[list[int]], new: int, rate: float | None, batch: int, seed: int
) -> list[Request]:
    """Submits all requests as they arrive, and drives until all have ended."""
    left, sent, draw = list(reversed(prompts)), list[Request](), random.Random(seed)

    def submit() -> None:
        request = _request(left.pop(), new)
        if rate is None:
            request.on_end = lambda: submit() if left else None
        sent.append(request)
        scheduler.submit(request)

    for _ in range(min(batch, len(left)) if rate is None else 1):
        submit()
    while rate is not None and left:
        _drive_until(scheduler, sent, time.perf_counter() + draw.expovariate(rate))
        submit()
    _drive_until(scheduler, sent, math.inf)
    return sent


def _drive_until(scheduler: Scheduler, sent: list[Request], end: float) -> None:
    """Drives until a time (time.perf_counter) or, where that is infinite, until all requests have ended."""
    for request in sent:  # closed arrivals add to the list meanwhile
        scheduler.wait(request, lambda: time.perf_counter() >= end)
    if end < math.inf:
        time.sleep(max(end - time.perf_counter(), 0))


def _row(
    store: StoreModel, settings: RunSettings, measured: Bandwidth, batch: int, plan: MemoryPlan, run: Run
) -> dict[str, Any]:
    decode_s = [step.seconds for step in run.steps if step.decodes]
    rows = [step.rows for step in run.steps if step.decodes]
    bound = decode_bound(
        run.decode, len(decode_s), sum(decode_s) / len(decode_s), store, measured.of_levels(settings.levels)
    )
    full = [step.seconds for step in run.steps if step.decodes and step.rows == batch]
    mean_rows, counts = sum(rows) / len(rows), run.decode.counts
    return {
        "name": f"{settings.name}, batch {batch}",
        "batch": batch,
        "setting": settings.name,
        "requests": len(run.traces),
        "valid": run.peak_bytes <= plan.limit_bytes(store.device),
        "peak_vram_bytes": run.peak_bytes,
        "limit_bytes": plan.limit_bytes(store.device),
        "vram_limit_bytes": plan.vram_limit_bytes,
        "plan": plan.as_json(),
        "ttft_s": summary([trace.ttft for trace in run.traces]),
        "tpot_s": summary([trace.tpot for trace in run.traces if trace.tpot is not None]),
        "itl_s": summary([gap for trace in run.traces for gap in trace.gaps]),
        "e2e_s": summary([trace.token_times[-1] - trace.start for trace in run.traces]),
        "tokens_s": sum(len(trace.token_times) for trace in run.traces) / run.wall_s,
        "decode_tok_s": sum(rows) / sum(decode_s),
        "rows_per_step": mean_rows,
        "full_tok_s": batch / float(np.median(full)) if full else None,
        "step_s": summary(decode_s),
        **bound,
        "bytes_per_step": bound["bytes_per_token"],
        "bound_tok_s": mean_rows / bound["bound_s"],
        "active": {
            name: _fraction(store, run.active(decode=name == "decode")) for name in ("prefill", "decode")
        },
        "active_per_layer": {
            name: [
                {"layer": layer, "active": sum(of) / len(of) / store.shape.experts_per_layer}
                for layer, of in sorted(run.active(decode=name == "decode").items())
            ]
            for name in ("prefill", "decode")
        },
        "missed": counts.requests - counts.vram_hits - counts.dram_hits,
        "hot": counts.transitions if settings.hotness else None,
        "lynx": run.decode.use.agreement if settings.remapping else None,
        "active_paper": {
            name: of[PAPER_BATCHES.index(batch)] if batch in PAPER_BATCHES else None
            for name, of in PAPER_ACTIVE.items()
        },
    }


def _fraction(store: StoreModel, layers: dict[int, list[int]]) -> float | None:
    """Mean fraction of a layer's experts that a step activates."""
    counts = reduce(add, layers.values(), list[int]())
    return sum(counts) / len(counts) / store.shape.experts_per_layer if counts else None
