"""The chat command: one prompt, turns piped in, or a terminal."""

from __future__ import annotations

import sys

from edgemoe.chat.conversation import Conversation
from edgemoe.chat.ctrl_c import InterruptedTwice, counting_interrupts
from edgemoe.chat.idle_prefetch import filling
from edgemoe.chat.session import Chat
from edgemoe.chat.slash_commands import COMPLETIONS, run_command
from edgemoe.console.input import Turn, TurnSource, open_turns
from edgemoe.engine.engine import Engine
from storage.errors import ContextExceeded, UserError


def run_chat(engine: Engine, conversation: Conversation, prompt: str | None, *, as_json: bool) -> None:
    """Answers `prompt`, or every turn of stdin until its end or /exit.

    At a terminal a mistake or a cancelled answer ends nothing; in a pipe both end the chat, for a script must
    not go on with less than it asked for.

    Raises:
        UserError: in a pipe.
        DamagedData: the store cannot be read any more.
        KeyboardInterrupt: Ctrl-C in a pipe, at an empty prompt, or twice.
    """
    interactive = prompt is None and sys.stdin.isatty()
    chat = Chat(engine, conversation, as_json=as_json, short=interactive)
    if prompt is not None:
        chat.ask(prompt)
        return
    turns = open_turns(COMPLETIONS)
    while True:
        try:
            turn = _from_person(chat, turns) if interactive else turns.read()
            if turn and turn.text.strip():
                _take(chat, turn, forgiving=interactive)
        except EOFError:
            return


def _from_person(chat: Chat, turns: TurnSource) -> Turn | None:
    """The next turn, with experts read into free room until it comes; None: Ctrl-C came just behind it."""
    turn: Turn | None = None
    try:
        with filling(chat.engine):
            turn = turns.read()
    except KeyboardInterrupt:
        if turn is None:
            raise
        chat.say("\n(cancelled; the turn is dropped)")
        return None
    return turn


def _take(chat: Chat, turn: Turn, *, forgiving: bool) -> None:
    """One turn, a command or a question."""
    try:
        with counting_interrupts():
            if not run_command(chat, turn):
                chat.ask(turn.text)
    except UserError as error:
        if not forgiving:
            raise
        chat.say(f"edgemoe: {error}")
        if isinstance(error, ContextExceeded):
            chat.say("/clear forgets what was said so far")
    except InterruptedTwice:
        raise
    except KeyboardInterrupt:
        if not forgiving:
            raise
        chat.say("\n(cancelled; the turn is dropped, /regen asks it again)")
