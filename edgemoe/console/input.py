"""Reads turns: with a line editor at a terminal, as plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import platformdirs

from edgemoe.errors import UserError

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'
"""Around a turn of several lines."""

PROMPT, CONTINUED = "> ", "... "

Completions = Mapping[str, "Completions | None"]
"""Maps a word to the words that may follow it; None: a file follows."""


@dataclass(frozen=True)
class Turn:
    """One turn of input. A quoted turn is never a command; Ctrl-C directly after Enter makes it a cancelled one."""

    text: str
    quoted: bool = False
    cancelled: bool = False


class TurnSource(Protocol):
    """A source of turns."""

    reads_ctrl_c: bool
    """Whether Ctrl-C is a key while a turn is read, and not a signal."""

    def read(self) -> Turn:
        """Reads the next turn, which may be empty.

        Raises:
            EOFError: the input has ended.
            KeyboardInterrupt: Ctrl-C on an empty line.
            UserError: the input is no text, or ends inside quotes.
        """


def obeys_escapes(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that interprets escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def in_colour(stream: IO[str]) -> bool:
    """Whether a stream takes colours, by no-color.org."""
    return obeys_escapes(stream) and not os.environ.get("NO_COLOR")


def open_turns(completions: Completions) -> TurnSource:
    """Opens the line editor where stdin and stdout are capable terminals, plain lines elsewhere.

    Earlier turns come from the file `history` in the user's state directory.
    """
    if obeys_escapes(sys.stdin) and obeys_escapes(sys.stdout):
        return EditedTurns(completions, Path(platformdirs.user_state_dir("edgemoe"), "history"))
    return PlainTurns(sys.stdin, sys.stderr if sys.stdin.isatty() else None)


class PlainTurns:
    """Lines of a stream.

    Args:
        lines: stream to read.
        prompts: stream for a prompt before each line; None: no prompts.
    """

    reads_ctrl_c = False

    def __init__(self, lines: IO[str], prompts: IO[str] | None) -> None:
        self._lines, self._prompts = lines, prompts

    def read(self) -> Turn:
        """Reads lines up to the end of a turn; raises as TurnSource.read."""
        text = self._line(PROMPT)
        while is_open(text):
            try:
                text += "\n" + self._line(CONTINUED)
            except EOFError:
                if not text.lstrip().startswith(QUOTES):
                    break
                raise UserError(
                    f"a line that ends in {QUOTES}",
                    f"the end of the input inside the turn that begins with {text[:40]!r}",
                    f"end the turn with {QUOTES}",
                ) from None
        return as_turn(text)

    def _line(self, prompt: str) -> str:
        if self._prompts is not None:
            print(prompt, end="", file=self._prompts, flush=True)
        try:
            line = self._lines.readline()
        except UnicodeDecodeError as error:
            wanted = f"lines of {error.encoding} text"
            raise UserError(wanted, str(error), "convert the input first") from error
        if not line:
            if self._prompts is not None:
                print(file=self._prompts)
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")


class EditedTurns:
    """A terminal's line editor: history kept in a file, completion by Tab, several lines between quotes.

    Args:
        completions: completions of commands.
        history: file; where it cannot be written, history lasts until the program ends.
    """

    reads_ctrl_c = True

    def __init__(self, completions: Completions, history: Path) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.shortcuts import CompleteStyle

        self._editor: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
            prompt_continuation=CONTINUED,
            history=_history(history),
            key_bindings=_keys(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            completer=_completer(completions),
        )

    def read(self) -> Turn:
        """Edits one turn; raises as TurnSource.read. Only the key Ctrl-C has a meaning; the handler of SIGINT stays."""
        source = self._editor.input
        # A Ctrl-C just before raw mode is still a signal, sent during an answer: the editor's own handler of SIGINT
        # would take it for the key at an empty prompt. Ctrl-C stays a key until the keys after Enter are read.
        with source.raw_mode():
            turn = as_turn(self._editor.prompt(handle_sigint=False))
            return replace(turn, cancelled=_ctrl_c_after_enter(source))


def is_open(text: str) -> bool:
    """Whether a turn continues in the next line: it ends in a backslash, or its opening quotes are not closed."""
    if not text.lstrip().startswith(QUOTES):
        return text.endswith("\\")
    text = text.strip()
    return not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


def as_turn(text: str) -> Turn:
    """Makes a turn of its lines, without the quotes around them, or the backslashes at their ends."""
    bare = text.strip()
    if bare.startswith(QUOTES) and not is_open(text):
        inside = bare[len(QUOTES) : -len(QUOTES)]
        return Turn(inside.removeprefix("\n").removesuffix("\n"), quoted=True)
    return Turn(text.replace("\\\n", "\n"))


def _history(path: Path) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class KeptHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # on a full disk the turn is still answered
                super().store_string(string)

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        with path.open("r+b"):
            return KeptHistory(path)
    except OSError as error:
        print(
            f"edgemoe: {path} cannot be written, history ends with the program: {error.strerror}",
            file=sys.stderr,
        )
        return InMemoryHistory()


def _ctrl_c_after_enter(source: Input) -> bool:
    """Whether Ctrl-C was typed since the turn's Enter. Drops it and the keys before it, and keeps the later ones."""
    from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
    from prompt_toolkit.keys import Keys

    keys = get_typeahead(source) + source.read_keys()
    later = list(takewhile(lambda press: press.key != Keys.ControlC, reversed(keys)))
    store_typeahead(source, later[::-1])
    return len(later) < len(keys)


def _keys() -> KeyBindings:
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=~is_searching)  # in a search of the history the editor's own Ctrl-C leaves it
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def _completer(completions: Completions) -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document as TextDocument

    files = PathCompleter(expanduser=True)

    class CommandCompleter(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            *before, word = document.text_before_cursor.split(" ")
            following: Completions | None = completions
            for each in before:
                following = (following or {}).get(each, {})
            if following is None:
                yield from files.get_completions(TextDocument(word), event)
            for choice in following or ():
                if choice.startswith(word):
                    yield Completion(f"{choice} ", start_position=-len(word))

    return CommandCompleter()
