"""The screen of a terminal: the characters that stay after a program's cursor movements and erasures."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[=>]|(.)", re.DOTALL)


class Screen:
    """A screen without an end below: nothing scrolls away.

    >>> screen = Screen(80)
    >>> screen.feed("loading 10 %\\r\\x1b[2Kready\\r\\nbye")
    >>> screen.rows
    ['ready', 'bye']

    Attributes:
        rows: lines from the top, without spaces at their ends.
        row: the row of the cursor, from 0.
    """

    def __init__(self, columns: int) -> None:
        self._columns, self._cells = columns, [[" "] * columns]
        self.row = self._column = 0

    @property
    def rows(self) -> list[str]:
        """The lines."""
        return ["".join(cells).rstrip() for cells in self._cells]

    def feed(self, text: str) -> None:
        """Shows what a program has sent: text, cursor movements and erasures; colours are left out."""
        for match in _TOKEN.finditer(text):
            if match[3]:
                self._show(match[3])
            elif match[2] in ("A", "B"):
                self._move(self.row + int(match[1] or 1) * (-1 if match[2] == "A" else 1))
            elif match[2] in ("C", "D"):
                step = int(match[1] or 1) * (-1 if match[2] == "D" else 1)
                self._column = min(max(self._column + step, 0), self._columns - 1)
            elif match[2] in ("K", "J"):
                self._erase(match[2], match[1])

    def _show(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._move(self.row + 1)
        elif character == "\b":
            self._column = max(self._column - 1, 0)
        elif character.isprintable():
            if self._column == self._columns:
                self._move(self.row + 1)
                self._column = 0
            self._cells[self.row][self._column] = character
            self._column += 1

    def _move(self, row: int) -> None:
        self.row = max(row, 0)
        while len(self._cells) <= self.row:
            self._cells.append([" "] * self._columns)

    def _erase(self, what: str, part: str) -> None:
        """Erases the line from the cursor on, or all of it; with J also every line below."""
        start = 0 if part == "2" else self._column
        self._cells[self.row][start:] = [" "] * (self._columns - start)
        if what == "J":
            del self._cells[self.row + 1 :]
