"""Runs a function in a forked process with limits of time and memory."""

from __future__ import annotations

import faulthandler
import math
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

import psutil

_SLICE_SECONDS = 0.25
"""Time of one wait for the result."""

_MOST_CHARACTERS = 1000
"""Most characters of a result; the rest is cut off."""

_NOTHING = b"."
"""Result None."""


def confined(function: Callable[[], str | None], *, seconds: float, memory: int) -> str | None:
    """Calls a function in a copy of this process, and returns its result.

    A copy has imported already what this process has: it starts within milliseconds. It shares no memory with this
    process from then on, prints nothing, and is killed with this thread's wait.

    Args:
        function: returns None, or a text that names what was wrong, of which 1,000 characters are kept.
        seconds: limit on the CPU time; the limit on the elapsed time is three times as long.
        memory: bytes that it may map in addition to the memory of this process.

    Returns:
        the function's result, or what ended it: an exception, a signal, or a limit.
    """
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: forking a process with threads
        child = os.fork()
    if not child:
        _run(function, write, seconds, memory)
    os.close(write)
    try:
        answer = _read(read, 3 * seconds)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if answer is None:
        return f"more than {3 * seconds:g} s"
    if answer:
        return None if answer == _NOTHING else answer[1:].decode(errors="replace")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"more than {seconds:g} s of computing"
    code = os.waitstatus_to_exitcode(status)
    return f"a process that ended with code {code}; it may take {memory >> 20} MiB"


def _run(function: Callable[[], str | None], write: int, seconds: float, memory: int) -> NoReturn:
    """In the child: calls the function, writes its result as JSON, and ends."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.disable()  # an end by a signal is a result
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        _limit(seconds, memory)
        try:
            found = function()
        except MemoryError:
            found = f"more than {memory >> 20} MiB of memory"
        except BaseException as error:  # a panic of a library in Rust is one
            found = f"{type(error).__name__}: {error}"
        os.write(
            write, _NOTHING if found is None else b":" + found[:_MOST_CHARACTERS].encode(errors="replace")
        )
    finally:
        os._exit(0)


def _limit(seconds: float, memory: int) -> None:
    import resource

    for kind, most in (
        (resource.RLIMIT_AS, psutil.Process().memory_info().vms + memory),
        (resource.RLIMIT_CPU, math.ceil(seconds)),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (soft, hard))


def _read(read: int, seconds: float) -> bytes | None:
    """Reads until the other end closes; None after `seconds`, which count only while this program is not stopped."""
    answer = bytearray()
    while seconds > 0 and len(answer) < 8 * _MOST_CHARACTERS:
        start = time.monotonic()
        if select.select([read], [], [], _SLICE_SECONDS)[0]:
            piece = os.read(read, _MOST_CHARACTERS)
            if not piece:
                return bytes(answer)
            answer += piece
        seconds -= min(time.monotonic() - start, 2 * _SLICE_SECONDS)
    return None
