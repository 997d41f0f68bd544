"""Writes docs/session.txt: commands at a terminal of 100 columns, each with what it shows.

    python -m tools.terminal.session [FILE]

Runs them in a pseudo-terminal with an empty cache of its own. Needs pexpect, which the tests install.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pexpect

from tools.checkout import ROOT, child_environment
from tools.command_line import make_parser
from tools.terminal.recitation import write_recitation
from tools.terminal.screen import Screen

TRANSCRIPT = ROOT / "docs" / "session.txt"

COLUMNS = 100

_PROMPT = r"\x1b\[\?2004h"
"""The line editor's escape sequence when it waits for a turn."""


@dataclass(frozen=True)
class Keys:
    """Keys that are pressed, and what the terminal shows then.

    Args:
        keys: characters.
        until: pattern to wait for.
        note: the pressed keys in words, for the transcript.
        passing: the transcript has the lines at the cursor, which do not stay.
    """

    keys: str
    until: object = _PROMPT
    note: str = ""
    passing: bool = False


@dataclass(frozen=True)
class Part:
    """A command line with the keys that are pressed while it runs.

    Args:
        about: a line above it; "" for none.
        line: a line of a shell.
        keys: keys that are pressed after the chat's first prompt.
    """

    about: str
    line: str
    keys: tuple[Keys, ...] = ()


def typed(*turns: str) -> tuple[Keys, ...]:
    """Turns, each with Enter."""
    return tuple(Keys(f"{turn}\r") for turn in turns)


ANSWER = """\
<think>
A tier is one of three kinds of memory, the fastest first, then one command that measures each.
</think>

## Tiers

- **VRAM** holds the hottest experts, as blocks of a fixed size that never move;
- *DRAM*, next in speed, keeps experts that left it;
- SSD has `every` expert once.

```
edgemoe doctor
```

measures disk, memory and kernel on this machine, one after another, and suggests limits that leave some for others.
"""
"""The text of the model `tiers`, which knows nothing else."""

LONG = "Tell me again, in your own words, what a model is. " * 6

SAMPLERS = "--temperature 0.5 --top-k 5 --min-p 0.05 --repeat-penalty 1.05 --seed 1"

DAMAGE = "printf x | dd of=store/experts-00001.safetensors bs=1 seek=100000 conv=notrunc status=none"

PARTS = (
    Part("", "edgemoe --version"),
    Part("", "edgemoe models"),
    Part(
        "The first screen. An answer breaks between words; a line below has what it cost.",
        "edgemoe chat --vram-limit 27MB -c 192 --temperature 0",
        (
            *typed("What is the capital of France?"),
            Keys("What is the\x1b\rcapital of Spain?\r", note="Alt-Enter after the first line"),
            Keys("What is \\\r", r"\.\.\.", note="a backslash at the end of the first line"),
            *typed("17 + 25?"),
            Keys("\x12Fra", "i-search.*Fra", "Ctrl-R, Fra: a search in the history", passing=True),
            Keys("\x03", r">\x1b\[0m\x1b\[K", note="Ctrl-C leaves it"),
            *typed("/stats", "/?", "/mem", "/set top-k 5", "/tmep 1", "/set max-new-tokens 24", LONG, LONG),
            *typed("/bye"),
        ),
    ),
    Part("", "edgemoe chat --continue -p 'What is the capital of Spain?'"),
    Part("", "edgemoe chat --json --stream -n 4 -p 'What is the capital of Spain?' 2>/dev/null"),
    Part("", f"edgemoe chat --stop Madrid {SAMPLERS} -p 'What is the capital of Spain?' 2>/dev/null"),
    Part("", "printf 'is the capital of Italy?' | edgemoe chat -p 'What' 2>/dev/null"),
    Part(
        "", "printf 'capital of Norway?' >rest.txt; edgemoe chat -p 'What is the' --file rest.txt 2>/dev/null"
    ),
    Part(
        "Reasoning is folded, and Markdown rendered. The model `tiers` always gives this answer.",
        "edgemoe chat -m ./tiers --markdown --reasoning fold",
        typed("What is a tier?", "/bye"),
    ),
    Part("", "edgemoe chat -m ./tiers --reasoning show -p 'What is a tier?'"),
    Part(
        "How far a long prompt is read: the line goes with the first word of the answer.",
        "printf 'Read this: %s\\n' $(seq 1300) | edgemoe chat -m ./tiers -c 24000 -n 9 -p 'What is a tier?'",
        (Keys("", r"prompt: [0-9,]+ of [^\x1b\r]*left", "after a second", passing=True),),
    ),
    Part("", "edgemoe models"),
    Part("", "edgemoe inspect demo"),
    Part("", "edgemoe plan --vram-limit 25M --dram-limit 5Mi --exact 8 -c 256"),
    Part("", "edgemoe bench --vram-limit 27MB -c 256 --runs 1 | head -n 9"),
    Part("", "edgemoe doctor"),
    Part("Exit codes. 1: a question was answered with no.", "echo n | edgemoe rm demo"),
    Part("2: a wrong request.", "edgemoe chat -p hi --top-k 5 --temperature 0"),
    Part("", "edgemoe chat -m no-such-model -p hi"),
    Part("", "edgemoe convert ./tiers /dev/null/store"),
    Part("3: it does not fit.", "edgemoe plan --vram-limit 12MB -c 256"),
    Part("4: the data is damaged.", f"edgemoe convert ./tiers store >/dev/null && {DAMAGE}"),
    Part("", "edgemoe verify store"),
    Part("130: Ctrl-C at an empty prompt.", "edgemoe chat -m ./tiers", (Keys("\x03", pexpect.EOF),)),
)


def transcript(home: Path) -> str:
    """Runs every part; returns what the terminal showed, with the commands and exit codes.

    Args:
        home: a directory for caches and state, without any.
    """
    command = home / "bin" / "edgemoe"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m edgemoe "$@"\n')
    command.chmod(0o755)
    write_recitation(home / "tiers", ANSWER)
    shown = []
    for part in PARTS:
        lines, code = run(home, part)
        above = [f"## {part.about}"] if part.about else []
        shown.append("\n".join([*above, f"$ {part.line}", *lines, *([f"[exit {code}]"] if code else []), ""]))
    return "\n".join(shown).replace(str(home), "~")


def _terminal(home: Path, line: str) -> pexpect.spawn[str]:
    """Starts a shell's line in a terminal, with its home and state in a folder."""
    return pexpect.spawn(
        "/bin/sh",
        ["-c", line],
        env=child_environment(
            PATH=f"{home}/bin:{os.environ['PATH']}",
            HOME=str(home),
            XDG_CACHE_HOME=f"{home}/.cache",
            EDGEMOE_PLAIN_CODES="true",
            XDG_STATE_HOME=f"{home}/.state",
            XDG_CONFIG_HOME=f"{home}/.config",
            TERM="xterm",
            PROMPT_TOOLKIT_NO_CPR="1",
        ),
        cwd=str(home),
        encoding="utf-8",
        timeout=120,
        dimensions=(50, COLUMNS),
    )


def run(home: Path, part: Part) -> tuple[list[str], int]:
    """Runs one part in a terminal; returns its lines without empty ones at the end, and the exit code."""
    process = _terminal(home, part.line)
    screen = Screen(COLUMNS)
    notes: list[tuple[int, list[str]]] = []

    def wait(pattern: object) -> None:
        process.expect([pattern, pexpect.EOF])
        screen.feed(process.before + (process.after if isinstance(process.after, str) else ""))

    if part.keys and part.keys[0].keys:
        wait(_PROMPT)
    for press in part.keys:
        row = screen.row
        process.send(press.keys)
        wait(press.until)
        if press.note:
            row = screen.row if press.passing else row
            shown = [line for line in screen.rows[row:] if line and press.passing]
            notes.append((row, [f"({press.note})", *shown]))
    wait(pexpect.EOF)
    process.close()
    rows = screen.rows
    for row, lines in reversed(notes):
        rows[row:row] = lines
    while rows and not rows[-1]:
        rows.pop()
    return rows, int(process.exitstatus or 0)


def main() -> int:
    """Runs the tool; returns its exit code."""
    parser = make_parser("tools.terminal.session", __doc__)
    parser.add_argument("file", nargs="?", type=Path, default=TRANSCRIPT)
    file = parser.parse_args().file
    with tempfile.TemporaryDirectory() as home:
        file.write_text(transcript(Path(home)), encoding="utf-8")
    print(f"written: {os.path.relpath(file)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
