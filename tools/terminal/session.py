"""Writes docs/session.txt: commands at a terminal of 100 columns, each with what it shows.

    python -m tools.terminal_session [FILE]

Runs them in a pseudo-terminal with an empty cache of its own. Needs pexpect, which the tests install.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import pexpect

from tools.checkout import ROOT, child_environment
from tools.command_line import make_parser

TRANSCRIPT = ROOT / "docs" / "session.txt"

COLUMNS = 100

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")

_PROMPT = r"\x1b\[\?2004h"
"""The line editor's escape sequence when it waits for a turn."""

_ENDED = r"\x1b\[\?2004l"
"""Its escape sequence behind a turn."""

LONG = "Tell me again, in your own words, what a model is. " * 6

COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("--version", ()),
    ("models", ()),
    ("plan -m demo --vram-limit 12MB -c 256", ()),
    ("plan -m demo --vram-limit 25M --dram-limit 5Mi --exact 8 -c 256", ()),
    (
        "chat -m demo --vram-limit 27MB -c 192 --temperature 0",
        (
            "What is the capital of France?",
            "Spell model.",
            "/set max-new-tokens -1",
            "/set top-k 5",
            "/tmep 1",
            LONG,
            "What is the capital of Italy?",
            "/stats",
            "/bye",
        ),
    ),
    ("chat --continue --json --stream -n 4 -p 'What is the capital of Spain?'", ()),
    ("models", ()),
    ("inspect demo", ()),
    ("chat -p hi --top-k 5 --temperature 0", ()),
    ("chat -m no-such-model -p hi", ()),
    ("convert demo /dev/null/store", ()),
)
"""Arguments of edgemoe, and the turns typed where it is a chat."""


def transcript(home: Path) -> str:
    """Runs every command; returns what the terminal showed, with the commands and exit codes.

    Args:
        home: a directory for caches and state, without any.
    """
    shown = []
    for command, turns in COMMANDS:
        before, code = run(home, command, turns)
        shown.append(f"$ edgemoe {command}\n{before}" + (f"[exit {code}]\n" if code else ""))
    return "\n".join(shown).replace(str(home), "~")


def run(home: Path, command: str, turns: tuple[str, ...]) -> tuple[str, int]:
    """Runs one command in a terminal, with its turns; returns (text, exit code)."""
    variables = {"XDG_CACHE_HOME": f"{home}/.cache", "XDG_STATE_HOME": f"{home}/.state", "TERM": "xterm"}
    process = pexpect.spawn(
        "/bin/sh",
        ["-c", f'exec "{sys.executable}" -m edgemoe {command}'],
        env=child_environment(**variables, PROMPT_TOOLKIT_NO_CPR="1"),
        cwd=str(home),
        encoding="utf-8",
        timeout=60,
        dimensions=(50, COLUMNS),
    )
    text = ""
    for turn in turns:
        process.expect(_PROMPT)
        text += f"{_lines(process.before)}> {turn}\n"
        process.send(f"{turn}\r")
        process.expect(_ENDED)
    process.expect(pexpect.EOF)
    process.close()
    return text + _lines(process.before), int(process.exitstatus or 0)


def _lines(sent: str) -> str:
    """The lines that stay on a screen: without escape sequences, and without what a carriage return overwrites."""
    lines = []
    for line in _ESCAPES.sub("", re.sub(r"\r\x1b\[2?K", "\r", sent)).split("\n"):
        kept = line.rstrip("\r").rsplit("\r", 1)[-1].rstrip()
        if kept and not re.match(r"[⠀-⣿]|loading |converting .*━", kept) and not kept.startswith("> "):
            lines.append(kept)
    return "".join(f"{line}\n" for line in lines)


def main() -> int:
    """Runs the tool; returns its exit code."""
    parser = make_parser("tools.terminal_session", __doc__)
    parser.add_argument("file", nargs="?", type=Path, default=TRANSCRIPT)
    file = parser.parse_args().file
    with tempfile.TemporaryDirectory() as home:
        file.write_text(transcript(Path(home)), encoding="utf-8")
    print(f"written: {os.path.relpath(file)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
