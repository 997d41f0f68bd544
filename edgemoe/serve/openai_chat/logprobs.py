"""Log probabilities in the shapes of OpenAI's chats and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgemoe.serve.protocol.logprobs import Decode, entries
from edgemoe.serve.protocol.reply import Shape

if TYPE_CHECKING:
    from edgemoe.engine.sampling import TokenLogprobs


def of_chat(tokens: Sequence[TokenLogprobs], text_of: Decode) -> Shape:
    """The shape of /v1/chat/completions."""
    return {"content": entries(tokens, text_of), "refusal": None}


def of_completion(
    first: int | None, tokens: Sequence[TokenLogprobs], text_of: Decode, offset: int = 0
) -> Shape:
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
