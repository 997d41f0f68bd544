"""A plugin of pytest that refuses to start a process in a test that `make test-fast` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SLOW = ("e2e", "gpu", "triton", "folders")
"""Marks of the tests that `make test-fast` leaves out."""

SHARED = {str(ROOT / "edgemoe" / name) for name in ("machine/confined.py", "api/template.py")}
"""Modules whose processes a fast test may start: the trial of a tokenizer, and the renderer that all chats share."""

running = {"fast": False}
"""Whether the test that runs is a fast one."""


def guarded(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that starts a process: while a fast test runs, only modules of SHARED may call it.

    Raises:
        AssertionError: another module does.
    """

    @wraps(start)
    def guard(*args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while running["fast"] and frame and frame.f_code.co_filename not in SHARED:
            frame = frame.f_back
        assert frame, "expected the mark e2e on a test that starts a process, got a test without it"
        return start(*args, **kwargs)

    return guard


def pytest_configure() -> None:
    """Guards the functions by which tests and edgemoe start processes, for as long as this process runs tests."""
    subprocess.Popen.__init__ = guarded(subprocess.Popen.__init__)  # type: ignore[method-assign]
    os.fork, os.forkpty = guarded(os.fork), guarded(os.forkpty)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Notes whether the test is fast, for its fixtures too."""
    running["fast"] = not any(item.get_closest_marker(mark) for mark in SLOW)
    try:
        return (yield)
    finally:
        running["fast"] = False
