"""One extra run of every row with a timeline. Apart from the measurement, because recording takes time too."""

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

    Victims on their way from VRAM to DRAM pass none of the wrapped interfaces, and are missing from the lane of copies.
    """

    def __init__(
        self, store: StoreModel, plan: MemoryPlan, settings: RunSettings, timeline: Timeline
    ) -> None:
        watched = dataclasses.replace(store, form=TimedForm(store.form, timeline))
        self._timeline = timeline
        super().__init__(
            watched,
            plan,
            settings,
            wrap_kernel=partial(TimedKernel, timeline=timeline),
            wrap_source=self._timed,
        )

    def _timed(self, source: ExpertSource) -> ExpertSource:
        self._timed_source = TimedSource(source, self._timeline)
        return self._timed_source

    def step(self, step: Step) -> torch.Tensor:
        """See Engine."""
        name = "decode step" if step.decodes else "prefill step"
        with self._timeline.span(COMPUTE, name, rows=step.rows):
            self._timed_source.begin()
            try:
                return super().step(step)
            finally:
                self._timed_source.end()


def trace_rows(store: StoreModel, request: BenchRequest, notify: Notify) -> Timeline:
    """The first prompt of the first set on every row, from an empty expert cache.

    Args:
        store: of the model.
        request: as for run_bench; runs is not used.
        notify: called with the row that is about to run.

    Raises:
        as run_bench.
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
