"""Log probabilities in OpenAI's two shapes: of a chat, and of a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgemoe.engine.sampling import TokenLogprobs

Decode = Callable[[int], str]
"""A token's own text."""


def of_chat(tokens: Sequence[TokenLogprobs], text_of: Decode) -> dict[str, Any]:
    """The shape of /v1/chat/completions."""
    content = [
        _entry(each.token, each.logprob, text_of)
        | {"top_logprobs": [_entry(token, logprob, text_of) for token, logprob in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, text_of: Decode) -> dict[str, Any]:
    text = text_of(token)
    # A token of incomplete characters has no text of its own, and so no bytes of it.
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def of_completion(
    first: int | None, tokens: Sequence[TokenLogprobs], text_of: Decode, offset: int = 0
) -> dict[str, Any]:
    """The shape of /v1/completions.

    Args:
        first: a token without log probabilities, the first of an echoed prompt; None: there is none.
        tokens: the others, in turn.
        text_of: each token's text.
        offset: characters of the answer before them.
    """
    texts = [text_of(token) for token in [*([] if first is None else [first]), *(t.token for t in tokens)]]
    offsets = [offset]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    nothing: list[None] = [] if first is None else [None]
    return {
        "tokens": texts,
        "token_logprobs": [*nothing, *(each.logprob for each in tokens)],
        "top_logprobs": [*nothing, *(_by_text(each, text_of) for each in tokens)],
        "text_offset": offsets[:-1],
    }


def _by_text(each: TokenLogprobs, text_of: Decode) -> dict[str, float]:
    """Text -> log probability of the likeliest tokens and of the token itself; of equal texts the likeliest counts."""
    ranked = sorted([*each.top, (each.token, each.logprob)], key=lambda pair: pair[1])
    return {text_of(token): logprob for token, logprob in ranked}
