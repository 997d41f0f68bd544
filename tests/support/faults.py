"""A double of os.preadv with a list of faults, one per call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

REAL = os.preadv
"""os.preadv itself, for doubles that stand in its place."""

Fault = Callable[[int, Sequence[memoryview], int], int]
"""Replaces one call of os.preadv."""


class FaultyPreadv:
    """Runs one fault per call, in order, then os.preadv. Records the offset of every call."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = list(faults)
        self.offsets: list[int] = []

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        read = self.faults.pop(0) if self.faults else REAL
        return read(fd, buffers, offset)


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
