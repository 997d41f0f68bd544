"""Decodes several prompts together, greedily, with edgemoe."""

from __future__ import annotations

import math
import time

from edgemoe.engine.engine import Engine
from edgemoe.engine.pace import WORK_BETWEEN, Pace
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.memory.limits import SHARED_ROWS


def most_tokens(prompts: list[list[int]], new_tokens: int) -> int:
    """Most tokens of an answer when the last prompt's has `new_tokens`: steps between prompts add some."""
    apart = WORK_BETWEEN, SHARED_ROWS
    return new_tokens + sum(math.ceil(len(prompt) / rows) for prompt in prompts[1:] for rows in apart)


def decode_together(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Request:
    """Decodes greedily until the last prompt's answer has `new_tokens`, a token of every prompt in each of its steps.

    Returns:
        the last prompt's request, whose times and counts are of the steps that all prompts share.
    """
    greedy = Sampling(0, 1, 0, 1, 0, most_tokens(prompts, new_tokens), frozenset())
    scheduler = Scheduler(engine, Pace(every=1))
    start = time.perf_counter()
    requests = [Request(list(prompt), Sampler(greedy), start) for prompt in prompts]
    for request in requests:
        scheduler.submit(request)
    last = requests[-1]
    scheduler.wait(last, lambda: len(last.trace.token_times) == new_tokens)
    scheduler.close()
    return last
