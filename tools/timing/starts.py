"""One start of an engine and the answers that follow."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import ExpertKey


def answer(engine: Engine, prompt: Sequence[int], new_tokens: int) -> dict[str, float]:
    """Answers greedily; returns seconds to the first token and for a later one, and bytes read."""
    sampling = Sampling(0, 1, 0, 1, 0, new_tokens, frozenset())
    request = Request(list(prompt), Sampler(sampling))
    scheduler = Scheduler(engine)
    try:
        scheduler.run(request)
    finally:
        scheduler.close()
    trace = request.trace
    read = (trace.prefill + trace.decode).transfers.ssd_bytes
    return {"ttft_s": trace.ttft, "tpot_s": trace.tpot or 0.0, "ssd_bytes": read}


@dataclass(frozen=True)
class Start:
    """How an engine starts and answers.

    Args:
        store: the model.
        plan: its memory.
        settings: its levels.
        new_tokens: tokens of each answer.
    """

    store: StoreModel
    plan: MemoryPlan
    settings: RunSettings
    new_tokens: int

    def answers(
        self, heat: Mapping[ExpertKey, float], prompts: Sequence[Sequence[int]], idle: float
    ) -> tuple[list[dict[str, float]], dict[ExpertKey, float]]:
        """Opens an engine, fills free memory for `idle` seconds, the hottest experts first, and answers prompts.

        Returns:
            the figures of each answer, and how hot each expert was in the end.
        """
        with Engine(self.store, self.plan, self.settings) as engine:
            engine.fill_first(heat)
            until = time.monotonic() + idle
            engine.fill(lambda: time.monotonic() < until)
            answers = [answer(engine, prompt, self.new_tokens) for prompt in prompts]
            used = engine.heat()
        del engine
        gc.collect()  # its memory is freed before the next one opens
        return answers, used
