"""How the text of an answer is shown as it comes: as it is in a pipe; wrapped, rendered and dimmed at a terminal."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edgemoe.console.input import in_colour, obeys_escapes
from edgemoe.console.printable import printable

if TYPE_CHECKING:
    from rich.live import Live

OPEN, CLOSE = "<think>", "</think>"
"""Tags around a model's reasoning, which comes before its answer."""

REASONING = ("dim", "fold", "show")

_FENCE = re.compile(r" {0,3}(```|~~~)")
_SAME_BLOCK = re.compile(r"\s|[-*+] |\d{1,9}[.)] ")
"""The begin of a line that belongs to the list before a blank line."""


@dataclass(frozen=True)
class Look:
    """How answers look at a terminal; elsewhere they are printed as they are.

    Args:
        markdown: rendered as Markdown.
        wrap: lines break between words.
        reasoning: one of REASONING; `fold` shows the number of its words alone, `show` its tags too.
    """

    markdown: bool = False
    wrap: bool = True
    reasoning: str = "dim"


DEFAULT_LOOK = Look()


class AnswerText(Protocol):
    """The place of one answer's text."""

    def write(self, piece: str) -> None:
        """Shows more of the text."""

    def close(self) -> None:
        """Ends the text and its line."""


def open_text(look: Look, *, reasons: bool) -> AnswerText:
    """Opens the text of an answer on stdout.

    Args:
        look: the look of text at a terminal.
        reasons: the answer begins within reasoning, which its prompt has opened.
    """
    if not sys.stdout.isatty():
        return Plain()
    if not obeys_escapes(sys.stdout):
        return Printable()
    lines = Wrapped(shutil.get_terminal_size().columns if look.wrap else sys.maxsize)
    body = Rendered() if look.markdown else lines
    return body if look.reasoning == "show" else Reasoned(body, lines, look.reasoning, inside=reasons)


def import_renderers(look: Look) -> None:
    """Imports what answers need at a terminal. Before a model is loaded, so that its memory has no part of it."""
    if obeys_escapes(sys.stdout):
        import prompt_toolkit.utils  # noqa: F401

        if look.markdown:
            import rich.live
            import rich.markdown  # noqa: F401


class Plain:
    """Text as it is."""

    def write(self, piece: str) -> None:
        """Prints a piece."""
        print(piece, end="", flush=True)

    def close(self) -> None:
        """Ends the line."""
        print(flush=True)


class Printable(Plain):
    """Text without control characters, for a terminal that interprets no others."""

    def write(self, piece: str) -> None:
        """Prints a piece."""
        super().write(printable(piece))


class Wrapped:
    """Lines that break between words: a word that reaches the edge moves to the next line.

    Args:
        columns: number of the terminal's columns. The last one stays free: a cursor after it would be in no column.
    """

    def __init__(self, columns: int) -> None:
        self._width, self._column, self._word = columns - 1, 0, ""

    def write(self, piece: str, style: str = "") -> None:
        """Prints a piece in a style, an escape sequence."""
        text = "".join(map(self._placed, printable(piece)))
        if text:
            print(f"{style}{text}\x1b[0m" if style else text, end="", flush=True)

    def close(self) -> None:
        """Ends the line."""
        self.write("\n")

    def _placed(self, character: str) -> str:
        """Returns what is printed for a character."""
        from prompt_toolkit.utils import get_cwidth

        if character in "\n\t ":
            self._word = ""
            step = 8 - self._column % 8 if character == "\t" else 1
            if character != "\n" and self._column + step > self._width:
                return ""  # the next word begins a line
            self._column = 0 if character == "\n" else self._column + step
            return character
        cells, moved = get_cwidth(character), ""
        if self._column + cells > self._width:
            back = get_cwidth(self._word)
            if back < self._column:
                moved = f"\x1b[{back}D\x1b[K\n{self._word}" if back else "\n"
            self._column = back if moved else 0  # a word longer than a line is broken by the terminal
        self._column += cells
        self._word = "" if cells > 1 else self._word + character  # a line may break next to a wide character
        return moved + character


class Rendered:
    """Markdown by rich: finished blocks stay, and the last one is drawn again as it grows."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console, self._text, self._blocks = Console(file=sys.stdout), "", 0
        self._live: Live | None = None

    def write(self, piece: str) -> None:
        """Shows a piece."""
        from rich.live import Live
        from rich.markdown import Markdown

        done, self._text = split_blocks(self._text + printable(piece))
        if done:
            self._keep(done)
        if self._live is None:
            self._live = Live(
                console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(Markdown(self._text))

    def close(self) -> None:
        """Draws the last block for good."""
        self._keep(self._text)

    def _keep(self, text: str) -> None:
        """Prints blocks that do not change any more."""
        from rich.markdown import Markdown

        if self._live is not None:
            self._live.stop()
            self._live = None
        if text.strip():
            if self._blocks:
                self._console.print()
            self._console.print(Markdown(text))
            self._blocks += 1


def split_blocks(text: str) -> tuple[str, str]:
    """Splits Markdown at its last blank line outside of code and lists: (finished blocks, the rest).

    >>> split_blocks("One.\\n\\nTwo, unfin")
    ('One.\\n\\n', 'Two, unfin')
    >>> split_blocks("- a\\n\\n- b\\n\\n```\\nx\\n\\ny")
    ('- a\\n\\n- b\\n\\n', '```\\nx\\n\\ny')
    """
    at = place = 0
    fenced = blank = False
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        decided = line.endswith("\n") or number < len(lines) - 1 or len(line) > 3
        if blank and not fenced and line.strip() and decided and not _SAME_BLOCK.match(line):
            at = place
        if _FENCE.match(line):
            fenced = not fenced
        blank, place = not line.strip(), place + len(line)
    return text[:at], text[at:]


class Reasoned:
    """Text whose reasoning, between tags at its begin, is dimmed or folded into one line.

    Args:
        body: shows the answer.
        lines: shows the reasoning.
        mode: dim or fold.
        inside: the text begins within reasoning.
    """

    def __init__(self, body: AnswerText, lines: Wrapped, mode: str, *, inside: bool) -> None:
        self._body, self._lines, self._fold = body, lines, mode == "fold"
        self._inside, self._begun, self._held, self._thoughts = inside, inside, "", ""
        self._blank = False
        self._style = "\x1b[2m" if in_colour(sys.stdout) else ""

    def write(self, piece: str) -> None:
        """Shows a piece, but for an end that may be the begin of a tag."""
        self._held += piece
        if not self._begun:
            held = self._held.lstrip()
            if OPEN.startswith(held):
                return
            self._begun, self._inside = True, held.startswith(OPEN)
            self._held = held[len(OPEN) :] if self._inside else self._held
        if self._inside:
            before, tag, after = self._held.partition(CLOSE)
            kept = 0 if tag else next(n for n in range(len(CLOSE) - 1, -1, -1) if before.endswith(CLOSE[:n]))
            self._think(before[: len(before) - kept])
            self._held = after if tag else before[len(before) - kept :]
            if not tag:
                return
            self._inside, self._blank = False, True
            self._end()
        if self._blank:  # the lines after reasoning
            self._held = self._held.lstrip()
            self._blank = not self._held
        self._body.write(self._held)
        self._held = ""

    def close(self) -> None:
        """Ends the text; reasoning that has no end is shown as it is."""
        if self._inside:
            self._think(self._held)
            if self._fold and self._thoughts.strip():
                self._line("thought")
            self._lines.close()
            return
        if self._held:
            self._body.write(self._held)
        self._body.close()

    def _think(self, text: str) -> None:
        self._thoughts += text
        if not self._fold:
            self._lines.write(text if self._thoughts != text else text.lstrip(), self._style)
        elif text:
            self._line("thinking")

    def _end(self) -> None:
        """Separates reasoning from the answer."""
        if self._fold and self._thoughts.strip():
            self._line("thought")
        if self._thoughts.strip():
            self._lines.write("\n" if self._fold or self._thoughts.endswith("\n") else "\n\n")

    def _line(self, what: str) -> None:
        words = len(self._thoughts.split())
        print(f"\r\x1b[2K{self._style}({what}: {words:,} words)\x1b[0m", end="", flush=True)
