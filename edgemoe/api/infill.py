"""Prompts for the text between two others, by the tokens that models for code have for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgemoe.errors import UserError
from edgemoe.storage.files.untrusted import foreign_code

_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Tokens before the text, between it and the one after the gap, and before the answer: Qwen, StarCoder, DeepSeek."""


def infill_prompt(tokenizer: Any, before: str | Sequence[int], after: str) -> list[int]:
    """Returns token ids of a prompt whose answer comes between two texts.

    Args:
        tokenizer: the tokenizer of the model.
        before: text or token ids.
        after: text.

    Raises:
        UserError: the tokenizer has no tokens for it.
    """
    with foreign_code("a tokenizer that encodes text"):
        known = tokenizer.get_added_vocab()
        marks = next(([known[t] for t in row] for row in _TOKENS if all(t in known for t in row)), None)
        if marks is None:
            wanted = f"a model with tokens such as {_TOKENS[0][0]}, for a text before a suffix"
            raise UserError(wanted, "one without", "leave suffix out")
        lead = tokenizer("", verbose=False)["input_ids"]
        texts = [
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if isinstance(text, str)
            else text
            for text in (before, after)
        ]
    return [*lead, marks[0], *texts[0], marks[1], *texts[1], marks[2]]
