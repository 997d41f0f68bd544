"""Pictures within the tokens of a prompt: their ids, their rows in place of embeddings, and positions.

Each token of a picture has an id of its own, a hash of the picture and of its place in it. Whatever compares tokens
(kept sequences, blocks on disk, waiting prompts) therefore tells two pictures apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from edgemoe.errors import UserError

FIRST_ID = 1 << 62
"""Ids of pictures' tokens begin here, far above every vocabulary."""


def picture_ids(digest: bytes, count: int) -> list[int]:
    """Returns the ids of a picture's tokens.

    >>> one, two = picture_ids(b"one", 3), picture_ids(b"two", 3)
    >>> min(one) >= FIRST_ID, len({*one, *two}), picture_ids(b"one", 2) == one[:2]
    (True, 6, True)

    Args:
        digest: a hash of the picture.
        count: number of its tokens.
    """
    numbers = (hashlib.sha256(digest + place.to_bytes(4, "little")).digest()[:8] for place in range(count))
    return [FIRST_ID | (int.from_bytes(number, "little") & (FIRST_ID - 1)) for number in numbers]


class Features(NamedTuple):
    """The result of a vision tower for one picture.

    Attributes:
        rows: bf16 [tokens, H], in place of the tokens' embeddings.
        layers: bf16 [tokens, H] each; the i-th is added to the state after layer i.
    """

    rows: torch.Tensor
    layers: tuple[torch.Tensor, ...] = ()


@dataclass(eq=False)
class PlacedPicture:
    """A picture at its place in a prompt.

    Args:
        first: number of the prompt's tokens before it.
        count: number of its tokens.
        compute: runs the vision tower; called by the thread that runs steps, at most once per prompt that needs it.
        nbytes: bytes of the picture's file, which stays in memory for `compute`.

    Attributes:
        features: the tower's result; None: a step with tokens of the picture cannot run.
    """

    first: int
    count: int
    compute: Callable[[], Features]
    nbytes: int = 0
    features: Features | None = field(default=None, init=False, repr=False)

    @property
    def end(self) -> int:
        """Number of the prompt's tokens up to the picture's last one."""
        return self.first + self.count

    def prepare(self) -> None:
        """Runs the vision tower where there is no result.

        Raises:
            DamagedData, DoesNotFit, UserError: as `compute`.
        """
        if self.features is None:
            self.features = self.compute()


@dataclass(frozen=True, eq=False)
class PromptPictures:
    """The pictures of one prompt.

    Args:
        placed: the pictures, ascending.
        positions: int64 [3, tokens], the position of each of the prompt's tokens in time, height and width; None: a
            token's position is its number in the sequence.
        both_ways: whether a picture's tokens attend to each other in both directions, in layers with a window. A step
            must have all tokens of a picture that it begins with then, or all but the first ones that have run.
    """

    placed: tuple[PlacedPicture, ...]
    positions: torch.Tensor | None = None
    both_ways: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all pictures' files."""
        return sum(each.nbytes for each in self.placed)

    @cached_property
    def offset(self) -> int:
        """The number added to a later token's number in the sequence to get its position."""
        if self.positions is None:
            return 0
        return int(self.positions.max()) + 1 - self.positions.shape[1]

    def positions_of(self, tokens: range) -> torch.Tensor | None:
        """Positions of some tokens of the sequence, int64 [3, n]; None: their numbers in the sequence."""
        if self.positions is None:
            return None
        known = self.positions[:, tokens.start : tokens.stop]
        later = range(max(tokens.start, self.positions.shape[1]), tokens.stop)
        after = torch.tensor([number + self.offset for number in later], dtype=torch.int64)
        return torch.cat((known, after.expand(3, -1)), 1)

    def within(self, tokens: range) -> list[tuple[PlacedPicture, range]]:
        """The pictures that some tokens of the sequence belong to, with the range of each one's rows among them."""
        parts = [
            (each, range(max(each.first, tokens.start), min(each.end, tokens.stop))) for each in self.placed
        ]
        return [
            (each, range(part.start - each.first, part.stop - each.first)) for each, part in parts if part
        ]

    def missing(self, tokens: range) -> PlacedPicture | None:
        """Returns the first picture without features that some tokens belong to; None: there is none."""
        return next((each for each, _ in self.within(tokens) if each.features is None), None)

    def prepare(self, tokens: range) -> None:
        """Computes the pictures that some tokens belong to, and frees the pictures before them.

        Raises:
            DamagedData, DoesNotFit, UserError: as PlacedPicture.prepare; as `require`.
        """
        self.require(tokens)
        self.release(tokens.start)
        for each, _ in self.within(tokens):
            each.prepare()

    def whole(self, tokens: range) -> range:
        """Returns as many of some tokens as a step may have that divides no picture which has to be whole.

        None of them are left where the picture that they begin with has more tokens.
        """
        ahead = self.ahead(tokens) if self.both_ways else []
        while ahead and ahead[-1]:
            ahead.pop()
        return tokens[: len(ahead)] if self.both_ways else tokens

    def require(self, tokens: range) -> None:
        """Refuses a picture that is larger than a step.

        Args:
            tokens: the result of `whole`.

        Raises:
            UserError: no token is left.
        """
        if not tokens:
            wanted = "pictures of at most as many tokens as a step of the prompt has"
            raise UserError(wanted, "a larger one", "raise --prefill-rows, or send a smaller picture")

    def ahead(self, tokens: range) -> list[int]:
        """Returns, for each of some tokens of the sequence, the number of its picture's later tokens."""
        counts = [0] * len(tokens)
        for each, rows in self.within(tokens):
            first = each.first + rows.start - tokens.start
            counts[first : first + len(rows)] = [each.count - 1 - row for row in rows]
        return counts

    def release(self, end: int | None = None) -> None:
        """Frees the features of the pictures that end before a token's number; None: of all pictures."""
        for each in self.placed:
            if end is None or each.end <= end:
                each.features = None

    def of_another_prompt(self) -> PromptPictures:
        """Returns the pictures of a prompt with equal tokens, without features."""
        placed = tuple(
            PlacedPicture(each.first, each.count, each.compute, each.nbytes) for each in self.placed
        )
        return PromptPictures(placed, self.positions, self.both_ways)


class PictureTokens(list[int]):
    """Token ids of a prompt with pictures.

    Args:
        tokens: ids, with picture_ids at the places of pictures.
        pictures: the pictures.
    """

    def __init__(self, tokens: Iterable[int], pictures: PromptPictures) -> None:
        super().__init__(tokens)
        self.pictures = pictures


def pictures_of(tokens: Sequence[int]) -> PromptPictures | None:
    """Returns the pictures of a prompt's tokens; None: it has none."""
    return tokens.pictures if isinstance(tokens, PictureTokens) else None


def words_of(tokens: Iterable[int]) -> list[int]:
    """Returns the ids of a vocabulary among a prompt's tokens."""
    return [token for token in tokens if token < FIRST_ID]


class StepRows(NamedTuple):
    """Rows of a step that belong to pictures.

    Attributes:
        rows: int64 [n], their numbers in the step.
        features: their features, n rows each.
    """

    rows: torch.Tensor
    features: Features

    @classmethod
    def of(cls, parts: Sequence[tuple[int, range, PromptPictures]], place: torch.device) -> StepRows | None:
        """Joins the rows of all pictures in a step; None: there are none.

        Args:
            parts: first row in the step, tokens of the sequence, and pictures of each segment that has some.
            place: the device of the model.

        Raises:
            ValueError: a picture has no features.
        """
        rows, found = list[int](), list[Features]()
        for row, tokens, pictures in parts:
            for each, own in pictures.within(tokens):
                first = row + each.first + own.start - tokens.start
                rows += range(first, first + len(own))
                if (whole := each.features) is None:
                    raise ValueError(f"expected features of the picture at token {each.first}, got none")
                cut = slice(own.start, own.stop)
                found.append(Features(whole.rows[cut], tuple(layer[cut] for layer in whole.layers)))
        if not rows:
            return None
        layers = zip(*(each.layers for each in found), strict=True)
        joined = Features(torch.cat([each.rows for each in found]), tuple(map(torch.cat, layers)))
        return cls(torch.tensor(rows, device=place), joined)
