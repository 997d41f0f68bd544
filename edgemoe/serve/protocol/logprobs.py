"""Log probabilities of tokens, as OpenAI's chats and ollama's answers have them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgemoe.serve.protocol.reply import Shape

if TYPE_CHECKING:
    from edgemoe.engine.sampling import TokenLogprobs
    from edgemoe.engine.token_texts import TokenTexts


def entries(tokens: Sequence[TokenLogprobs], texts: TokenTexts) -> list[Shape]:
    """An entry for each token, with entries of the likeliest ones in its place."""
    return [
        _entry(each.token, each.logprob, texts)
        | {"top_logprobs": [_entry(token, logprob, texts) for token, logprob in each.top]}
        for each in tokens
    ]


def text_of(token: int, texts: TokenTexts) -> str:
    """A token's own text, with a replacement character for a part of a character."""
    return texts.of(token).decode(errors="replace")


def _entry(token: int, logprob: float, texts: TokenTexts) -> Shape:
    return {"token": text_of(token, texts), "logprob": logprob, "bytes": list(texts.of(token))}


class TextOffsets:
    """Where tokens begin in the text that they make, in characters.

    Args:
        texts: the bytes of tokens.
        start: characters before the first token.
    """

    def __init__(self, texts: TokenTexts, start: int = 0) -> None:
        self._texts, self._at = texts, start
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def next(self, token: int, *, dropped: int = 0) -> int:
        """Returns where the next token begins.

        Args:
            token: its id. One that begins within a character begins where that character does.
            dropped: bytes at the token's begin that the text does not have.
        """
        at = self._at
        self._at += len(self._decoder.decode(self._texts.shown(token)[dropped:]))
        return at
