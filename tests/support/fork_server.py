"""Runs Python programs of edgemoe as forks of a process that has imported it, without the seconds of an import each.

    python fork_server.py SOCKET    serves the socket with this file descriptor, until the other end closes it

A program has its own arguments, environment, directory, input and output, and ends as any Python program does: with its
exit code, or with its signal. It computes on OMP_NUM_THREADS threads, by default on one. Requests come from
`tests/support/programs.py`.

The server itself computes nothing and has one thread, since a fork has only the thread that forks.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import termios
import types
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 18
"""Bytes of a request at most; the kernel refuses a longer one."""

IMPORTED = (
    "edgemoe.cli",
    "edgemoe.commands.chat_turns",
    "edgemoe.models.open",
    "edgemoe.models.conversion.run",
    "edgemoe.chat.loop",
    "edgemoe.families.derive",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


def one_measurement(directory: Path) -> None:
    """Lets programs take the times of kernels that the first of them has measured, which are half a second each.

    Args:
        directory: where the times of each number of threads are kept.
    """
    from edgemoe.kernels import probe
    from edgemoe.kernels.native import library

    measure = probe.measure

    def measured_once() -> list[Any]:
        path = directory / f"threads-{library.thread_count()}"
        if not path.exists():
            times = measure()
            made = path.with_name(f"{path.name}-{os.getpid()}")
            made.write_bytes(pickle.dumps(times))
            made.replace(path)
        return list(pickle.loads(path.read_bytes()))

    probe.measure = measured_once


def imports() -> None:
    """Imports what the commands import, as they do: without torch's compiler."""
    from edgemoe.machine.model_code import without_compiler

    with without_compiler():
        for name in IMPORTED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Forks a program for each request, and answers with its process's number.

    A program's parent is the process at the other end of the socket, which adopts orphans: waiting for the program, and
    its exit status, are as for any child.

    Returns:
        The request, in a program; None in the server, once the other end is closed.
    """
    while True:
        message, files, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not message:
            return None
        started, starting = os.pipe()
        between = os.fork()
        if between == 0:
            program = os.fork()
            if program == 0:
                os.close(started)
                os.close(starting)
                requests.close()
                return {**json.loads(message), "files": files}
            os.write(starting, str(program).encode())
            os._exit(0)
        os.waitpid(between, 0)  # from now on the program is an orphan
        requests.send(os.read(started, 64))
        for file in (started, starting, *files):
            os.close(file)


def become(request: dict[str, Any], base: list[str]) -> list[str]:
    """Makes this process a request's.

    Args:
        request: a program's request.
        base: directories of the installed packages.

    Returns:
        The program's arguments.
    """
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    encoding, _, errors = request["env"].get("PYTHONIOENCODING", "").partition(":")
    kind = {"closefd": False, "encoding": encoding or None, "errors": errors or None}
    sys.stdin = sys.__stdin__ = os.fdopen(0, **kind)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", **kind)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *base]
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        importlib.reload(constants)  # reads the environment
    return list(request["arguments"])


def run(arguments: list[str]) -> None:
    """Runs Python's arguments `-m MODULE ...` or `-c CODE ...`."""
    kind, *rest = arguments
    if kind == "-m":
        sys.argv, sys.path = rest, [str(Path.cwd()), *sys.path]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    sys.argv, sys.path = ["-c", *rest[1:]], ["", *sys.path]
    exec(compile(rest[0], "<string>", "exec"), module.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a program that is forked has Python's handler
    with contextlib.closing(socket.socket(fileno=int(sys.argv[1]))) as served:
        imports()
        kept = tempfile.TemporaryDirectory(prefix="edgemoe-times-")
        one_measurement(Path(kept.name))
        own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        request = serve(served)
    if request is None:
        kept.cleanup()
    else:
        kept._finalizer.detach()  # type: ignore[attr-defined]  # the server's, and not a program's
    if request is not None:
        run(become(request, [path for path in sys.path[1:] if path not in own]))
