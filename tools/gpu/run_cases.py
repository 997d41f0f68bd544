"""Measures every case of tools.gpu.bench that starts in time."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

from edgemoe.bench.run import BenchRequest, run_bench
from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import DoesNotFit
from tools.gpu.aims import Json
from tools.gpu.cases import cases, choose


class Clock:
    """Prints progress with the time since the start, and knows when the minutes are over."""

    def __init__(self, minutes: float) -> None:
        self._start, self._seconds = time.monotonic(), 60 * minutes

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        """Whether no further case may start."""
        return self.seconds > self._seconds

    def say(self, what: str, of: str = "") -> None:
        """Prints one line on stderr."""
        print(f"{self.seconds:6.1f} s  {of}{what}", file=sys.stderr, flush=True)


def measure(store: StoreModel, options: argparse.Namespace, clock: Clock) -> tuple[Json, list[str]]:
    """Measures every case that starts in time; returns one report, and the cases left out with the reason."""
    experts = store.shape.experts * store.form.bytes_at(4)
    large = parse_size(options.dram_large) if options.dram_large else experts
    limits = [parse_size(limit) for limit in options.limits.split(",")]
    environment: Json = {}
    rows: list[Json] = []
    wanted, others = choose(cases(limits, large, parse_size(options.dram_small)), options.only)
    left_out = [f"{name}: not in --only" for name in others]
    for case in wanted:
        names = f"{case.name}: {', '.join(row.name for row in case.rows)}"
        if clock.is_over:
            left_out.append(f"{names}: {options.minutes:g} minutes were over")
            continue
        request = BenchRequest(
            case.rows,
            case.vram,
            case.dram,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            runs=options.runs,
            seed=options.seed,
            warm_up=not rows,
            fill=True,
        )
        try:
            report = run_bench(store, request, notify=partial(clock.say, of=f"{case.name}: "))
        except DoesNotFit as error:
            left_out.append(f"{names}: {error}")
            continue
        environment = environment or report["environment"]
        rows += [row | {"name": f"{case.name}: {row['name']}"} for row in report["rows"]]
    return {"environment": environment, "rows": rows}, left_out
