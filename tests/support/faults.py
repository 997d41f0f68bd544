"""Faults of reads and of whole programs: doubles of os.preadv and of the pauses of retries, and programs that halt."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

from edgemoe.storage.files import retry

REAL = os.preadv
"""os.preadv itself, for doubles that stand in its place."""

Fault = Callable[[int, Sequence[memoryview], int], int]
"""Replaces one call of os.preadv."""


class FaultyPreadv:
    """Runs one fault per call, in order, then `rest`, at first os.preadv. Records the offset of every call."""

    def __init__(self, *faults: Fault) -> None:
        self.faults, self.rest = list(faults), REAL
        self.offsets: list[int] = []

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        read = self.faults.pop(0) if self.faults else self.rest
        return read(fd, buffers, offset)


class Pauses(list[float]):
    """The pauses of retries, in seconds; they take no time, and no other time passes.

    Attributes:
        now: seconds on the clock.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Takes the place of clock and pauses, and forgets earlier warnings."""
        patch.setattr(retry, "time", self)
        patch.setattr(retry.GivingUp, "entered", self)
        patch.setattr(retry.Retries, "_warned", -1e9)

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.append(seconds)
        self.now += seconds
        return False

    def set(self) -> None:
        pass

    clear = set

    def until(self, end: float, number: int) -> Callable[[int, Sequence[memoryview], int], int]:
        """Returns a double of os.preadv that fails with an errno while the clock is before `end`."""

        def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.now < end:
                raise OSError(number, os.strerror(number))
            return REAL(fd, buffers, offset)

        return read


OUTAGE = """
import errno, os, sys, time
from pathlib import Path

real, until = os.preadv, Path(sys.argv.pop(1))

def preadv(fd, buffers, offset):
    if until.exists() and time.time() < float(until.read_text()):
        until.with_suffix(".met").touch()
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return real(fd, buffers, offset)

os.preadv = preadv
from edgemoe.cli import main
sys.exit(main())
"""
"""A program that runs edgemoe's command line: os.preadv fails while the time is before the one in the file that is its
first argument. The first failure makes a file next to it whose suffix is .met."""

HALTING = """
import sys, time
from pathlib import Path

from edgemoe.cli import main
from edgemoe.console.progress import ByteProgress
from edgemoe.models.conversion import waiting

gate, update = Path(sys.argv.pop(1)), ByteProgress.update
waiting.LINE_EVERY = 0.3

def halt(self, done, total):
    update(self, done, total)
    while 2 * done > total and gate.exists():
        gate.with_suffix(".halted").touch()
        time.sleep(0.01)

ByteProgress.update = halt
sys.exit(main())
"""
"""A program that runs edgemoe's command line. A conversion halts in its second half while the file that is the first
argument exists, and makes a file next to it whose suffix is .halted."""


def error(number: int) -> Fault:
    """Returns a fault that raises OSError with this errno."""

    def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def short(count: int) -> Fault:
    """Returns a fault that reads `count` bytes only, and overwrites the rest of the buffers."""

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        REAL(fd, buffers, offset)
        kept = count
        for buffer in buffers:
            have = min(kept, len(buffer))
            buffer[have:] = b"\xee" * (len(buffer) - have)
            kept -= have
        return count

    return read
