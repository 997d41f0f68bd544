"""Text and tables that fit a terminal of WIDTH columns."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from edgemoe.console.printable import printable

WIDTH = 100
"""Columns of what is printed for people."""


def fitted(text: str, indent: int = 2) -> str:
    """Breaks a line between words, with later lines indented; a longer word stays whole.

    >>> fitted("limit 12 GB: " + "dense 3.08 GB, " * 6 + "experts")[-31:]
    'GB, dense 3.08 GB,\\n  experts'
    """
    return textwrap.fill(
        text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def say(text: str, style: str = "", indent: int = 2) -> None:
    """Prints lines for people on stderr, without control characters; at a terminal they break between words.

    Args:
        text: lines.
        style: an escape sequence.
        indent: columns before the rest of a line that a terminal breaks.
    """
    lines = printable(text).split("\n")
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        lines = [
            textwrap.fill(
                line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
            )
            for line in lines
        ]
    shown = "\n".join(lines)
    print(f"{style}{shown}\x1b[0m" if style else shown, file=sys.stderr, flush=True)


def markdown_tables(titles: Sequence[str], rows: Sequence[Sequence[str]], keys: int) -> str:
    """Makes aligned Markdown tables of rows: as many as it takes for WIDTH, each with the first `keys` columns.

    >>> print(markdown_tables(["row", "ms"], [["a", "5"], ["bcde", "10.5"]], 1))
    | row  | ms   |
    |------|------|
    | a    | 5    |
    | bcde | 10.5 |
    """
    lines = [list(titles), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    tables: list[list[int]] = []
    for column in range(keys, len(titles)):
        taken = [*tables[-1], column] if tables else []
        if not taken or sum(widths[each] + 3 for each in taken) + 1 > WIDTH:
            tables.append([*range(keys), column])
        else:
            tables[-1] = taken
    return "\n\n".join(_table(lines, widths, columns) for columns in tables)


def _table(lines: Sequence[Sequence[str]], widths: Sequence[int], columns: Sequence[int]) -> str:
    head, *body = (
        "| " + " | ".join(f"{line[column]:<{widths[column]}}" for column in columns) + " |" for line in lines
    )
    rule = "|" + "|".join("-" * (widths[column] + 2) for column in columns) + "|"
    return "\n".join([head, rule, *body])
