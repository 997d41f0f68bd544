"""A double of os.preadv that fails as told, call by call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

Fault = Callable[[int, Sequence[memoryview], int], int]
"""What one call does instead of os.preadv."""


class FaultyPreadv:
    """Does one fault a call, in order, then reads as os.preadv does. Notes every offset it was asked for."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = list(faults)
        self.offsets: list[int] = []

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        read = self.faults.pop(0) if self.faults else os.preadv
        return read(fd, buffers, offset)


def error(number: int) -> Fault:
    """The call fails with this errno."""

    def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def short(count: int) -> Fault:
    """The call reads `count` bytes only, and scribbles over the rest of the buffers, as it may."""

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        os.preadv(fd, buffers, offset)
        kept = count
        for buffer in buffers:
            have = min(kept, len(buffer))
            buffer[have:] = b"\xee" * (len(buffer) - have)
            kept -= have
        return count

    return read
