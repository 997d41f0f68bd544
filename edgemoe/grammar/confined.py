"""The processes that compile grammars and follow them (edgemoe/grammar/process.py), as this program talks to them."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from edgemoe.errors import UserError
from edgemoe.grammar.process import ERROR, MASK, received, send
from edgemoe.grammar.schema import refused

WALL_SECONDS = 60.0
"""Time until a process is given up that neither answers nor computes, on a busy machine too."""


class Cancelled(Exception):
    """The caller of a compilation has cancelled it."""


class Cancellation:
    """Ends a compilation from another thread.

    Attributes:
        begun: whether its turn has come.
    """

    def __init__(self) -> None:
        self._lock, self._over, self.begun = threading.Lock(), False, False
        self._connection: Connection | None = None

    def cancel(self) -> None:
        """Ends the compilation, now or when it begins. Idempotent."""
        with self._lock:
            self._over = True
            if self._connection:
                self._connection.close()

    def watch(self, connection: Connection | None) -> None:
        """Takes the connection that `cancel` closes; None: the compilation has ended.

        Raises:
            Cancelled: it is cancelled already.
        """
        with self._lock:
            self._connection = connection
            self.require_wanted()

    def require_wanted(self) -> None:
        """Raises Cancelled if the compilation is cancelled."""
        if self._over:
            raise Cancelled


class Connection:
    """Two sockets to one process, which ends when they are closed, or with this object.

    Args:
        start: starts the process with its ends of the sockets: for messages, and to see that this side is open.
    """

    def __init__(self, start: Callable[[socket.socket, socket.socket], None]) -> None:
        self._own, others = socket.socketpair()
        open_, others_open = socket.socketpair()
        self._own.settimeout(WALL_SECONDS)
        self.close = weakref.finalize(self, _close, self._own, open_)
        with others, others_open:
            start(others, others_open)

    def send(self, message: bytes) -> None:
        """Sends a message. A process that has ended gets nothing, and `receive` says so."""
        try:
            send(self._own, message)
        except OSError:
            self.close()

    def receive(self, limit: str) -> bytes:
        """Returns the process's answer.

        Args:
            limit: the bound on its computation, for errors.

        Raises:
            UserError: it refuses, or the system has ended it at a limit.
        """
        try:
            answer = received(self._own)
        except (EOFError, OSError):
            self.close()
            raise refused(f"a form of answers that takes at most {limit}", "one that takes more") from None
        if answer[:1] == ERROR:
            raise _refusal(answer[1:].decode(errors="replace"))
        return answer[1:]

    def start(self) -> Connection:
        """Returns a connection to a process that this one starts; a process that has ended starts none."""
        return Connection(self._pass)

    def _pass(self, messages: socket.socket, is_open: socket.socket) -> None:
        try:
            socket.send_fds(self._own, [MASK], [messages.fileno(), is_open.fileno()])
        except OSError:
            self.close()

    @property
    def ended(self) -> bool:
        """Whether the process has ended. For one that has answered every message. Thread-safe."""
        watched = select.poll()
        if self._own.fileno() < 0:
            return True
        watched.register(self._own, select.POLLIN)
        return bool(watched.poll(0))


class VocabularyProcess:
    """The process that has a model's tokens. Starts on first use, and again after it has ended. Thread-safe.

    Args:
        tokenizer: returns the model's tokenizer as JSON.
        words: number of the tokens, at least the number of the model's logits.
        ends: token ids that end an answer.
        tokens: ids of added tokens, which may be special.

    Attributes:
        pid: the process's id; 0 before its first start.
    """

    def __init__(
        self, tokenizer: Callable[[], str], words: int, ends: Sequence[int], tokens: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._settings: Mapping[str, Any] = {"words": words, "ends": list(ends), "added": list(tokens)}
        self._lock = threading.Lock()
        self._control: Connection | None = None
        self._special: list[int] | None = None
        self.pid = 0

    def begin(self) -> None:
        """Starts the process unless it runs, and sends it the tokens, which it reads in the background."""
        with self._lock:
            self._begun()

    def special(self) -> list[int]:
        """The ids of `added` that plain text does not match.

        Raises:
            UserError: llguidance cannot read the tokenizer.
        """
        return self._running()[1]

    def start(self) -> Connection:
        """Returns a connection to a process for one grammar.

        Raises:
            UserError: as special.
        """
        return self._running()[0].start()

    def close(self) -> None:
        """Ends the process; grammars that are compiled stay. Idempotent."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            self._control = None

    def _running(self) -> tuple[Connection, list[int]]:
        """The process's connection, and what `special` returns, once it has read the tokens."""
        with self._lock:
            control = self._begun()
            if self._special is None:
                try:
                    self._special = list(json.loads(control.receive("2 GiB for the model's tokens")))
                except UserError:
                    self._control = None
                    raise
            return control, self._special

    def _begun(self) -> Connection:
        if self._control is None or (self._special is not None and self._control.ended):
            control = Connection(self._launch)
            control.send(json.dumps(self._settings).encode())
            control.send(self._tokenizer().encode())
            self._control, self._special = control, None
        return self._control

    def _launch(self, end: socket.socket, _: socket.socket) -> None:
        """Starts the process with its end of a socket; it ends when it reads that the other end is closed."""
        script = Path(__file__).with_name("process.py")
        # -P keeps the script's directory off the import path. A process group of its own gets no Ctrl-C.
        command = [sys.executable, "-P", str(script), str(end.fileno())]
        process = Popen(
            command,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
            pass_fds=[end.fileno()],
            process_group=0,
        )
        self.pid = process.pid
        threading.Thread(target=process.wait, name="edgemoe-grammar", daemon=True).start()


def _close(*own: socket.socket) -> None:
    """Closes sockets, also where another thread reads from one."""
    for each in own:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def _refusal(finding: str) -> UserError:
    finding = " ".join(finding.split())
    if finding.startswith("NoExtension"):
        finding = "one that no answer can have"
    return refused("a form of answers that can be enforced", finding[:300])
