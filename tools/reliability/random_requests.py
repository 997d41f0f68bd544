"""Random requests of a model, and what ended ones have left allocated."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import islice
from random import Random

import edgemoe
from edgemoe.api.choices import Choices
from edgemoe.api.model import Model
from tools.reliability.random_chat import REFERENCE
from tools.training.tasks import training_tasks


class Requests:
    """Random requests of a model.

    Args:
        model: a model under limits.
        seed: the seed of everything random.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self._model, self._random = model, Random(seed)
        self._questions = [turn.question for task in islice(training_tasks(seed), 400) for turn in task.turns]
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def one(self) -> None:
        """Sends one request, and waits until it has ended."""
        with self._lock:
            chance = Random(self._random.getrandbits(64))
        kind = chance.choices(("answer", "closed", "cancelled", "scores", "too long"), (60, 15, 15, 8, 2))[0]
        prompt = " ".join(chance.choices(self._questions, k=chance.choice((1, 1, 1, 3, 10))))
        choices: Choices = {
            "max_new_tokens": chance.randint(1, 64),
            "temperature": chance.choice((0.0, 0.7, 1.5)),
            "presence_penalty": chance.choice((0.0, 0.5)),
            "seed": chance.getrandbits(31),
        }
        messages = [{"role": "user", "content": prompt}]
        if kind == "answer":
            self._model.generate(messages, **choices)
        elif kind == "closed":
            with self._model.stream(messages, **choices) as stream:
                for _ in range(chance.randint(0, 8)):
                    next(stream, None)
        elif kind == "cancelled":
            future = self._model.submit(messages, **choices)
            time.sleep(chance.uniform(0, 0.05))
            future.cancel()
        elif kind == "scores":
            self._model.logprobs([prompt[:200]])
        else:
            with suppress(edgemoe.ContextExceeded):
                self._model.generate(prompt * 200, **choices)
        with self._lock:
            self.counts[kind] += 1

    def reference(self) -> str:
        """The answer to REFERENCE."""
        return self._model.generate(
            [{"role": "user", "content": REFERENCE}], temperature=0, max_new_tokens=32
        ).text


def leftovers(model: Model, before: int) -> list[str]:
    """Things that ended requests still hold; empty: none."""
    engine, deadline = model.engine, time.monotonic() + 10
    while model._scheduler.active and time.monotonic() < deadline:
        time.sleep(0.01)
    model.forget()
    engine.forget_experts()
    left = []
    if engine.vram.resident():
        left.append(f"{len(engine.vram.resident())} experts are pinned")
    if model._scheduler.active:
        left.append(f"{model._scheduler.active} requests have not ended")
    if engine.budget.used_bytes != before:
        left.append(f"{engine.budget.used_bytes - before} bytes of the budget")
    return left
