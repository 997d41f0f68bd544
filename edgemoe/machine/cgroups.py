"""The control groups of this process, through which a container limits it, and the cores that they allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def cgroups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yields directory and version, 1 or 2, of each cgroup of this process that may have a controller's files.

    Ancestors count too. In a container the path may be the host's while the container's own cgroup is mounted at the
    root, so a directory may not exist.

    Args:
        controller: "memory" or "cpu".
    """
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controller if controllers else _ROOT
        directory = root / path.lstrip("/")
        while directory.is_relative_to(root):
            yield directory, 1 if controllers else 2
            directory = directory.parent


def cores() -> int:
    """Cores that this process may use: its affinity, or the time that its cgroups allow, if that is less.

    A container with `--cpus 2.5` sees every core of the machine, and its threads are stopped once they have used 2.5
    cores' time together. A part of a core counts for nothing: with a thread more, all wait for the one that is stopped.
    """
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [visible]
    for directory, version in cgroups("cpu"):
        with suppress(OSError, ValueError):
            shares.append(_share(directory, version) or visible)
    return min(shares)


def _share(directory: Path, version: int) -> int | None:
    """Whole cores of a cgroup, at least one; None without a limit."""
    if version == 1:
        used, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    else:
        used, period = (directory / "cpu.max").read_text().split()
    if used.strip() == "max" or int(used) < 0:
        return None
    return max(int(used) // int(period), 1)
