"""A double of the operating system's file calls, of which the Nth fails."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "preadv", "readv", "lseek")


def each_in_turn(calls: Sequence[str], offset: int, step: int) -> list[int]:
    """Numbers of calls, from 1: each `step`th one after `offset`, and the first and the last one of each kind.

    Tests of several faults give each another offset, so that every call meets one fault and every kind all of them.

    >>> each_in_turn(["open", "write", "write", "write", "fsync"], 1, 3)
    [1, 2, 4, 5]
    """
    last = {kind: at for at, kind in enumerate(calls, 1)}
    first = {kind: at for at, kind in reversed([*enumerate(calls, 1)])}
    return sorted({*range(1 + offset, len(calls) + 1, step), *first.values(), *last.values()})


class FaultyDisk:
    """Counts every call that opens, reads, writes, renames or syncs a file, and makes the one numbered `at` fail.

    Args:
        patch: installs the double, and removes it.
        at: number of the failing call, from 1; 0 for none.
        number: errno of the failure; None: the call transfers one byte only, if it transfers bytes.
        stays: all later calls of the same kind fail, too.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, at: int, number: int | None, *, stays: bool = False
    ) -> None:
        self.calls: list[str] = []
        self._at, self._number, self._stays = at, number, stays
        self._lock = threading.Lock()
        for name in CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        real = io.open
        patch.setattr(io, "open", lambda *a, **k: _File(self._counted("open file", real)(*a, **k), self))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.counts_and_fails(name):
                return real(*args, **kwargs)
            if self._number is not None:
                raise OSError(self._number, os.strerror(self._number))
            if name == "write":
                return real(args[0], args[1][:1])
            if name == "readv":
                return real(args[0], [memoryview(args[1][0])[:1]])
            if name == "preadv":
                return real(args[0], [args[1][0][:1]], *args[2:])
            return real(*args, **kwargs)

        return call

    def counts_and_fails(self, name: str) -> bool:
        """Counts a call, and returns whether it fails."""
        with self._lock:
            self.calls.append(name)
            failing = self.calls[self._at - 1] if 0 < self._at <= len(self.calls) else None
            return len(self.calls) == self._at or (self._stays and name == failing)

    def fail(self) -> None:
        """Raises the OSError of the failing call, if it has an errno."""
        if self._number is not None:
            raise OSError(self._number, os.strerror(self._number))


class _File:
    """A file object whose reads are counted by the disk."""

    def __init__(self, file: Any, disk: FaultyDisk) -> None:
        self._file, self._disk = file, disk

    def read(self, *args: Any) -> Any:
        if self._disk.counts_and_fails("read"):
            self._disk.fail()
        return self._file.read(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
