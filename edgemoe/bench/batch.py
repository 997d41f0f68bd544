"""Several requests at once: times from arrival, throughput next to its bound, and experts that a step activates.

Each batch size has an engine of its own, whose plan has so many sequences. Arrivals are closed (as many clients, each
sends its next request when its answer has ended) or Poisson. By default all prompts of closed arrivals run before their
answers go on, so each step of new tokens has a row of every sequence. One request that is not counted comes first.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

from edgemoe.bench import bandwidth
from edgemoe.bench.batch_rows import batch_row, not_full
from edgemoe.bench.batch_run import Arrivals, run_batch
from edgemoe.bench.environment import environment
from edgemoe.bench.run import BenchRequest, Notify
from edgemoe.engine.engine import StoreModel
from edgemoe.engine.pace import Pace
from edgemoe.errors import UserError
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.plans.requirements import MOST_PARALLEL
from edgemoe.policy.settings import RunSettings


@dataclass(frozen=True)
class BatchRequest:
    """The settings of a benchmark of batches.

    Args:
        batches: sequences at once, each 1 to MOST_PARALLEL.
        rate: requests per second that arrive; None: closed.
        chunk: tokens of a prompt in one step, as Pace.
        every: decode steps between two chunks, as Pace. None: 0 where arrivals are closed, so that every step of new
            tokens has a row of each sequence; as a server does elsewhere.
    """

    batches: tuple[int, ...]
    rate: float | None = None
    chunk: int | None = None
    every: int | None = None

    @property
    def pace(self) -> Pace:
        """How prompts and answers share the steps."""
        default = 0 if self.rate is None else Pace.every
        return Pace(self.chunk, default if self.every is None else self.every)

    @property
    def arrival(self) -> str:
        """The arrivals, as the option names them."""
        return "closed" if self.rate is None else f"poisson:{self.rate:g}"

    @classmethod
    def parse(
        cls, batches: str, arrival: str, chunk: int | None = None, every: int | None = None
    ) -> BatchRequest:
        """Reads "1,2,4" and "closed" or "poisson:RATE"; `chunk` and `every` as the fields.

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
            return cls(sizes, None, chunk, every)
        try:
            number = float(rate)
        except ValueError:
            number = 0.0
        if kind != "poisson" or not 0 < number < float("inf"):
            raise UserError("closed or poisson:RATE for --arrival", repr(arrival), "write poisson:0.5")
        return cls(sizes, number, chunk, every)


def run_batches(
    store: StoreModel, batches: BatchRequest, request: BenchRequest, settings: RunSettings, notify: Notify
) -> dict[str, Any]:
    """Measures every batch size and returns the report.

    Args:
        store: the store of the model.
        batches: batches and arrivals.
        request: limits and prompts; `runs` is the number of requests for each place of a batch.
        settings: the settings of the engine.
        notify: called before every batch.

    Raises:
        UserError, DoesNotFit, DamagedData: as run_bench.
    """
    plans = {batch: _plan(store, request, settings, batch) for batch in batches.batches}
    count = request.runs * max(batches.batches) + 1
    sets = request.prompt_sets(store, count)
    tokens = [encode() for encode in sets[0].prompts]
    notify("warming up")  # one-time costs of the process would count as the first batch's
    first = batches.batches[0]
    arrivals = Arrivals(first, None, batches.pace, request.seed)
    run_batch(store, plans[first], settings, arrivals, replace(request, runs=1), tokens)
    gc.collect()
    probes, runs = [], {}
    for batch, plan in plans.items():
        notify(f"batch {batch}: bandwidths")
        probes.append(bandwidth.measure(store, set(settings.levels)))
        notify(f"batch {batch}")
        arrivals = Arrivals(batch, batches.rate, batches.pace, request.seed)
        runs[batch] = run_batch(store, plan, settings, arrivals, request, tokens)
        gc.collect()
    probes.append(bandwidth.measure(store, set(settings.levels)))
    measured = bandwidth.best(probes)
    rows = [batch_row(store, settings, measured, batch, plans[batch], run) for batch, run in runs.items()]
    notes = [*request.notes, *not_full(rows)]
    return {"environment": _conditions(store, batches, request, sets[0].source, notes), "rows": rows}


def _conditions(
    store: StoreModel, batches: BatchRequest, request: BenchRequest, source: str, notes: list[str]
) -> dict[str, Any]:
    return environment(store) | {
        "prompt": source,
        "prompt_tokens": request.prompt_tokens,
        "new_tokens": request.new_tokens,
        "arrival": batches.arrival,
        "chunk": batches.pace.chunk,
        "every": batches.pace.every,
        "seed": request.seed,
        "notes": notes,
    }


def _plan(store: StoreModel, request: BenchRequest, settings: RunSettings, batch: int) -> MemoryPlan:
    return store.plan(
        vram_limit=request.vram_limit,
        dram_limit=request.dram_limit,
        settings=settings,
        context=request.context or request.tokens,
        parallel=batch,
        prefill_rows=request.prefill_rows,
    )
