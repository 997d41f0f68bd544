"""Chat tasks that the demo model is trained on: edgemoe.evaluate.tasks without the held-out ones, and other chats.

Questions have further wordings and are written as people type them; chats/ adds small talk, and refusals of questions
that are no task. Text continuation needs a corpus: data.py makes those examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from edgemoe.evaluate.task_words import CAPITALS
from edgemoe.evaluate.tasks import CONVERSATION, DRAWS, Draft, Task, Turn, arithmetic, sorting, wordings
from tools.training.chats import outside, small_talk
from tools.training.chats.phrasing import rephrase
from tools.training.chats.wordings import WORDINGS, pick_form

OUTSIDE = "outside"
_TRAINED: dict[str, int] = {
    "arithmetic": 24,
    "times-tables": 6,
    "capitals": 24,
    "spelling": 14,
    "reversing": 14,
    "sorting": 12,
    "comparing": 6,
    "word-problems": 10,
    "python": 8,
    "greeting": 7,
    "identity": 9,
    "abilities": 6,
    "thanks": 5,
    "small-talk": 18,
    OUTSIDE: 30,
}
"""Kind -> its weight in training: higher for kinds that are learned late."""

CHAT_KINDS: tuple[str, ...] = tuple(kind for kind in _TRAINED if kind not in DRAWS)
"""Kinds of training next to the tasks: small talk, and refusals of questions that are no task."""

_SMALL: dict[str, Callable[[Random], Draft]] = {
    "arithmetic": partial(arithmetic, below=20),
    "sorting": partial(sorting, below=20),
}
"""Kinds that people try with small numbers, which are rare among numbers below 100."""

_SMALL_SHARE = 0.25
_CONVERSATION_SHARE = 0.3
_FOLLOW_UP_SHARE = 0.3


def _wordings(draft: Draft) -> tuple[str, ...]:
    """Returns the draft's questions of training, some of them with slots; empty where it is held out."""
    own = wordings(draft, held_out=False)
    return (*own, *WORDINGS[draft.table]) if own else ()


def _turn(kind: str, random: Random) -> Turn:
    """Draws a turn of one of DRAWS."""
    draw, _ = DRAWS[kind]
    if kind in _SMALL and random.random() < _SMALL_SHARE:
        draw = _SMALL[kind]
    while True:
        draft = draw(random)
        if questions := _wordings(draft):
            return Turn(random.choice(questions).format(**draft.slots), draft.answer)


def _typed(kind: str, random: Random) -> Turn:
    """Draws a turn of training, its question as people type it."""
    if kind in DRAWS:
        turn = _turn(kind, random)
        return Turn(rephrase(pick_form(turn.question, random), random), turn.answer)
    question, answer = outside.draw(random) if kind == OUTSIDE else small_talk.draw(kind, random)
    return Turn(rephrase(question, random, talk=kind != OUTSIDE), answer)


def _kinds(random: Random, count: int) -> list[str]:
    """Draws kinds with their weights in training."""
    return random.choices(tuple(_TRAINED), tuple(_TRAINED.values()), k=count)


def _follow_up(random: Random) -> Turn:
    """Draws a question for another capital that only makes sense after a question for one."""
    country, city = random.choice(CAPITALS)
    question = pick_form(random.choice(WORDINGS["follow-up"]).format(country=country), random)
    return Turn(rephrase(question, random), f"The capital of {country} is {city}.")


def _conversation(random: Random) -> Task:
    turns: list[Turn] = []
    for kind in _kinds(random, random.randint(2, 4)):
        after_capital = bool(turns) and turns[-1].answer.startswith("The capital of ")
        follows = after_capital and random.random() < _FOLLOW_UP_SHARE
        turns.append(_follow_up(random) if follows else _typed(kind, random))
    return Task(CONVERSATION, tuple(turns))


def training_tasks(seed: int) -> Iterator[Task]:
    """Yields tasks without end, drawn with the weights of training; an equal seed gives equal tasks."""
    random = Random(f"training/{seed}")
    while True:
        if random.random() < _CONVERSATION_SHARE:
            yield _conversation(random)
        else:
            [kind] = _kinds(random, 1)
            yield Task(kind, (_typed(kind, random),))
