"""A chat with the demo model at a pseudo-terminal, which random turns drive."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pexpect

from tools.checkout import ROOT, child_environment
from tools.reliability.watch import entering
from tools.training.tasks import training_tasks

REFERENCE = "What is the capital of Japan?"


FIXED = ("/clear", "/set exact 4", "/set temperature 0")
"""Commands before REFERENCE."""


LEVELS = ("/set levels 4", "/set levels 4/2", "/set levels 4/0", "/set exact 4")


_READY, _ENTERED = r"\x1b\[\?2004h", r"\x1b\[\?2004l"
"""Escape sequences of the line editor: it waits for input; a turn is complete."""


class Soak:
    """A chat that is driven at random.

    Args:
        chat: a chat at its prompt.
        seed: the seed of everything random.
    """

    def __init__(self, chat: pexpect.spawn[str], seed: int) -> None:
        self._chat, self._random = chat, Random(seed)
        tasks = training_tasks(seed)
        self._questions = (turn.question for task in tasks for turn in task.turns)
        self.counts: Counter[str] = Counter()

    def enter(self, text: str) -> str:
        """Pastes a turn and returns what the terminal shows up to the next prompt."""
        self._send(text)
        self._chat.expect(_READY)
        return str(self._chat.before)

    def _send(self, text: str) -> None:
        self._chat.send(f"\x1b[200~{text}\x1b[201~\r")
        self._chat.expect(_ENTERED)

    def turn(self) -> None:
        """One random turn."""
        kind = self._random.choices(
            ("question", "long", "cancelled", "regen", "levels", "sampling", "stats", "clear"),
            (30, 4, 6, 4, 4, 2, 2, 6),
        )[0]
        self.counts[kind] += 1
        if kind == "cancelled":
            self.enter("/clear")
            self._send(self._long())
            time.sleep(self._random.uniform(0, 0.05))
            # Where the answer has ended already, Ctrl-C at an empty prompt would end the chat: it deletes the x.
            self._chat.send("x\x03")
            self._chat.expect(_READY)
        elif kind == "long":
            self.enter("/clear")
            self.enter(self._long())
        else:
            self.enter(
                {
                    "question": next(self._questions),
                    "regen": "/regen",
                    "levels": self._random.choice(LEVELS),
                    "sampling": f"/set temperature {self._random.choice((0, 0.7, 1.5))}",
                    "stats": "/stats",
                    "clear": "/clear",
                }[kind]
            )

    def _long(self) -> str:
        return " ".join(next(self._questions) for _ in range(20))

    def reference(self) -> str:
        """The answer to REFERENCE under fixed settings."""
        for command in FIXED:
            self.enter(command)
        shown = self.enter(REFERENCE)
        self.counts["reference"] += 1
        return shown.strip().splitlines()[0].strip()


@contextmanager
def chat_in(group: Path, home: str, vram_limit: str) -> Iterator[pexpect.spawn[str]]:
    """A chat with the demo model at its prompt, in a cgroup, with its state in `home`."""
    options = ("--vram-limit", vram_limit, "--context", "1024", "--levels", "4", "--max-new-tokens", "200")
    program, *words = entering(group, [sys.executable, "-m", "edgemoe", "chat", *options])
    chat = pexpect.spawn(
        program,
        words,
        env=child_environment(
            HOME=home,
            TERM="xterm",
            PROMPT_TOOLKIT_NO_CPR="1",
            **{f"XDG_{kind}_HOME": home for kind in ("STATE", "CACHE", "CONFIG")},
        ),
        cwd=ROOT,
        encoding="utf-8",
        codec_errors="replace",
        timeout=300,
        dimensions=(50, 200),
    )
    try:
        chat.expect(_READY)
        yield chat
    finally:
        chat.close(force=True)
