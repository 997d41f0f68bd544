"""What the model is prompted with: pieces of a text, conversations made of the demo's tasks, or random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgemoe.chat.conversation import VOCABULARIES, load_tokenizer
from edgemoe.chat.template import Message, encode_chat
from edgemoe.engine.engine import StoreModel
from edgemoe.evaluate.tasks import Task, training_tasks
from storage.errors import UserError

CHOICES = ("text", "random", "both")
"""Text is the prompt file's or conversations; both adds random tokens as a second, labelled arm."""

RANDOM = "random tokens"
CONVERSATIONS = "conversations of the demo's tasks"

_CHARACTERS_A_TOKEN = 8
"""More than any tokenizer's text needs, so that a whole book is not encoded for one prompt."""

Encode = Callable[[], list[int]]
"""Templates and tokenizes one prompt: part of the time to first token."""


@dataclass(frozen=True)
class PromptSet:
    """One prompt a run.

    Args:
        source: for the report.
        prompts: each gives as many token ids as were asked for, every time the same.
    """

    source: str
    prompts: tuple[Encode, ...]


def make_prompts(
    store: StoreModel, choice: str, file: Path | None, tokens: int, runs: int, seed: int
) -> list[PromptSet]:
    """The prompt sets to measure with, text first.

    Args:
        store: whose tokenizer and template are used.
        choice: one of CHOICES. Text falls back to random tokens where the store has no tokenizer.
        file: text to cut prompts from; None: conversations.
        tokens: of each prompt.
        runs: prompts of each set.
        seed: of conversations and of random tokens.

    Raises:
        UserError: the choice is unknown or does not go with a file; the file is missing, too short or no text.
    """
    if choice not in CHOICES:
        raise UserError(f"--prompts {' or '.join(CHOICES)} was wanted", f"got {choice!r}", "Choose one")
    if file and choice == "random":
        raise UserError(
            "random tokens were wanted as prompts", f"--prompt-file {file} was given too", "Leave one out"
        )
    sets = []
    has_tokenizer = any((store.directory / name).exists() for name in VOCABULARIES)
    if choice != "random" and (file or has_tokenizer):
        tokenizer = load_tokenizer(store.directory)
        sets.append(text_prompts(tokenizer, file, tokens, runs, seed))
    if choice != "text" or not sets:
        sets.append(PromptSet(RANDOM, _random(store.shape.vocab, tokens, runs, seed)))
    _require_known(store, sets)
    return sets


def text_prompts(tokenizer: Any, file: Path | None, tokens: int, runs: int, seed: int) -> PromptSet:
    """Prompts of `tokens` ids each by a tokenizer of transformers, from a file or of conversations.

    Raises:
        UserError: the file is missing, too short or no text.
    """
    if file:
        return PromptSet(file.name, _pieces(tokenizer, file, tokens, runs))
    return PromptSet(CONVERSATIONS, _conversations(tokenizer, tokens, runs, seed))


def _require_known(store: StoreModel, sets: list[PromptSet]) -> None:
    highest = max(max(prompt()) for prompts in sets for prompt in prompts.prompts)
    if highest >= store.shape.vocab:
        raise UserError(
            f"tokens below {store.shape.vocab}, the model's vocabulary, were wanted",
            f"the tokenizer in {store.directory} gave {highest}",
            "Convert the model with its own tokenizer, or use --prompts random",
        )


def _random(vocabulary: int, tokens: int, runs: int, seed: int) -> tuple[Encode, ...]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocabulary, (runs, tokens), generator=generator).tolist()
    return tuple(partial(list, ids) for ids in drawn)


def _pieces(tokenizer: Any, file: Path, tokens: int, runs: int) -> tuple[Encode, ...]:
    """Consecutive pieces of a file. Each starts where the one before it ended, in characters."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"text was wanted in {file}", str(error), "Give a UTF-8 text file to --prompt-file"
        ) from error
    pieces, start = [], 0
    for run in range(runs):
        piece = text[start : start + tokens * _CHARACTERS_A_TOKEN]
        encoded = tokenizer(piece, return_offsets_mapping=True)
        if len(encoded["input_ids"]) < tokens:
            raise UserError(
                f"{runs} prompts of {tokens} tokens were wanted from {file}",
                f"it has {run} and {len(encoded['input_ids'])} tokens more",
                "Give a longer file, fewer --runs or fewer --prompt-tokens",
            )
        pieces.append(partial(_first, tokenizer, piece, tokens))
        start += max(end for _, end in encoded["offset_mapping"][:tokens])
    return tuple(pieces)


def _first(tokenizer: Any, text: str, tokens: int) -> list[int]:
    return list(tokenizer(text)["input_ids"][:tokens])


def _conversations(tokenizer: Any, tokens: int, runs: int, seed: int) -> tuple[Encode, ...]:
    tasks = training_tasks(seed)
    return tuple(partial(_last, tokenizer, _messages(tokenizer, tasks, tokens), tokens) for _ in range(runs))


def _messages(tokenizer: Any, tasks: Iterator[Task], tokens: int) -> list[Message]:
    """Tasks and their answers one after another, up to the first question that makes them long enough."""
    messages: list[Message] = []
    for task in tasks:
        for turn in task.turns:
            messages.append({"role": "user", "content": turn.question})
            if len(encode_chat(tokenizer, messages)) >= tokens:
                return messages
            messages.append({"role": "assistant", "content": turn.answer})
    raise AssertionError("training tasks never end")


def _last(tokenizer: Any, messages: list[Message], tokens: int) -> list[int]:
    """A conversation without its oldest tokens, so that it ends where an answer begins."""
    return encode_chat(tokenizer, messages)[-tokens:]
