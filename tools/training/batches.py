"""Batches of tokens, each a pure function of the seed and its step: a resumed run sees the same data.

Chat conversations are packed into short windows, each with its own positions, which transformers reads as "attend
within": no conversation sees its neighbours. Only answers count in their loss. Text fills longer windows, a few of
which are long chats instead, so that the model also learns to answer far into a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import numpy as np
import torch

from edgemoe.evaluate.tasks import Task, Turn, training_tasks
from tools.training.tokenizer import ASSISTANT, END, USER

CHAT_WINDOW, TEXT_WINDOW = 128, 512
"""Tokens in a row."""

PARAGRAPH_SHARE, LONG_SHARE, PYTHON_SHARE = 0.04, 0.1, 0.35
"""Of conversations: those that continue a paragraph. Of text windows: long chats; of the rest: Python."""

CONTINUE = ("Continue this paragraph: ", "Go on with this text: ", "What comes next? ")


@dataclass(frozen=True)
class Batch:
    """Rows of one length.

    Args:
        tokens: int64 [rows, window].
        positions: int64 [rows, window]; a row attends within each run that starts at 0.
        counted: bool [rows, window]: the token is to be predicted; a row's first one never is.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    counted: torch.Tensor

    def targets(self) -> int:
        """How many tokens are to be predicted."""
        return int(self.counted[:, 1:].sum())

    def shares(self, count: int) -> list[Batch]:
        """Its rows dealt out to `count` batches, some perhaps empty."""
        return [
            Batch(self.tokens[i::count], self.positions[i::count], self.counted[i::count])
            for i in range(count)
        ]


Encoded = tuple[list[int], list[bool]]
"""A conversation's tokens, and which of them count in the loss."""


class Chats:
    """Turns tasks into tokens in the chat template's form."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._user, self._assistant, self._end = tokenizer.convert_tokens_to_ids([USER, ASSISTANT, END])

    def encode(self, turns: tuple[Turn, ...]) -> Encoded:
        """A conversation as apply_chat_template would write it; answers count, with the token that ends them."""
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
        tokenizer: of the model.
        prose, python: uint16 [tokens] to cut windows from.
        paragraphs: prose of several sentences each, for continuing.
        seed: of the run.
        chat_tokens, text_tokens: in a step, in whole rows.
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
        """The step's chat batch and text batch, whichever have rows."""
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
            if self._paragraphs and random.random() < PARAGRAPH_SHARE:
                task = self._continuation(random)
            yield self._chats.encode(task.turns)

    def _continuation(self, random: Random) -> Task:
        sentences = random.choice(self._paragraphs).split(". ")
        shown = random.randint(1, min(2, len(sentences) - 1))
        question = random.choice(CONTINUE) + ". ".join(sentences[:shown]) + "."
        return Task("paragraph", (Turn(question, ". ".join(sentences[shown : shown + 3])),))

    def _text(self, random: Random, conversations: Iterator[Encoded]) -> list[Encoded]:
        if random.random() < LONG_SHARE:
            return pack(conversations, 1, TEXT_WINDOW)[0]
        source = self._python if random.random() < PYTHON_SHARE else self._prose
        start = random.randrange(len(source) - TEXT_WINDOW)
        return [(source[start : start + TEXT_WINDOW].tolist(), [True] * TEXT_WINDOW)]


def pack(conversations: Iterator[Encoded], rows: int, window: int) -> list[list[Encoded]]:
    """Conversations laid into rows as they come, each into the first row with room; ends when one finds none.

    What is longer than a window is cut to it.
    """
    packed: list[list[Encoded]] = [[] for _ in range(rows)]
    room, misses = [window] * rows, 0
    for tokens, counted in conversations:
        tokens, counted = tokens[:window], counted[:window]
        fitting = next((i for i in range(rows) if room[i] >= len(tokens)), None)
        if fitting is None:
            misses += 1
            # Some more tries fill the gaps that the first misfit would leave.
            if misses == 4:
                break
            continue
        packed[fitting].append((tokens, counted))
        room[fitting] -= len(tokens)
    return packed


def as_batch(rows: list[list[Encoded]], window: int, *, apart: bool) -> Batch:
    """Rows of conversations as tensors; what is left of a row is filled with uncounted zeros.

    A conversation's first token must not count, unless it is the row's: nothing is before it to predict it from.

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
    """Paragraphs of three to six sentences and 150 to 500 characters, spread over the texts."""
    found = [
        line
        for text in texts
        for line in text.split("\n")
        if 150 <= len(line) <= 500 and 2 <= line.count(". ") <= 5 and line[-1] == "."
    ]
    Random(seed).shuffle(found)
    return found[:at_most]


def windows(tokens: np.ndarray, rows: int, window: int) -> Iterator[Batch]:
    """Batches of 4 rows from evenly spread places, for held-out loss; `rows` in all, or what there is."""
    rows = min(rows, (len(tokens) - 1) // window)
    stride = (len(tokens) - window) // max(1, rows - 1) if rows > 1 else 0
    for first in count(0, 4):
        starts = [i * stride for i in range(first, min(first + 4, rows))]
        if not starts:
            return
        yield as_batch(
            [[(tokens[s : s + window].tolist(), [True] * window)] for s in starts], window, apart=False
        )
