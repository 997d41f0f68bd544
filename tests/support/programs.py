"""Programs of a test, which end with it: real starts of Python, and forks of a process that has imported edgemoe."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import fork_server

ROOT = Path(__file__).resolve().parents[2]

Program = subprocess.Popen[str]

_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


@cache
def _server() -> socket.socket:
    """Starts the process of fork_server.py, which ends with this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process does not adopt orphans")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, fork_server.__file__, str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def fork_program(
    arguments: list[str],
    files: list[int],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    session: bool = False,
    terminal: bool = False,
) -> int:
    """Starts a program of fork_server.py.

    Args:
        arguments: Python's: `-m MODULE ...` or `-c CODE ...`.
        files: descriptors of its input, output and errors.
        env: its environment; None: a copy of this one.
        cwd: its directory; None: this one.
        session: whether it begins a session.
        terminal: whether its input becomes the terminal that controls the session.

    Returns:
        Its process, a child of this one.
    """
    assert arguments[0] in ("-m", "-c"), arguments
    request = {
        "arguments": arguments,
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd or Path.cwd()),
        "session": session,
        "terminal": terminal,
    }
    socket.send_fds(_server(), [json.dumps(request).encode()], files)
    return int(_server().recv(64))


class ForkedPython(subprocess.Popen[Any]):
    """A Popen of Python whose process is a fork of one that has imported edgemoe.

    Use it where the import is not what is tested. The threads of its computations are one.

    Args:
        arguments: Python's: `-m MODULE ...` or `-c CODE ...`.
        options: passed to Popen: pipes, text, env, cwd and start_new_session.
    """

    def __init__(self, *arguments: object, **options: Any) -> None:
        super().__init__(list(map(str, arguments)), **options)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """Replaces Popen's fork and exec."""
        _, _, _, _, cwd, env, _, _, _, *pipes, _, _, _, _, _, session, _ = rest
        inputs, _, _, outputs, _, errors = pipes
        files = [number if file == -1 else file for number, file in enumerate((inputs, outputs, errors))]
        self.pid = fork_program(args, files, env=env, cwd=cwd, session=session)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run_forked(
    *arguments: object, input: str | None = None, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a ForkedPython to its end, as subprocess.run with capture_output and text does.

    Args:
        arguments: Python's: `-m MODULE ...` or `-c CODE ...`.
        input: text of its standard input.
        timeout: seconds.
        options: passed to ForkedPython.
    """
    pipe = subprocess.PIPE
    with ForkedPython(*arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_child_forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Stands for subprocess.run where a test's program starts another one: a ForkedPython, and not a new Python.

    Args:
        command: a Python, its options, `-c` or `-m`, and what follows.
        options: passed to ForkedPython.
    """
    at = next(index for index, word in enumerate(command) if word in ("-c", "-m"))
    with ForkedPython(*command[at:], **options) as process:
        return subprocess.CompletedProcess(command, process.wait())


def random_kills(model: Path, work: Path, kills: int, *options: str) -> int:
    """Runs tools.reliability.kills, and asserts that all runs were killed and no byte differed after them.

    Args:
        model: checkpoint to convert.
        work: the directory of temporary stores.
        kills: SIGKILLs.
        options: more of the tool's options.

    Returns:
        Different states that the kills left.
    """
    arguments = ("--model", str(model), "--kills", str(kills), "--work", str(work), *options)
    done = run_forked("-m", "tools.reliability.kills", *arguments, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["killed"], result["unsound"], result["wrong"]) == (kills, [], [])
    return int(result["states"])


@contextmanager
def programs(**environment: str) -> Iterator[Callable[..., Program]]:
    """Yields a function that starts Python with arguments, its input and output on pipes; kills all at the end.

    What it starts is a ForkedPython, but with `fresh=True` a new Python, which imports edgemoe itself.
    """
    started: list[Program] = []
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment

    def start(*arguments: object, fresh: bool = False) -> Program:
        pipe = subprocess.PIPE
        new = partial(subprocess.Popen, [sys.executable, *map(str, arguments)])
        kind = new if fresh else partial(ForkedPython, *arguments)
        process: Program = kind(env=variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()
