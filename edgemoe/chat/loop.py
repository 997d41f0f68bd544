"""The chat loop: one prompt, turns from a pipe, or a terminal."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from edgemoe.chat.ctrl_c import CtrlC, InterruptedTwice
from edgemoe.chat.idle_prefetch import idle_prefetch
from edgemoe.chat.session import Chat
from edgemoe.chat.slash_commands import run_command
from edgemoe.console.input import Turn, TurnSource
from edgemoe.errors import ContextExceeded, UserError
from edgemoe.machine.packages import how_to_reach
from edgemoe.machine.process import collecting_growth
from edgemoe.models.introduction import Introduction


def run_chat(chat: Chat, turns: TurnSource | str, introduction: Introduction) -> None:
    """Answers one turn, or every turn of a source until its end or /exit.

    At a terminal the chat continues after a mistake or a cancelled answer; in a pipe both end it, because a script
    must not continue with incomplete answers.

    Args:
        chat: answers and prints.
        turns: the source that reads stdin, or the text of the only turn.
        introduction: the model's, printed on the first screen at a terminal.

    Raises:
        UserError: a turn in a pipe that cannot be answered.
        DamagedData: the store cannot be read any more.
        KeyboardInterrupt: Ctrl-C in a pipe, at an empty prompt, or twice.
    """
    if isinstance(turns, str):
        chat.ask(turns)
        return
    interactive = sys.stdin.isatty()
    if interactive:
        chat.say("\n".join([*introduction.lines(), *how_to_reach()]))
    with CtrlC(as_key=turns.reads_ctrl_c) if interactive else nullcontext() as ctrl_c:
        while True:
            try:
                turn = _read_and_prefetch(chat, turns, ctrl_c) if ctrl_c else turns.read()
                if turn and turn.text.strip():
                    _answer(chat, turn, ctrl_c)
            except EOFError:
                return


def _read_and_prefetch(chat: Chat, turns: TurnSource, ctrl_c: CtrlC) -> Turn | None:
    """Reads the next turn and prefetches experts meanwhile; None where Ctrl-C came directly after the turn."""
    turn: Turn | None = None
    try:
        # A line editor's objects would else be freed while the model computes, and hide as much of its growth.
        with collecting_growth(), idle_prefetch(chat.engine), ctrl_c.reading():
            turn = turns.read()
        if turn.cancelled:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        if turn is None:
            raise
        chat.say("\n(cancelled; the turn is dropped)")
        return None
    return turn


def _answer(chat: Chat, turn: Turn, ctrl_c: CtrlC | None) -> None:
    """Runs a command or answers a question. In a chat at a terminal errors and the first Ctrl-C are only printed.

    Args:
        ctrl_c: handles the key in a chat at a terminal; None: turns come from a pipe.
    """
    try:
        with ctrl_c.answering() if ctrl_c else nullcontext():
            if not run_command(chat, turn):
                chat.ask(turn.text)
    except UserError as error:
        if not ctrl_c:
            raise
        chat.say(f"edgemoe: {error}")
        if isinstance(error, ContextExceeded):
            chat.say("/clear removes all turns so far")
    except InterruptedTwice:
        raise
    except KeyboardInterrupt:
        if not ctrl_c:
            raise
        chat.say("\n(cancelled; the turn is dropped, /regen answers it again)")
