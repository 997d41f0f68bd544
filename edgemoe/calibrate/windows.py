"""Windows of a calibration's text, spread over all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.errors import UserError

DEFAULT_TEXT = Path(__file__).with_name("text.txt")
"""Passages of Jane Eyre, by Charlotte Brontë, and of Romeo and Juliet, by Shakespeare: in the public domain."""

_MOST_CHARACTERS = 4_000_000
"""Characters of a text that are tokenized: some ten seconds."""


def spread_windows(tokenizer: Any, path: Path, tokens: int, window: int) -> list[tuple[int, ...]]:
    """Cuts windows out of a text, evenly spaced from its start to its end.

    Args:
        tokenizer: of the model.
        path: a UTF-8 text file.
        tokens: in all windows, rounded down to whole windows; a shorter text gives fewer.
        window: tokens of each.

    Raises:
        UserError: the text is missing, not UTF-8, or shorter than one window.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text in {path}", str(error), "give a UTF-8 text file to --text") from error
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    count = min(tokens, len(ids)) // window
    if not count:
        found = f"{min(tokens, len(ids))} tokens"
        raise UserError(
            f"at least {window} tokens from {path}", found, "give a longer --text, or more --tokens"
        )
    last = len(ids) - window
    starts = [last * i // max(count - 1, 1) for i in range(count)]
    return [tuple(ids[start : start + window]) for start in starts]
