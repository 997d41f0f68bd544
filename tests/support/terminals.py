"""Runs the program in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pexpect
from programs import fork_program
from ptyprocess import PtyProcess

ROOT = Path(__file__).resolve().parents[2]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")
EDITOR = r"\x1b\[\?2004h"
"""The escape sequence of the line editor when it waits for input."""


def environment(home: Path, **changes: str) -> dict[str, str]:
    """The environment of a process whose caches, state and settings are in `home`."""
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    return kept | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "PYTHONPATH": str(ROOT),
        "PROMPT_TOOLKIT_NO_CPR": "1",  # this terminal does not answer cursor queries
        "TERM": "xterm",
        **changes,
    }


class _ForkedSpawn(pexpect.spawn):
    """A spawn of Python whose process is a fork of one that has imported edgemoe."""

    def _spawnpty(
        self, args: list[str], *, env: dict[str, str], dimensions: tuple[int, int], **_: Any
    ) -> PtyProcess:
        """Replaces the fork and exec of pexpect."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", *dimensions, 0, 0))
        process = fork_program(
            [*map(os.fsdecode, args[1:])], [theirs] * 3, env=env, session=True, terminal=True
        )
        os.close(theirs)
        return PtyProcess(process, ours)


class Terminal:
    """A command in a terminal of 200 columns.

    Args:
        home: directory of caches, state and settings.
        arguments: the arguments of edgemoe.
        ready: pattern that it shows when it waits for input.
        forked: whether it is a fork of a process that has imported edgemoe; False where a test is about imports.
        changes: variables of the environment.
    """

    def __init__(
        self, home: Path, *arguments: object, ready: str = EDITOR, forked: bool = True, **changes: str
    ) -> None:
        self._ready = ready
        self.output = ""
        self.process = (_ForkedSpawn if forked else pexpect.spawn)(
            sys.executable,
            ["-m", "edgemoe", *map(str, arguments)],
            env=environment(home, **changes),
            encoding="utf-8",
            codec_errors="replace",
            timeout=120,
            dimensions=(50, 200),
        )

    def until(self, pattern: str) -> str:
        """Waits for a pattern; returns the text up to its end, without escape sequences."""
        self.process.expect(pattern)
        self.output += (shown := self.process.before + self.process.after)
        return ESCAPES.sub("", shown)

    def ready(self) -> str:
        """Waits for the next prompt; returns the text before it."""
        return self.until(self._ready)

    def enter(self, text: str) -> str:
        """Types a turn; returns the text up to the next prompt."""
        self.process.send(text + "\r")
        return self.ready()

    def end(self) -> tuple[int, str]:
        """Waits for the process to end; returns (exit code, text since the last call)."""
        self.process.expect(pexpect.EOF)
        self.output += (shown := self.process.before)
        self.process.close()
        code = self.process.exitstatus
        return -self.process.signalstatus if code is None else code, ESCAPES.sub("", shown)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.isalive():
            self.process.kill(signal.SIGKILL)  # close gives up on a process that a busy machine ends late
            self.process.wait()
        self.process.close()
