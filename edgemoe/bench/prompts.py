"""Prompts of a benchmark: consecutive parts of a text, conversations of the demo's tasks, or random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgemoe.api.template import Message, encode_chat
from edgemoe.console.text_files import read_text
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.evaluate.tasks import Task, conversations
from edgemoe.models.tokenizer import has_tokenizer, load_tokenizer

CHOICES = ("text", "random", "both")
"""text: from the prompt file, else conversations. both: random tokens as a second, labelled arm."""

RANDOM = "random tokens"
CONVERSATIONS = "conversations of the demo's tasks"

_CHARACTERS_PER_TOKEN = 8
"""Above any tokenizer's mean, so that one prompt of a book does not encode all of it."""

Encode = Callable[[], list[int]]
"""Templates and tokenizes one prompt: part of the time to first token."""


@dataclass(frozen=True)
class PromptSet:
    """One prompt per run.

    Args:
        source: name of the text, for the report.
        prompts: each returns the requested number of token ids, the same on every call.
    """

    source: str
    prompts: tuple[Encode, ...]


def make_prompts(
    store: StoreModel, choice: str, file: Path | None, tokens: int, runs: int, seed: int
) -> list[PromptSet]:
    """Returns the prompt sets to measure with, text first.

    Args:
        store: the store of the model; its tokenizer and template are used.
        choice: one of CHOICES. Text falls back to random tokens where the store has no tokenizer.
        file: text to cut prompts from; None: conversations.
        tokens: the number of tokens of each prompt.
        runs: prompts of each set.
        seed: the seed of conversations and of random tokens.

    Raises:
        UserError: the choice is unknown or excludes a file; the file is missing, too short or not UTF-8.
    """
    if choice not in CHOICES:
        raise UserError(f"one of {', '.join(CHOICES)} for --prompts", repr(choice), "choose one of them")
    if file and choice == "random":
        raise UserError("--prompts random alone", f"--prompt-file {file} too", "leave one of them out")
    sets = []
    if choice != "random" and (file or has_tokenizer(store.directory)):
        sets.append(text_prompts(load_tokenizer(store.directory), file, tokens, runs, seed))
    if choice != "text" or not sets:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(store.shape.vocab, (runs, tokens), generator=generator).tolist()
        sets.append(PromptSet(RANDOM, tuple(partial(list, ids) for ids in drawn)))
    _require_known(store, sets)
    return sets


def text_prompts(tokenizer: Any, file: Path | None, tokens: int, runs: int, seed: int) -> PromptSet:
    """Returns `runs` prompts of `tokens` ids each from a file, or from conversations where that is None.

    Args:
        tokenizer: transformers' tokenizer of the model.
        file: UTF-8 text.
        tokens: the number of tokens of each prompt.
        runs: number of prompts.
        seed: the seed of conversations.

    Raises:
        UserError: the file is missing, too short or not UTF-8.
    """
    if file:
        return PromptSet(file.name, tuple(_parts(tokenizer, file, tokens, runs)))
    tasks = conversations(seed)
    chats = [_messages(tokenizer, tasks, tokens) for _ in range(runs)]
    return PromptSet(CONVERSATIONS, tuple(partial(_last, tokenizer, chat, tokens) for chat in chats))


def _require_known(store: StoreModel, sets: list[PromptSet]) -> None:
    """Refuses token ids that the model does not have."""
    highest = max(max(prompt()) for prompts in sets for prompt in prompts.prompts)
    if highest >= store.shape.vocab:
        raise UserError(
            f"token ids below {store.shape.vocab}, the model's vocabulary",
            f"{highest} from the tokenizer in {store.directory}",
            "convert the model with its own tokenizer, or use --prompts random",
        )


def _parts(tokenizer: Any, file: Path, tokens: int, runs: int) -> Iterator[Encode]:
    """Yields prompts of consecutive parts of a file: each starts at the character where the previous one ends."""
    text = read_text(file, "--prompt-file")
    start = 0
    for run in range(runs):
        part = text[start : start + tokens * _CHARACTERS_PER_TOKEN]
        encoded = tokenizer(part, return_offsets_mapping=True, verbose=False)
        if len(encoded["input_ids"]) < tokens:
            raise UserError(
                f"{runs} prompts of {tokens} tokens from {file}",
                f"{run} and {len(encoded['input_ids'])} tokens more",
                "give a longer file, fewer --runs or fewer --prompt-tokens",
            )
        yield partial(_first, tokenizer, part, tokens)
        start += max(end for _, end in encoded["offset_mapping"][:tokens])


def _first(tokenizer: Any, text: str, tokens: int) -> list[int]:
    return list(tokenizer(text)["input_ids"][:tokens])


def _messages(tokenizer: Any, tasks: Iterator[Task], tokens: int) -> list[Message]:
    """Returns tasks and their answers, up to the first question that makes the chat `tokens` long."""
    messages: list[Message] = []
    for turn in (turn for task in tasks for turn in task.turns):
        messages.append({"role": "user", "content": turn.question})
        if len(encode_chat(tokenizer, messages)) >= tokens:
            return messages
        messages.append({"role": "assistant", "content": turn.answer})
    raise AssertionError("conversations never end")


def _last(tokenizer: Any, messages: list[Message], tokens: int) -> list[int]:
    """Encodes a conversation without its oldest tokens: it ends where an answer begins."""
    return encode_chat(tokenizer, messages)[-tokens:]
