"""Greedy requests that keep their logits, and the same ones with nothing kept before them."""

from __future__ import annotations

from dataclasses import replace

import torch

from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler

GREEDY = Sampling(0, 1, 0, 1, 0, 4, frozenset())


class Greedy(Request):
    """A greedy request that keeps the logits of every token."""

    def __init__(self, tokens: list[int], new: int = 4, **options: object) -> None:
        self.rows: list[torch.Tensor] = []
        super().__init__(
            list(tokens), Sampler(replace(GREEDY, max_new_tokens=new)), on_token=self._keep, **options
        )

    def _keep(self, token: int, logits: torch.Tensor) -> bool:
        self.rows.append(logits.clone())
        return False


def run(scheduler: Scheduler, tokens: list[int], new: int = 4) -> Greedy:
    request = Greedy(tokens, new)
    scheduler.run(request)
    return request


def plain(engine: Engine, tokens: list[int], new: int = 4) -> torch.Tensor:
    """The logits of a request for which nothing is kept."""
    return torch.stack(run(Scheduler(engine), tokens, new).rows)


def assert_right(engine: Engine, request: Greedy) -> None:
    """A request's logits have the bits of the same one for which nothing is kept. Needs the memory of a sequence."""
    want = plain(engine, request.tokens[: request.prompt], len(request.rows))
    assert torch.equal(torch.stack(request.rows), want)
