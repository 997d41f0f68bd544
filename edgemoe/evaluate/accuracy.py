"""Accuracy on the chat tasks: greedy answers to held-out questions, by edgemoe and by the bf16 model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgemoe.chat.conversation import Conversation
from edgemoe.chat.template import encode_chat
from edgemoe.engine.engine import Engine
from edgemoe.engine.generate import Sampling
from edgemoe.evaluate.reference import Reference
from edgemoe.evaluate.tasks import KINDS, Task, held_out_tasks, is_right
from edgemoe.kv.sequence import SequenceKV

ANSWER_TOKENS = 64
"""Most tokens of an answer; the longest right one is far shorter."""

Ask = Callable[[str], str]
"""The next turn of one conversation: a question in, the answer's text out."""


def task_set(count: int, seed: int) -> dict[str, list[Task]]:
    """`count` held-out tasks of every kind, chosen by `seed`.

    Raises:
        UserError: a kind has not so many.
    """
    return {kind: held_out_tasks(kind, count, seed) for kind in KINDS}


def task_accuracy(
    tasks: Mapping[str, Sequence[Task]], start: Callable[[], Ask], done: Callable[[], None]
) -> dict[str, float]:
    """Share of turns answered right, by kind.

    Every task is a conversation of its own, in which later turns follow the answers given, right or wrong.

    Args:
        tasks: by kind, at least one of each.
        start: begins a conversation.
        done: called after every task.
    """
    shares = {}
    for kind, of_kind in tasks.items():
        right = total = 0
        for task in of_kind:
            ask = start()
            for turn in task.turns:
                right += is_right(turn, ask(turn.question))
                total += 1
            done()
        shares[kind] = right / total
    return shares


def mean_accuracy(by_kind: Mapping[str, float]) -> float:
    """Over kinds, each counting the same."""
    return sum(by_kind.values()) / len(by_kind)


def engine_conversations(
    engine: Engine, tokenizer: Any, stop: frozenset[int], sequence: SequenceKV
) -> Callable[[], Ask]:
    """What begins conversations with edgemoe, one after another in the same sequence."""
    greedy = Sampling(0, 1, 0, 1, 0, ANSWER_TOKENS, stop)

    def start() -> Ask:
        conversation = Conversation(engine, tokenizer, greedy, sequence=sequence)
        return lambda question: conversation.ask(question, lambda _: None).text

    return start


def reference_conversations(reference: Reference, tokenizer: Any, stop: frozenset[int]) -> Callable[[], Ask]:
    """What begins conversations with transformers' bf16 model."""

    def start() -> Ask:
        messages: list[dict[str, str]] = []

        def ask(question: str) -> str:
            messages.append({"role": "user", "content": question})
            prompt = encode_chat(tokenizer, messages)
            answer = reference.continuation(prompt, sorted(stop), ANSWER_TOKENS)
            text: str = tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            return text

        return ask

    return start
