"""Accuracy on the chat tasks: greedy answers to held-out questions, by edgemoe and by the bf16 model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgemoe.api.model import Model
from edgemoe.api.template import Message, encode_chat
from edgemoe.chat.conversation import Conversation
from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import Engine
from edgemoe.engine.sampling import Sampling
from edgemoe.errors import UserError
from edgemoe.evaluate.reference import Reference
from edgemoe.evaluate.tasks import KINDS, Task, held_out_tasks, is_right
from edgemoe.models.ends import ends_of
from edgemoe.models.runnable import generation_config

ANSWER_TOKENS = 64
"""Most tokens of an answer; the longest right one is far shorter."""

Answer = Callable[[str], str]
"""Runs the next turn of one conversation: question -> text of the answer."""


class ChatTasks:
    """Held-out chat tasks, and what their conversations need of a model.

    Args:
        by_kind: tasks of each kind; empty: no task is measured.
        tokenizer: the model's tokenizer.
        stop: tokens that end an answer.
    """

    def __init__(self, by_kind: Mapping[str, Sequence[Task]], tokenizer: Any, stop: frozenset[int]) -> None:
        self.by_kind, self.tokenizer, self.stop = by_kind, tokenizer, stop

    @classmethod
    def of_store(cls, directory: Path, tokenizer: Any, per_kind: int, seed: int) -> ChatTasks:
        """The tasks of an evaluation.

        Args:
            directory: the store's directory.
            tokenizer: the model's tokenizer.
            per_kind: tasks of each kind; 0: none.
            seed: chooses them.

        Raises:
            UserError: tasks are wanted of a model without a chat template.
        """
        if per_kind and not tokenizer.chat_template:
            raise UserError(
                "a tokenizer with a chat template for the chat tasks",
                "one without",
                "leave out --tasks, or use a model made for chatting",
            )
        greedy = {"temperature": 0, "top_p": 1, "seed": 0, "max_new_tokens": 1}
        own = Sampling.of_model(generation_config(directory), ends_of(directory, tokenizer), **greedy)
        kinds = KINDS if per_kind else ()
        return cls({kind: held_out_tasks(kind, per_kind, seed) for kind in kinds}, tokenizer, own.stop)

    def __len__(self) -> int:
        """The number of tasks."""
        return sum(map(len, self.by_kind.values()))

    def accuracy(self, label: str, start: Callable[[], Answer]) -> dict[str, float]:
        """Runs all tasks, with progress on stderr; as task_accuracy."""
        with CountProgress(f"{label}: tasks", len(self)) as progress:
            return task_accuracy(self.by_kind, start, progress.advance)


def task_accuracy(
    tasks: Mapping[str, Sequence[Task]], start: Callable[[], Answer], advance: Callable[[], None]
) -> dict[str, float]:
    """Runs every task in a conversation of its own; returns the fraction of turns answered right, by kind.

    Later turns of a conversation follow the answers given, right or wrong.

    Args:
        tasks: kind -> tasks, at least one for each kind.
        start: begins a conversation.
        advance: called after every task.
    """
    by_kind = {}
    for kind, of_kind in tasks.items():
        right: list[bool] = []
        for task in of_kind:
            answer = start()
            right += [is_right(turn, answer(turn.question)) for turn in task.turns]
            advance()
        by_kind[kind] = sum(right) / len(right)
    return by_kind


@contextmanager
def engine_conversations(engine: Engine, tasks: ChatTasks) -> Iterator[Callable[[], Answer]]:
    """Yields a function that begins a conversation with edgemoe; its turns share their KV, and no other one's.

    At the end of the block no sequence is left.
    """
    sampling = Sampling(0, 1, 0, 1, 0, ANSWER_TOKENS, tasks.stop)
    model = Model(engine, tasks.tokenizer, sampling, keep=True)

    def start() -> Answer:
        model.forget()
        conversation = Conversation(model)
        return lambda question: conversation.ask(question, lambda _: None).text

    yield start
    model.forget()


def reference_conversations(reference: Reference, tasks: ChatTasks) -> Callable[[], Answer]:
    """Returns a function that begins a conversation with transformers' bf16 model."""

    def start() -> Answer:
        messages: list[Message] = []

        def answer(question: str) -> str:
            messages.append({"role": "user", "content": question})
            prompt = encode_chat(tasks.tokenizer, messages)
            ids = reference.continuation(prompt, sorted(tasks.stop), ANSWER_TOKENS)
            text: str = tasks.tokenizer.decode(ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            return text

        return answer

    return start
