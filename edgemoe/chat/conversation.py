"""A conversation: turns of a chat, their template, and the KV they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from edgemoe.chat.template import Message, encode_chat, render_chat
from edgemoe.engine.engine import Engine
from edgemoe.engine.generate import Answer, Sampler, Sampling, generate
from edgemoe.kv.sequence import SequenceKV
from storage.errors import ContextExceeded, UserError

VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")
"""Without one of these files transformers makes up an empty tokenizer rather than raise an error."""


def load_tokenizer(directory: Path) -> Any:
    """The store's fast tokenizer.

    Raises:
        UserError: there is none, or only one that would run code from the model directory.
    """
    if not any((directory / name).exists() for name in VOCABULARIES):
        raise UserError(
            f"a tokenizer was wanted in {directory}",
            f"it has none of {', '.join(VOCABULARIES)}",
            "Convert from a checkpoint with tokenizer.json",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"a tokenizer was wanted in {directory}",
            str(error),
            "Convert from a checkpoint with tokenizer.json",
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"a fast tokenizer was wanted in {directory}",
            f"{type(tokenizer).__name__} has no tokenizer.json",
            "Save the tokenizer with save_pretrained and convert again",
        )
    return tokenizer


def generation_config(directory: Path) -> GenerationConfig:
    """The model's generation_config.json, or transformers' defaults where it has none."""
    if (directory / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(directory)
    return GenerationConfig()


class Conversation:
    """Turns over one sequence. Every turn reuses the KV of the longest common prefix of its prompt.

    An error or Ctrl-C inside a method leaves the messages as they were before it: an answer that was begun is
    dropped together with its question, while the KV of what has been run stays for a turn that shares it.
    A `sequence` given is taken over from a conversation that is finished; what it holds is forgotten.

    Raises:
        UserError: the model's chat template takes no system message, and one was given.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        sampling: Sampling,
        system: str | None = None,
        sequence: SequenceKV | None = None,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._sampler = Sampler(sampling)
        self._messages: list[Message] = []
        if system:
            self.set_system(system)
        self._sequence = sequence or engine.new_sequence()
        self._tokens: list[int] = []

    @property
    def sampling(self) -> Sampling:
        """How the next answer's tokens are chosen."""
        return self._sampler.sampling

    def set_sampling(self, sampling: Sampling) -> None:
        """Changes it from the next answer on; the random state goes on where the seed is the same."""
        self._sampler = self._sampler.changed(sampling)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said so far: {"role": system, user or assistant, "content": text}."""
        return tuple(self._messages)

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        first = self._messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Puts a system message first, in the place of any other; None removes it.

        Raises:
            UserError: the chat template refuses it, or writes none.
        """
        if text:
            question: Message = {"role": "user", "content": "x"}
            written = render_chat(self._tokenizer, [_system(text), question])
            if text.strip() not in written:
                raise UserError(
                    "a system message was wanted",
                    "this model's chat template leaves it out",
                    "Say it in a turn of your own",
                )
        turns = self._messages[1:] if self.system is not None else self._messages
        self._messages = [_system(text), *turns] if text else list(turns)

    def clear(self) -> None:
        """Forgets every turn; a system message stays."""
        self._messages = self._messages[:1] if self.system is not None else []

    def restore(self, messages: Sequence[Message]) -> int:
        """Takes over a conversation that was saved, its system message too. Returns its length in tokens.

        Raises:
            UserError: the chat template refuses it.
            ContextExceeded: it leaves no room for a turn; with both counts.
        """
        length = len(encode_chat(self._tokenizer, messages)) if messages else 0
        if length >= self._sequence.context:
            raise ContextExceeded(
                f"a conversation of {length} tokens was wanted",
                f"the context holds {self._sequence.context}",
                "Start again with a larger --context",
            )
        self._messages = list(messages)
        return length

    def ask(self, prompt: str, on_text: Callable[[str], None]) -> Answer:
        """One turn.

        Raises:
            ContextExceeded: with both counts.
            UserError, ModelRefused: the chat template refuses the conversation, or cannot be run.
        """
        return self._answer([*self._messages, {"role": "user", "content": prompt}], on_text)

    def regenerate(self, on_text: Callable[[str], None]) -> Answer:
        """Answers the last question again, in the place of its answer.

        Raises:
            UserError: nothing has been answered yet.
        """
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise UserError("another answer was wanted", "nothing has been answered yet", "Ask something")
        return self._answer(self._messages[:-1], on_text)

    def _answer(self, messages: list[Message], on_text: Callable[[str], None]) -> Answer:
        start = time.perf_counter()
        tokens = encode_chat(self._tokenizer, messages)
        cached = self._reuse(tokens)
        try:
            answer = generate(
                self._engine, self._tokenizer, self._sequence, tokens, cached, self._sampler, start, on_text
            )
        finally:
            self._tokens = tokens[: self._sequence.length]
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def _reuse(self, tokens: list[int]) -> int:
        """Crops the sequence to what it shares with `tokens`, leaving at least one token to run."""
        shared = 0
        for held, wanted in zip(self._tokens, tokens[:-1], strict=False):
            if held != wanted:
                break
            shared += 1
        shared = min(shared, self._sequence.length)
        shared = self._sequence.crop(shared)
        self._tokens = tokens[:shared]
        return shared


def _system(text: str) -> Message:
    return {"role": "system", "content": text}
