"""One run of each row with a timeline, apart from the measured runs, because recording takes time."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial

import torch

from edgemoe.bench.prompts import make_prompts
from edgemoe.bench.run import BenchRequest, Notify, make_plans
from edgemoe.bench.sample import take_sample
from edgemoe.bench.timeline import COMPUTE, TimedForm, TimedKernel, TimedSource, Timeline
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.kv.step import Step
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings
from prefetch.base import ExpertSource


class TimedEngine(Engine):
    """An engine whose steps, dense work, experts, waits, reads and copies are spans of a timeline.

    Evictions from VRAM to DRAM bypass the wrapped interfaces, so the copy lane lacks them.
    """

    def __init__(
        self, store: StoreModel, plan: MemoryPlan, settings: RunSettings, timeline: Timeline
    ) -> None:
        timed = dataclasses.replace(store, form=TimedForm(store.form, timeline))
        self._timeline = timeline
        super().__init__(
            timed,
            plan,
            settings,
            wrap_kernel=partial(TimedKernel, timeline=timeline),
            wrap_source=self._wrap_source,
        )

    def _wrap_source(self, source: ExpertSource) -> ExpertSource:
        self._timed_source = TimedSource(source, self._timeline)
        return self._timed_source

    def step(self, step: Step, *, all_rows: bool = False) -> torch.Tensor:
        """Runs a step within a span (Engine.step)."""
        name = "decode step" if step.decodes else "prefill step"
        with self._timeline.span(COMPUTE, name, rows=step.rows):
            self._timed_source.begin()
            try:
                return super().step(step, all_rows=all_rows)
            finally:
                self._timed_source.end()


def trace_rows(store: StoreModel, request: BenchRequest, notify: Notify) -> Timeline:
    """Runs the first prompt of the first set on each row, from an empty expert cache, and records the spans.

    Args:
        store: of the model.
        request: as for run_bench; `runs` is not used.
        notify: called with the name of the next row.

    Returns:
        The timeline of all rows.

    Raises:
        UserError, DoesNotFit, DamagedData: as run_bench.
    """
    timeline = Timeline()
    plans = make_plans(store, request)
    (encode,) = make_prompts(
        store, request.prompts, request.prompt_file, request.prompt_tokens, 1, request.seed
    )[0].prompts
    for row, plan in zip(request.rows, plans, strict=True):
        notify(f"timeline: {row.name}")
        timeline.group = row.name
        with TimedEngine(store, plan, row.settings, timeline) as engine:
            take_sample(engine, engine.new_sequence(), encode, request.new_tokens)
        del engine
        gc.collect()
    return timeline
