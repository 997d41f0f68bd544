"""A text file cut into windows of tokens, each one step of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.errors import UserError

_CHARACTERS_A_TOKEN = 32
"""More than any tokenizer's mean; keeps a file of gigabytes from being read for its first tokens."""


def text_windows(tokenizer: Any, path: Path, tokens: int, window: int) -> list[tuple[int, ...]]:
    """The first `tokens` tokens of a text in consecutive windows.

    Args:
        tokenizer: of the model.
        path: a UTF-8 text file.
        tokens: most tokens in all; a shorter text gives fewer.
        window: tokens of each; the last may be shorter, and is left out if it predicts nothing.

    Raises:
        UserError: no such text, or too short to predict a single token.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(tokens * _CHARACTERS_A_TOKEN)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"text was wanted in {path}", str(error), "Give a UTF-8 text file to --text"
        ) from error
    ids: list[int] = tokenizer(text)["input_ids"][:tokens]
    windows = [tuple(ids[start : start + window]) for start in range(0, len(ids), window)]
    windows = [w for w in windows if len(w) > 1]
    if not windows:
        raise UserError(
            f"a window of at least 2 tokens was wanted from {path}",
            f"it has {len(ids)} tokens",
            "Give a longer text to --text",
        )
    return windows
