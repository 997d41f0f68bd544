"""Log probabilities of tokens, as OpenAI's chats and ollama's answers have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edgemoe.serve.protocol.reply import Shape

if TYPE_CHECKING:
    from edgemoe.engine.sampling import TokenLogprobs

Decode = Callable[[int], str]
"""A token's own text."""


def entries(tokens: Sequence[TokenLogprobs], text_of: Decode) -> list[Shape]:
    """An entry for each token, with entries of the likeliest ones in its place."""
    return [
        _entry(each.token, each.logprob, text_of)
        | {"top_logprobs": [_entry(token, logprob, text_of) for token, logprob in each.top]}
        for each in tokens
    ]


def _entry(token: int, logprob: float, text_of: Decode) -> Shape:
    text = text_of(token)
    # A token of incomplete characters has no text of its own, and so no bytes of it.
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
