"""Measures the host's part of a new token on a GPU, on a machine without one: a device that launches nothing.

    python -m tools.gpu.host_time [--tokens 60] [--temperature 0.7] [--profile] DIR

DIR gets a small store with the layers, experts and vocabulary of Qwen3-30B-A3B. Experts are chosen at random, some of
them more often than others, and the likeliest token is always the next one, with a temperature too. A row has the
milliseconds of the calling thread and the Python calls of a token: of the engine's step, and of the choice of the next
token.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from tools.command_line import make_parser, two_or_more
from tools.gpu.stub_device import SHAPE, StubDevice, open_store

WARM = 20
"""Tokens before the first one that is measured."""


def opened(store: StoreModel, resident: float) -> Engine:
    """An engine with a part of the experts in the device's memory, and all others in DRAM."""
    settings = RunSettings(levels=(4,), exact=True, speculate="off")
    each, experts = store.form.bytes_at(4), SHAPE.layers * SHAPE.experts
    sizes: dict[str, Any] = {"settings": settings, "context": 1024}
    limit = None
    if resident < 1:
        least = store.plan(vram_limit=None, **sizes).minimum_vram_bytes
        limit = least + int(resident * experts) * each
    plan = store.plan(vram_limit=limit, dram_limit=0 if limit is None else experts * each, **sizes)
    return Engine(store, plan, settings)


class Choices:
    """The outcomes of tokens: experts at random, each layer with its own favourites, and the likeliest token.

    Args:
        memory: memory of the launches.
    """

    def __init__(self, memory: Any) -> None:
        self._chance = np.random.default_rng(0)
        self._odds = [np.exp(self._chance.normal(0, 1.2, SHAPE.experts)) for _ in range(SHAPE.layers)]
        self._sizes = [part.numel() for part in memory.outcome_parts]
        self.outcome = torch.zeros_like(memory.outcome)
        self._logits = torch.from_numpy(self._chance.normal(0, 3, self._sizes[0])).bfloat16().float()

    def draw(self, likeliest: int) -> torch.Tensor:
        """The outcome of a token after which another one is the likeliest."""
        parts: list[torch.Tensor] = self.outcome.split(self._sizes)
        logits, trace, tokens = parts
        logits.view(torch.float32).copy_(self._logits)[likeliest] = 100
        tokens[0] = likeliest
        numbers, k = trace.view(SHAPE.layers, -1), SHAPE.top_k
        rows = [self._chance.choice(SHAPE.experts, k, False, odds / odds.sum()) for odds in self._odds]
        numbers[:, :k] = torch.from_numpy(np.stack(rows)).int()
        numbers[:, k : 2 * k] = torch.full((SHAPE.layers, k), 1 / k).view(torch.int32)
        numbers[:, 2 * k : 3 * k] = 4
        return self.outcome


def measure(store: StoreModel, resident: float, sampling: Sampling, profile: cProfile.Profile | None) -> str:
    """A row: milliseconds and calls of a token in the engine, and of the choice of the next one."""
    tokens = sampling.max_new_tokens
    with opened(store, resident) as engine:
        engine.fill()
        sequence, device = engine.sequences.new(), engine.store.device
        sequence.commit(10)
        assert isinstance(device, StubDevice)
        memory = engine._parts.runner.fused._memory
        choices, steps, chosen, calls = Choices(memory), list[float](), list[float](), 0
        sampler = Sampler(sampling)
        token = 5
        for number in range(WARM + tokens + 1):
            device.outcome = choices.draw(token + 1)
            last = number == WARM + tokens
            seen = cProfile.Profile() if last else profile if number >= WARM else None
            start = time.thread_time()
            if seen:
                seen.enable()
            logits = engine.step(Step((Segment(sequence, (token,), draws=sampler.draws),)))[0]
            middle = time.thread_time()
            token = sampler.next([token], logits)
            if seen:
                seen.disable()
            if last and seen:
                calls = sum(entry.callcount for entry in seen.getstats())
            elif number >= WARM:
                steps.append(middle - start)
                chosen.append(time.thread_time() - middle)
    row = f"{100 * resident:9.0f} % {1e3 * float(np.median(steps)):12.2f} {1e3 * float(np.median(chosen)):12.2f}"
    return f"{row} {calls:12d}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.gpu.host_time", __doc__)
    parser.add_argument("--tokens", type=two_or_more, default=60, help="tokens that are measured")
    parser.add_argument("--temperature", type=float, default=0.0, help="with which tokens are drawn")
    parser.add_argument("--profile", action="store_true", help="also print the functions that take longest")
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the store's directory, made if it is new"
    )
    options: argparse.Namespace = parser.parse_args(argv)
    torch.set_num_threads(1)
    store = open_store(options.directory)
    top_k = 20 if options.temperature else 0
    sampling = Sampling(options.temperature, 1.0, top_k, 1.0, 0, options.tokens, frozenset())
    print(f"{'resident':>11} {'step, ms':>12} {'choice, ms':>12} {'calls':>12}")
    for resident in (1.0, 0.47):
        profile = cProfile.Profile() if options.profile else None
        print(measure(store, resident, sampling, profile), flush=True)
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return 0


if __name__ == "__main__":
    sys.exit(main())
