"""Conditions of a benchmark: versions, machine, disk and model."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from edgemoe.engine.engine import StoreModel
from edgemoe.evaluate.environment import program_and_model
from edgemoe.machine.cpu import identity
from edgemoe.machine.process import available_memory


def environment(store: StoreModel) -> dict[str, Any]:
    """Returns facts about program, machine and model as one JSON object. Sizes in bytes."""
    return program_and_model(store) | {
        "commit": _commit(Path(__file__).parent.parent.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": identity()["cpu"],
        "threads": torch.get_num_threads(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "available_bytes": available_memory(),
        "device": store.device.name if store.device else "cpu",
        "disk": _disk(store.directory),
        "layout": store.manifest.layout,
        "kernel": store.compute.name,
        "kernel_layout": store.compute.layout.name,
        "max_level": store.manifest.max_level,
    }


def _commit(root: Path) -> str | None:
    """Returns the commit checked out in `root`, with + if there are changes; None where `root` is no checkout."""
    # git also searches the parent folders: below another repository it would name that one's commit.
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _disk(directory: Path) -> dict[str, str] | None:
    """Returns device and filesystem of the mount of a directory; None where the system does not list it."""
    path = directory.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    mount = max(mounts, key=lambda m: len(m.mountpoint), default=None)
    return {"device": mount.device, "filesystem": mount.fstype} if mount else None
