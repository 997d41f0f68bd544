"""Log probabilities in the shapes of OpenAI's chats and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgemoe.serve.protocol.logprobs import TextOffsets, entries, text_of
from edgemoe.serve.protocol.reply import Shape

if TYPE_CHECKING:
    from edgemoe.engine.sampling import TokenLogprobs
    from edgemoe.engine.token_texts import TokenTexts


def of_chat(tokens: Sequence[TokenLogprobs], texts: TokenTexts) -> Shape:
    """The shape of /v1/chat/completions."""
    return {"content": entries(tokens, texts), "refusal": None}


def of_completion(
    first: int | None,
    tokens: Sequence[TokenLogprobs],
    texts: TokenTexts,
    offsets: TextOffsets,
    text: str = " ",
) -> Shape:
    """The shape of /v1/completions.

    Args:
        first: a token without log probabilities, the first of an echoed prompt; None: there is none.
        tokens: the others, in turn.
        texts: each token's text.
        offsets: where the next token begins.
        text: the text of all tokens, which may lack the space that the first one begins with.
    """
    ids = [*([] if first is None else [first]), *(each.token for each in tokens)]
    begin = next((i for i, token in enumerate(ids) if texts.shown(token)), None)
    lacks = begin is not None and texts.shown(ids[begin]).startswith(b" ") and not text.startswith(" ")
    nothing: list[None] = [] if first is None else [None]
    return {
        "tokens": [text_of(token, texts) for token in ids],
        "token_logprobs": [*nothing, *(each.logprob for each in tokens)],
        "top_logprobs": [*nothing, *(_by_text(each, texts) for each in tokens)],
        "text_offset": [
            offsets.next(token, dropped=int(lacks and i == begin)) for i, token in enumerate(ids)
        ],
    }


def _by_text(each: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    """Text -> log probability of the likeliest tokens and of the token itself; of equal texts the likeliest counts."""
    ranked = sorted([*each.top, (each.token, each.logprob)], key=lambda pair: pair[1])
    return {text_of(token, texts): logprob for token, logprob in ranked}
