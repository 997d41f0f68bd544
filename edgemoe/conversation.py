"""A conversation: turns of a chat, their template, and the KV they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from edgemoe.engine import Engine
from edgemoe.generate import Answer, Sampler, Sampling, generate
from edgemoe.kv import SequenceKV
from storage.errors import UserError

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

    A `sequence` given is taken over from a conversation that is finished; what it holds is forgotten.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        sampling: Sampling,
        system: str | None = None,
        sequence: SequenceKV | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._sampling = engine, tokenizer, sampling
        self._sampler = Sampler(sampling)
        self._sequence = sequence or engine.new_sequence()
        self._tokens: list[int] = []
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, prompt: str, on_text: Callable[[str], None]) -> Answer:
        """One turn. On an error or Ctrl-C the conversation is as it was before the turn.

        Raises:
            ContextExceeded: with both counts.
        """
        start = time.perf_counter()
        messages = [*self._messages, {"role": "user", "content": prompt}]
        tokens = self._encode(messages)
        cached = self._reuse(tokens)
        answer = generate(
            self._engine,
            self._tokenizer,
            self._sequence,
            tokens,
            cached,
            self._sampling,
            self._sampler,
            start,
            on_text,
        )
        self._tokens = tokens[: self._sequence.length]
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of the conversation so far. Without a chat template, of the bare texts one after another."""
        if self._tokenizer.chat_template:
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            return list(ids)
        return list(self._tokenizer("\n".join(m["content"] for m in messages))["input_ids"])

    def _reuse(self, tokens: list[int]) -> int:
        """Crops the sequence to what it shares with `tokens`, leaving at least one token to run."""
        shared = 0
        for held, wanted in zip(self._tokens, tokens[:-1], strict=False):
            if held != wanted:
                break
            shared += 1
        shared = min(shared, self._sequence.length)
        self._sequence.crop(shared)
        self._tokens = tokens[:shared]
        return shared
