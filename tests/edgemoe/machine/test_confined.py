"""machine.confined: a function in a forked process, and every limit that may end it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest

from edgemoe.machine.confined import confined

pytestmark = pytest.mark.e2e


def call(function: Callable[[], str | None]) -> str | None:
    """Calls it with a second of computing and 64 MiB."""
    return confined(function, seconds=1, memory=64 << 20)


def children() -> set[str]:
    """Processes of this one."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process is left."""
    before = children()
    yield
    assert children() <= before


def compute() -> None:
    """Computes for ever."""
    while True:
        pass


def fail() -> None:
    """Raises what no `except Exception` catches, as a panic of a Rust library is."""
    raise BaseException("panicked at lib.rs")


def test_the_result_comes_back():
    """None, a text, an empty one, and the beginning of a long one."""
    assert call(lambda: None) is None
    assert call(lambda: "é 🙂 \ud800") == "é 🙂 ?"
    assert call(str) == ""
    assert call(lambda: "é" * 1001) == "é" * 1000


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (compute, "more than 1 s of computing"),
        (lambda: time.sleep(60), "more than 3 s"),
        (lambda: len(bytearray(256 << 20)) and None, "more than 64 MiB of memory"),
        (fail, "BaseException: panicked at lib.rs"),
        (os.abort, "a process that ended with code -6; it may take 64 MiB"),
        (lambda: os._exit(3), "a process that ended with code 3; it may take 64 MiB"),
    ],
    ids=["cpu", "wall", "memory", "exception", "abort", "exit"],
)
def test_what_ends_it_is_named(function, words):
    """Time, memory, an exception and a sudden end; nothing is left of the process."""
    start, computed = time.monotonic(), os.times().children_user
    ended = call(function)
    if function is compute and os.times().children_user - computed < 0.9:
        pytest.skip("other processes leave less than a second of computing in the three seconds there are")
    assert ended == words
    assert time.monotonic() - start < 10


def test_it_prints_nothing_and_changes_nothing(capfd):
    """Its output and its writes to memory stay in the process."""
    changed = []

    def prints() -> None:
        changed.append(1)
        os.write(1, b"printed")
        os.write(2, b"printed")

    assert call(prints) is None
    assert not changed
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_ends_the_wait():
    """KeyboardInterrupt in this process kills the other."""
    timer = Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call(lambda: time.sleep(60))
