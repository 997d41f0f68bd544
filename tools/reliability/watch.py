"""Watches what a process in a memory cgroup takes, and whether it grows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from edgemoe.bench.environment import environment
from edgemoe.errors import UserError
from edgemoe.models.demo import DEMO
from edgemoe.models.resolve import resolve_store
from edgemoe.models.store_model import StoreModel
from tools.checkout import ROOT, child_environment

ALLOWED_GROWTH = 0.02
"""Growth of the median of resident memory that counts as flat."""


@dataclass(frozen=True)
class Sample:
    """The process at one time."""

    seconds: float
    resident_bytes: int
    cgroup_bytes: int
    files: int
    threads: int
    turns: int


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A memory cgroup of its own, removed at the end.

    Raises:
        UserError: cgroups cannot be made here.
    """
    v1 = Path("/sys/fs/cgroup/memory")
    root, file = (v1, "memory.limit_in_bytes") if v1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = root / f"edgemoe-soak-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(str(limit))
    except OSError as error:
        raise UserError(f"a writable {root}", str(error), "run as root, with cgroups mounted") from error
    try:
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Removes a cgroup; its last processes may take some seconds to end."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
    group.rmdir()


def entering(group: Path, command: Sequence[str]) -> list[str]:
    """A command that enters a cgroup, then runs `command` in the same process."""
    return ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"', *command]


def run_inside(group: Path, module: str, arguments: Sequence[str]) -> int:
    """Runs a module in a process of its own inside a cgroup; returns its exit code."""
    command = entering(group, [sys.executable, "-m", module, *arguments])
    return subprocess.run(command, env=child_environment(), cwd=ROOT, check=False).returncode


def sample(seconds: float, process: psutil.Process, group: Path, turns: int) -> Sample:
    """The process's present resources."""
    v1, v2 = group / "memory.usage_in_bytes", group / "memory.current"
    usage = int((v1 if v1.exists() else v2).read_text())
    return Sample(seconds, process.memory_info().rss, usage, process.num_fds(), process.num_threads(), turns)


def flatness(samples: Sequence[Sample]) -> list[str]:
    """The resources that grew from the second to the last sixth of some samples; empty: none."""
    sixth = max(len(samples) // 6, 1)
    early, late = samples[sixth : 2 * sixth] or samples, samples[-sixth:]
    wrong = []
    for name in ("resident_bytes", "files", "threads"):
        before, after = (median(getattr(sample, name) for sample in some) for some in (early, late))
        most = before * (1 + ALLOWED_GROWTH) if name == "resident_bytes" else before
        if after > most:
            wrong.append(f"{name}: {before:g} in the second sixth, {after:g} in the last")
    return wrong


def demo_environment() -> dict[str, Any]:
    """The machine, the versions and the demo model's store, which a report shows."""
    return environment(StoreModel.open(resolve_store(DEMO)))
