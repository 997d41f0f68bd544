"""Chat tasks answered several at once, greedily: which turns are right."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from edgemoe.api.template import Message, encode_chat
from edgemoe.engine.engine import Engine
from edgemoe.engine.generate import Generation
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.evaluate.accuracy import ANSWER_TOKENS
from edgemoe.evaluate.arm import Arm
from edgemoe.evaluate.tasks import Task, is_right
from edgemoe.experts.use import ExpertUse


def shuffled(tasks: Mapping[str, Sequence[Task]], seed: int) -> list[Task]:
    """All tasks, kinds in random order, so that different kinds are answered together."""
    every = [task for of_kind in tasks.values() for task in of_kind]
    random.Random(seed).shuffle(every)
    return every


def accuracy_by_kind(tasks: Sequence[Task], right: Sequence[Sequence[bool]]) -> dict[str, float]:
    """The fraction of turns that are right, by kind of task."""
    by_kind: dict[str, list[bool]] = {}
    for task, turns in zip(tasks, right, strict=True):
        by_kind.setdefault(task.kind, []).extend(turns)
    return {kind: fmean(by_kind[kind]) for kind in sorted(by_kind)}


class TogetherTasks:
    """Runs tasks in conversations of their own. The next begins when one has ended; so runs are alike.

    Args:
        engine: an engine with a plan for as many sequences as run at once.
        tokenizer: the tokenizer of the model.
        stop: tokens that end an answer.
        advance: called after every task.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, stop: frozenset[int], advance: Callable[[], None]
    ) -> None:
        self._engine, self._tokenizer, self._done = engine, tokenizer, advance
        self._sampling = Sampling(0, 1, 0, 1, 0, ANSWER_TOKENS, stop)

    def run(self, tasks: Sequence[Task], arm: Arm) -> tuple[list[list[bool]], ExpertUse]:
        """Returns whether each turn of each task is right, and how new tokens used experts.

        Later turns follow the answers given.

        Args:
            tasks: the tasks, in the order in which they begin.
            arm: settings, and the number of conversations at once.

        Raises:
            EdgemoeError: the error of the first request that failed.
        """
        self._engine.configure(arm.settings)
        self._engine.forget_experts()
        self._right: list[list[bool]] = [[] for _ in tasks]
        self._left, self._sent = deque(enumerate(tasks)), list[Request]()
        # Prompts first: otherwise short answers end before the next has come to its first token.
        self._scheduler = Scheduler(self._engine, Pace(every=0), keep=True)
        try:
            for _ in range(arm.batch):
                self._ask(*self._left.popleft(), [])
            for request in self._sent:  # turns that follow join the list meanwhile
                self._scheduler.wait(request)
        finally:
            self._scheduler.close()
        return self._right, self._scheduler.totals[1].use

    def _ask(self, number: int, task: Task, messages: list[Message]) -> None:
        """Sends a conversation's next turn."""
        messages.append({"role": "user", "content": task.turns[len(messages) // 2].question})
        tokens = encode_chat(self._tokenizer, messages)
        generation = Generation(
            *(self._engine, self._tokenizer, tokens, Sampler(self._sampling), time.perf_counter()),
            lambda piece: None,
        )
        generation.request.on_end = lambda: self._answered(number, task, messages, generation)
        self._sent.append(generation.request)
        self._scheduler.submit(generation.request)

    def _answered(self, number: int, task: Task, messages: list[Message], generation: Generation) -> None:
        if generation.request.error:
            return
        text = generation.answer().text
        self._right[number].append(is_right(task.turns[len(messages) // 2], text))
        messages.append({"role": "assistant", "content": text})
        if len(messages) // 2 < len(task.turns):
            self._ask(number, task, messages)
            return
        self._done()
        if self._left:
            self._ask(*self._left.popleft(), [])
