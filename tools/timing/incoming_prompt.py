"""Measures the gaps between tokens of running answers while a long prompt comes in.

    python -m tools.timing.incoming_prompt STORE [--vram-limit 3GB] [--running 7] [--prompt-tokens 2048]
        [--paces 128:4 128:1 512:4]

A pace is the tokens of a chunk, and the decode steps between two chunks. A row for each: p50 and p99 of the gaps before
the prompt arrives and while it comes in, and the prompt's time to first token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.policy.settings import RunSettings
from tools.command_line import make_parser, positive

BEFORE = 16
"""Tokens of each running answer before the prompt arrives."""


def measure(engine: Engine, pace: Pace, running: int, prompt: int) -> tuple[list[float], list[float], float]:
    """Returns the gaps before and during a prompt, in seconds, and its time to first token."""
    draw, vocab = random.Random(0), engine.shape.vocab
    scheduler = Scheduler(engine, pace)

    def request(tokens: int, new: int) -> Request:
        ids = [draw.randrange(vocab) for _ in range(tokens)]
        return Request(ids, Sampler(Sampling(0, 1, 0, 1, 0, new, frozenset())))

    answers = [request(8, engine.plan.context) for _ in range(running)]
    for answer in answers:
        scheduler.submit(answer)
    scheduler.wait(answers[-1], lambda: len(answers[-1].trace.token_times) > BEFORE)
    long = request(
        prompt, 2
    )  # the others' next tokens, which waited for its last chunk, come with its second
    begin = long.trace.start
    scheduler.run(long)
    end = long.trace.token_times[0]
    before, during = list[float](), list[float]()
    for answer in answers:
        times = answer.trace.token_times
        for gap, at in zip(answer.trace.gaps, times[1:], strict=True):
            (during if begin < at and at - gap < end else before).append(gap)
        scheduler.drop(answer)
    return before[-running * BEFORE :], during, long.trace.ttft


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.incoming_prompt", __doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--vram-limit")
    parser.add_argument("--level", type=int, default=4)
    parser.add_argument("--running", type=positive, default=7)
    parser.add_argument("--prompt-tokens", type=positive, default=2048)
    parser.add_argument("--paces", nargs="+", default=["128:4", "128:1", "512:4"])
    given = parser.parse_args(argv)
    store, settings = StoreModel.open(given.store), RunSettings.uniform(given.level, speculate="auto")
    plan = store.plan(
        vram_limit=parse_size(given.vram_limit) if given.vram_limit else None,
        settings=settings,
        context=given.prompt_tokens + 1024,
        parallel=given.running + 1,
    )
    print("| chunk:steps | p50 ms before | p99 | p50 ms during | p99 | TTFT s |\n|---|---|---|---|---|---|")
    for name in given.paces:
        chunk, _, every = name.partition(":")
        with Engine(store, plan, settings) as engine:
            engine.fill()
            pace = Pace(int(chunk), int(every or 4))
            *gaps, ttft = measure(engine, pace, given.running, given.prompt_tokens)
        cells = [f"{1000 * np.percentile(of, p):.1f}" for of in gaps for p in (50, 99)]
        print(f"| {name} | {' | '.join(cells)} | {ttft:.3g} |", flush=True)


if __name__ == "__main__":
    main()
