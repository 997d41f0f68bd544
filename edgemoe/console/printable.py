"""The filter of every text that may hold a model's own strings and goes to a terminal."""

from __future__ import annotations

import logging


def printable(text: object) -> str:
    """A text without the control characters that a terminal would interpret; newlines and tabs stay."""
    return "".join(c for c in str(text) if c in "\n\t" or not (c < " " or "\x7f" <= c <= "\x9f"))


class PrintableFormatter(logging.Formatter):
    """Formats log records with printable characters only."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text."""
        return printable(super().format(record))
