"""Programs of a test, which end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Program = subprocess.Popen[str]


@contextmanager
def programs(**environment: str) -> Iterator[Callable[..., Program]]:
    """Yields a function that starts Python with arguments, its input and output on pipes; kills all at the end."""
    started: list[Program] = []

    def start(*arguments: object) -> Program:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()
