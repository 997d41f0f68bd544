"""Draws batches of tokens, each a pure function of the seed and its step: a resumed run gets the same data.

Chat conversations are packed into short windows. Each conversation has its own positions, so that transformers lets it
attend only within itself, and only its answers count in the loss. Text fills longer windows; a few of these are long
chats instead, so that the model learns to answer far into a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import numpy as np
import torch

from edgemoe.evaluate.tasks import Task, Turn
from tools.training.tasks import training_tasks
from tools.training.tokenizer import ASSISTANT, END, USER

CHAT_WINDOW, TEXT_WINDOW = 256, 512
"""Tokens in a row."""

PARAGRAPH_FRACTION, LONG_FRACTION, PYTHON_FRACTION = 0.04, 0.1, 0.35
"""Fractions: of conversations, paragraph continuations; of text windows, long chats; of the other windows, Python."""

CONTINUE = ("Continue this paragraph: ", "Go on with this text: ", "What comes next? ")


@dataclass(frozen=True)
class Batch:
    """Rows of one length.

    Args:
        tokens: int64 [rows, window].
        positions: int64 [rows, window]; attention stays within each run that starts at 0.
        counted: bool [rows, window]: the token is predicted; False for a row's first token.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    counted: torch.Tensor

    def targets(self) -> int:
        """The number of predicted tokens."""
        return int(self.counted[:, 1:].sum())

    def split(self, count: int) -> list[Batch]:
        """Deals the rows out to `count` batches; with fewer rows some are empty."""
        return [
            Batch(self.tokens[i::count], self.positions[i::count], self.counted[i::count])
            for i in range(count)
        ]


Encoded = tuple[list[int], list[bool]]
"""A conversation's tokens, and whether each counts in the loss."""


class Chats:
    """Turns tasks into tokens in the chat template's form."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._user, self._assistant, self._end = tokenizer.convert_tokens_to_ids([USER, ASSISTANT, END])

    def encode(self, turns: tuple[Turn, ...]) -> Encoded:
        """Encodes a conversation as apply_chat_template does; answers and their end tokens count."""
        texts = [text for turn in turns for text in (turn.question, turn.answer)]
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        tokens: list[int] = []
        counted: list[bool] = []
        for i, each in enumerate(encoded):
            answer = i % 2 == 1
            tokens += [self._assistant if answer else self._user, *each.ids, self._end]
            counted += [False, *[answer] * (len(each.ids) + 1)]
        return tokens, counted


class Mixture:
    """Draws the batches of a run.

    Args:
        tokenizer: the model's tokenizer.
        prose: uint16 [tokens] to cut windows from.
        python: uint16 [tokens] to cut windows from.
        paragraphs: prose of several sentences each, to continue.
        seed: seed of the run.
        chat_tokens: tokens of chat in a step, rounded down to whole rows.
        text_tokens: tokens of text in a step, rounded down to whole rows.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prose: np.ndarray,
        python: np.ndarray,
        paragraphs: list[str],
        seed: int,
        chat_tokens: int,
        text_tokens: int,
    ) -> None:
        self._chats, self._paragraphs, self._seed = Chats(tokenizer), paragraphs, seed
        self._prose, self._python = prose, python
        self._chat_rows, self._text_rows = chat_tokens // CHAT_WINDOW, text_tokens // TEXT_WINDOW

    def batches(self, step: int) -> list[Batch]:
        """Draws a step's chat batch and text batch, without a batch that has no rows."""
        random = Random(f"{self._seed}/{step}")
        conversations = self._conversations(random)
        out = []
        if self._chat_rows:
            rows = pack(conversations, self._chat_rows, CHAT_WINDOW)
            out.append(as_batch(rows, CHAT_WINDOW, apart=True))
        if self._text_rows:
            rows = [self._text(random, conversations) for _ in range(self._text_rows)]
            out.append(as_batch(rows, TEXT_WINDOW, apart=False))
        return out

    def _conversations(self, random: Random) -> Iterator[Encoded]:
        for task in training_tasks(random.getrandbits(60)):
            if self._paragraphs and random.random() < PARAGRAPH_FRACTION:
                task = self._continuation(random)
            yield self._chats.encode(task.turns)

    def _continuation(self, random: Random) -> Task:
        sentences = random.choice(self._paragraphs).split(". ")
        shown = random.randint(1, min(2, len(sentences) - 1))
        question = random.choice(CONTINUE) + ". ".join(sentences[:shown]) + "."
        return Task("paragraph", (Turn(question, ". ".join(sentences[shown : shown + 3])),))

    def _text(self, random: Random, conversations: Iterator[Encoded]) -> list[Encoded]:
        if random.random() < LONG_FRACTION:
            return pack(conversations, 1, TEXT_WINDOW)[0]
        source = self._python if random.random() < PYTHON_FRACTION else self._prose
        start = random.randrange(len(source) - TEXT_WINDOW)
        return [(source[start : start + TEXT_WINDOW].tolist(), [True] * TEXT_WINDOW)]


def pack(conversations: Iterator[Encoded], rows: int, window: int) -> list[list[Encoded]]:
    """Packs conversations into rows, each into the first row with enough free tokens, until four fit nowhere.

    A conversation longer than `window` is cut to it.
    """
    packed: list[list[Encoded]] = [[] for _ in range(rows)]
    free, misses = [window] * rows, 0
    for tokens, counted in conversations:
        tokens, counted = tokens[:window], counted[:window]
        fitting = next((i for i in range(rows) if free[i] >= len(tokens)), None)
        if fitting is None:
            misses += 1
            if misses == 4:
                break
            continue
        packed[fitting].append((tokens, counted))
        free[fitting] -= len(tokens)
    return packed


def as_batch(rows: list[list[Encoded]], window: int, *, apart: bool) -> Batch:
    """Makes tensors of rows of conversations; pads each row with uncounted zeros.

    A conversation's first token must not count unless it starts the row: no earlier token predicts it.

    Args:
        rows: conversations of each row, together at most `window` tokens.
        window: tokens in a row.
        apart: whether positions start at 0 in each conversation, or only in the row.
    """
    tokens, positions = np.zeros((len(rows), window), np.int64), np.zeros((len(rows), window), np.int64)
    counted = np.zeros((len(rows), window), bool)
    for r, row in enumerate(rows):
        at = 0
        for ids, counts in row:
            until = at + len(ids)
            tokens[r, at:until], counted[r, at:until] = ids, counts
            positions[r, at:until] = np.arange(len(ids)) + (0 if apart else at)
            at = until
        positions[r, at:] = np.arange(window - at) + (0 if apart else at)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(counted))


def paragraphs_of(texts: tuple[str, ...], at_most: int, seed: int) -> list[str]:
    """Chooses paragraphs of three to six sentences and 150 to 500 characters at random from all texts."""
    found = [
        line
        for text in texts
        for line in text.split("\n")
        if 150 <= len(line) <= 500 and 2 <= line.count(". ") <= 5 and line[-1] == "."
    ]
    Random(seed).shuffle(found)
    return found[:at_most]


def windows(tokens: np.ndarray, rows: int, window: int) -> Iterator[Batch]:
    """Yields batches of 4 rows from evenly spaced offsets, for held-out loss; at most `rows` rows in total."""
    rows = min(rows, (len(tokens) - 1) // window)
    stride = (len(tokens) - window) // max(1, rows - 1) if rows > 1 else 0
    for first in count(0, 4):
        starts = [i * stride for i in range(first, min(first + 4, rows))]
        if not starts:
            return
        yield as_batch(
            [[(tokens[s : s + window].tolist(), [True] * window)] for s in starts], window, apart=False
        )
