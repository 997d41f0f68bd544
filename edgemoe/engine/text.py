"""The text of tokens as they come, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from edgemoe.storage.files.untrusted import foreign_code

_DECODES = "a tokenizer that decodes the model's tokens"


class TextStream:
    """Decodes tokens one by one. Text that may be the begin of a stop string is withheld until that is decided.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stops: strings that end the text, none of them empty; the text ends before the first of them.
        special_tokens: the text has the tokenizer's special tokens.

    Attributes:
        text: all so far, without a stop string.
        stop: the stop string that has come; None: none has.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), *, special_tokens: bool = False) -> None:
        self._tokenizer, self._stops, self._skip = tokenizer, stops, not special_tokens
        self._stream, self._tokens = DecodeStream(skip_special_tokens=self._skip), list[int]()
        self._shown, self.text = 0, ""
        self.stop: str | None = None

    def add(self, token: int) -> str:
        """Takes a token; returns the text that it completes."""
        self._tokens.append(token)
        with foreign_code(_DECODES):
            self.text += self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, self._shown)) >= 0]
        if found:
            at, self.stop = min(found)
            self.text = self.text[:at]
        return self._until(len(self.text) - (self._withheld() if self.stop is None else 0))

    def end(self) -> str:
        """Returns the text that is left where no stop string came.

        The stream withholds an incomplete character; the whole text has a replacement character in its place.

        Raises:
            ModelRefused: the tokenizer cannot decode the tokens.
        """
        if self.stop is None:
            with foreign_code(_DECODES):
                whole = self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip)
            # Not shown twice where the tokenizer decodes all tokens in another way than one by one.
            if not whole.startswith(self.text[: self._shown]):
                self._shown = len(whole)
            self.text = whole
        return self._until(len(self.text))

    def _until(self, end: int) -> str:
        piece, self._shown = self.text[self._shown : end], max(end, self._shown)
        return piece

    def _withheld(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(
            (n for stop in self._stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])),
            default=0,
        )
