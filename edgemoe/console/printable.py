"""The filter of every text that may hold a model's own strings and goes to a terminal."""

from __future__ import annotations

import logging


def printable(text: object) -> str:
    """A text without the control characters that a terminal would interpret; newlines and tabs stay.

    Halves of surrogate pairs, which JSON may hold and no terminal's encoding has, become question marks.
    """
    kept = "".join(c for c in str(text) if c in "\n\t" or not (c < " " or "\x7f" <= c <= "\x9f"))
    return kept.encode(errors="replace").decode()


class PrintableRecord(logging.LogRecord):
    """A log record, of any library, whose message has printable characters only."""

    def getMessage(self) -> str:  # noqa: N802  # logging calls it so
        """The record's text."""
        return printable(super().getMessage())
