"""The directory of this machine's memory cgroups, and a mark for tests that make some."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.peers.limited import Controller, find_controller

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
CGROUPS = V1 if V1.is_dir() else V2

needs_cgroup = pytest.mark.skipif(
    not (hasattr(os, "geteuid") and os.geteuid() == 0 and os.access(CGROUPS, os.W_OK)),
    reason="memory cgroups need root and a writable cgroup filesystem",
)


def controller() -> Controller:
    """Where this machine makes memory cgroups."""
    return find_controller(Path("/proc/mounts").read_text())


def write_files(folder: Path, **files: str) -> None:
    """Writes files as the kernel has them in a cgroup's folder; a name has __ in the place of its dot."""
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(value)


def has_cgroup(process: int) -> bool:
    """Whether a process made a cgroup that is still there; other tests make theirs at the same time."""
    return (CGROUPS / f"limited-{process}").exists()
