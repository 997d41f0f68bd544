"""The program in a pseudo-terminal, as a person has it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pexpect

ROOT = Path(__file__).resolve().parents[2]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")
EDITOR = r"\x1b\[\?2004h"
"""What the line editor sends when it waits for input."""


def environment(home: Path, **changes: str) -> dict[str, str]:
    """Of a process whose caches, state and settings are in `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EDGEMOE_")}
    kept.pop("NO_COLOR", None)
    return kept | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_STATE_HOME": str(home / "state"),
        "PYTHONPATH": str(ROOT),
        "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here answers where the cursor is
        "TERM": "xterm",
        **changes,
    }


class Terminal:
    """A command in a terminal of 200 columns.

    Args:
        home: see `environment`.
        arguments: of edgemoe.
        ready: what it shows when it waits for input.
        changes: of the environment.
    """

    def __init__(self, home: Path, *arguments: object, ready: str = EDITOR, **changes: str) -> None:
        self._ready = ready
        self.seen = ""
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "edgemoe", *map(str, arguments)],
            env=environment(home, **changes),
            encoding="utf-8",
            codec_errors="replace",
            timeout=120,
            dimensions=(50, 200),
        )

    def until(self, pattern: str) -> str:
        """Everything shown up to a pattern, and it, without escape sequences."""
        self.process.expect(pattern)
        self.seen += (shown := self.process.before + self.process.after)
        return ESCAPES.sub("", shown)

    def ready(self) -> str:
        """Everything shown up to the next prompt."""
        return self.until(self._ready)

    def enter(self, text: str) -> str:
        """Types a turn; everything shown up to the next prompt."""
        self.process.send(text + "\r")
        return self.ready()

    def end(self) -> tuple[int, str]:
        """Waits for the process: (exit code, what it showed since)."""
        self.process.expect(pexpect.EOF)
        self.seen += (shown := self.process.before)
        self.process.close()
        code = self.process.exitstatus
        return -self.process.signalstatus if code is None else code, ESCAPES.sub("", shown)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.close(force=True)
