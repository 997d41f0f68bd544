"""The text of tokens as they come, ended by stop strings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from edgemoe.storage.files.untrusted import foreign_code

_BEFORE = 8
"""Last tokens of a prompt that are decoded with an answer."""

_DECODES = "a tokenizer that decodes the model's tokens"


class StopString:
    """Finds a string in a text that comes in pieces, in time linear in the text (Knuth, Morris and Pratt).

    Args:
        text: the string, of a character or more.

    Attributes:
        overlap: characters of the string with which the text so far ends; 0 after a whole one.
    """

    def __init__(self, text: str) -> None:
        self.text, self.overlap = text, 0
        self._shorter = [0]  # for each prefix of the string: the length of the next shorter one that ends it
        length = 0
        for character in text[1:]:
            length = self._after(character, length)
            self._shorter.append(length)

    def _after(self, character: str, length: int) -> int:
        """The overlap after one more character."""
        while length and self.text[length] != character:
            length = self._shorter[length - 1]
        return length + (self.text[length] == character)

    def find(self, piece: str) -> int:
        """Takes a piece; returns where in it the string has just ended, counted in characters, or 0."""
        for count, character in enumerate(piece, 1):
            self.overlap = self._after(character, self.overlap)
            if self.overlap == len(self.text):
                self.overlap = 0
                return count
        return 0


class TextStream:
    """Decodes tokens one by one. Text that may be the begin of a stop string is withheld until that is decided.

    Stop strings are compared with all text, including special tokens' text, whether the answer shows these or not.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stops: strings that end the text, none of them empty; the text ends before the first of them.
        special_tokens: the text has the tokenizer's special tokens.
        after: the prompt's tokens. The text is what the tokens add to the prompt's: the first may begin with a space,
            which many tokenizers drop at the begin of a text.

    Attributes:
        text: all so far, without a stop string.
        stop: the stop string that has come; None: none has.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        *,
        special_tokens: bool = False,
        after: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._skip = tokenizer, not special_tokens
        # A prompt with an impossible id is refused when it is submitted.
        self._before = [token for token in after[-_BEFORE:] if 0 <= token < 1 << 32]
        self._tokens = list[int]()
        self._stops = [StopString(stop) for stop in stops]
        with foreign_code(_DECODES):
            self._stream = DecodeStream(ids=self._before, skip_special_tokens=self._skip)
            self._whole = (
                DecodeStream(ids=self._before, skip_special_tokens=False) if stops and self._skip else None
            )
        self._lengths, self._shown_lengths = [0], [0]  # after each token: of the whole text, and of `text`
        self._shown, self.text = 0, ""
        self.stop: str | None = None

    def add(self, token: int) -> str:
        """Takes a token; returns the text that it completes."""
        self._tokens.append(token)
        with foreign_code(_DECODES):
            piece = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
            whole = self._whole.step(self._tokenizer.backend_tokenizer, token) or "" if self._whole else piece
        self.text += piece
        if not self._stops:
            return self._until(len(self.text))
        before = self._lengths[-1]
        self._lengths.append(before + len(whole))
        self._shown_lengths.append(len(self.text))
        ends = [
            (before + end - len(each.text), each.text) for each in self._stops if (end := each.find(whole))
        ]
        if ends:
            at, self.stop = min(ends)
            self.text = self.text[: self._place(at)]
            return self._until(len(self.text))
        return self._until(self._place(self._lengths[-1] - max(each.overlap for each in self._stops)))

    def end(self) -> str:
        """Returns the text that is left where no stop string came.

        The stream withholds an incomplete character; the whole text has a replacement character in its place.

        Raises:
            ModelRefused: the tokenizer cannot decode the tokens.
        """
        if self.stop is None:
            with foreign_code(_DECODES):
                before = self._decoded(self._before)
                whole = self._decoded([*self._before, *self._tokens])
                whole = (
                    whole.removeprefix(before) if whole.startswith(before) else self._decoded(self._tokens)
                )
            # Not shown twice where the tokenizer decodes all tokens in another way than one by one.
            if not whole.startswith(self.text[: self._shown]):
                self._shown = len(whole)
            self.text = whole
        return self._until(len(self.text))

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))

    def _until(self, end: int) -> str:
        piece, self._shown = self.text[self._shown : end], max(end, self._shown)
        return piece

    def _place(self, at: int) -> int:
        """The place in `text` of a place in the whole text, which has special tokens too."""
        token = bisect_right(self._lengths, at) - 1
        following = self._shown_lengths[min(token + 1, len(self._lengths) - 1)]
        return min(self._shown_lengths[token] + at - self._lengths[token], following)
