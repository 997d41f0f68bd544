"""Accuracy on the chat tasks: greedy answers to held-out questions, by edgemoe and by the bf16 model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from edgemoe.api.model import Model
from edgemoe.api.template import Message, encode_chat
from edgemoe.chat.conversation import Conversation
from edgemoe.engine.engine import Engine
from edgemoe.engine.sampling import Sampling
from edgemoe.evaluate.reference import Reference
from edgemoe.evaluate.tasks import Task, is_right

ANSWER_TOKENS = 64
"""Most tokens of an answer; the longest right one is far shorter."""

Answer = Callable[[str], str]
"""Runs the next turn of one conversation: question -> text of the answer."""


def task_accuracy(
    tasks: Mapping[str, Sequence[Task]], start: Callable[[], Answer], done: Callable[[], None]
) -> dict[str, float]:
    """Runs every task in a conversation of its own; returns the fraction of turns answered right, by kind.

    Later turns of a conversation follow the answers given, right or wrong.

    Args:
        tasks: by kind, at least one of each.
        start: begins a conversation.
        done: called after every task.
    """
    by_kind = {}
    for kind, of_kind in tasks.items():
        right: list[bool] = []
        for task in of_kind:
            answer = start()
            right += [is_right(turn, answer(turn.question)) for turn in task.turns]
            done()
        by_kind[kind] = sum(right) / len(right)
    return by_kind


@contextmanager
def engine_conversations(
    engine: Engine, tokenizer: Any, stop: frozenset[int]
) -> Iterator[Callable[[], Answer]]:
    """Yields a function that begins a conversation with edgemoe; its turns share their KV, and no other one's.

    At the end of the block no sequence is left.
    """
    model = Model(engine, tokenizer, Sampling(0, 1, 0, 1, 0, ANSWER_TOKENS, stop), keep=True)

    def start() -> Answer:
        model.forget()
        conversation = Conversation(model)
        return lambda question: conversation.ask(question, lambda _: None).text

    yield start
    model.forget()


def reference_conversations(
    reference: Reference, tokenizer: Any, stop: frozenset[int]
) -> Callable[[], Answer]:
    """Returns a function that begins a conversation with transformers' bf16 model."""

    def start() -> Answer:
        messages: list[Message] = []

        def answer(question: str) -> str:
            messages.append({"role": "user", "content": question})
            ids = reference.continuation(encode_chat(tokenizer, messages), sorted(stop), ANSWER_TOKENS)
            text: str = tokenizer.decode(ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            return text

        return answer

    return start
