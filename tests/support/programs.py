"""Programs of a test, which end with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Program = subprocess.Popen[str]


def random_kills(model: Path, work: Path, kills: int, *options: str) -> int:
    """Runs tools.reliability.kills, and asserts that all runs were killed and no byte differed behind them.

    Args:
        model: checkpoint to convert.
        work: of temporary stores.
        kills: SIGKILLs.
        options: more of the tool's.

    Returns:
        Different states that the kills left.
    """
    arguments = ("--model", str(model), "--kills", str(kills), "--work", str(work), *options)
    done = subprocess.run(
        [sys.executable, "-m", "tools.reliability.kills", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["killed"], result["unsound"], result["wrong"]) == (kills, [], [])
    return int(result["states"])


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
