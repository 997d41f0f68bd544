"""Reports of the operating system about this process: peak memory, disk reads, memory still available to it."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from edgemoe.machine.cgroups import cgroups

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE = 8 << 20
"""Bytes from which malloc maps a block by itself: dense weights are that large, most of a prompt's activations not."""

_SIZES = re.compile(r"^(VmHWM|VmRSS|RssFile):\s+(\d+) kB", re.MULTILINE)
"""The peak of a process, its resident memory, and pages of files among it, in /proc/self/status."""

_CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""Version of cgroups -> files of limit and usage, and prefix of the counters in memory.stat."""


def resident_bytes() -> int:
    """Resident memory of the whole process, bytes."""
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class ResidentMemory:
    """Resident memory of the whole process, bytes.

    Args:
        resident: all of it, now.
        highest: the most of it since the process's start or `reset_peak`.
        files: pages of mapped files among it, libraries above all; 0 where the kernel does not tell.
    """

    resident: int
    highest: int
    files: int

    @classmethod
    def now(cls) -> ResidentMemory:
        """Reads it from the system."""
        sizes = dict[str, int]()
        with suppress(OSError):
            fields = _SIZES.findall(Path("/proc/self/status").read_text())
            sizes = {name: int(kilobytes) * 1024 for name, kilobytes in fields}
        if "VmRSS" not in sizes:
            return cls(resident_bytes(), peak_resident_bytes(), 0)
        return cls(sizes["VmRSS"], sizes.get("VmHWM", sizes["VmRSS"]), sizes.get("RssFile", 0))

    @property
    def anonymous(self) -> int:
        """Bytes that are no pages of files."""
        return self.resident - self.files


def peak_resident_bytes() -> int:
    """Peak of the process's resident memory since its start or `reset_peak`, bytes."""
    kilobytes = _own_counter("status", "VmHWM")
    if kilobytes is not None:
        return kilobytes * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if psutil.MACOS else peak * 1024


def reset_peak() -> bool:
    """Resets `peak_resident_bytes` to the present resident memory. False where the system does not support it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def collecting_growth() -> Iterator[None]:
    """Frees Python's unreachable objects at the block's end, where the process has grown by a megabyte or more."""
    before = resident_bytes()
    yield
    if resident_bytes() > before + (1 << 20):
        gc.collect()


def disk_read_bytes() -> int | None:
    """Bytes that the kernel has fetched from storage for this process; None where the kernel does not count them."""
    return _own_counter("io", "read_bytes")


def _own_counter(file: str, field: str) -> int | None:
    """The number in a field of a file of /proc/self; None where the system does not have it."""
    with suppress(OSError):
        for line in Path("/proc/self", file).read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    return None


def return_free_memory() -> None:
    """Returns freed memory to the system, and fixes what malloc keeps of it from now on. No-op without glibc.

    By default glibc raises the size from which it returns a block at once, after the first closed model, up to 32 MB:
    its heap then keeps freed blocks, and their holes take 100 MB in addition to the next model. Each thread has a
    heap of its own: the heaps of sixteen threads that compute in turn took 230 MB more.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_ARENA_MAX, 1)
        library.malloc_trim(0)


@cache
def freeze_existing_objects() -> None:
    """Excludes all existing objects, most of them made by imports, from Python's garbage collection. Runs once.

    They live as long as the process, and one traversal of them takes longer than a token.
    """
    gc.collect()
    gc.freeze()


def available_memory() -> int:
    """Bytes that this process may still allocate: the system's free memory, or its memory cgroup's if that is less."""
    return min([int(psutil.virtual_memory().available), *_cgroup_free_bytes()])


def total_memory() -> int:
    """Bytes of RAM of the machine, or of a memory cgroup of this process if that is less."""
    return min([int(psutil.virtual_memory().total), *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    """The limits in bytes of the memory cgroups of this process and their ancestors, where they have one."""
    limits = []
    for directory, version in cgroups("memory"):
        with suppress(OSError, ValueError):  # "max" is no number
            limits.append(int((directory / _CGROUP_FILES[version][0]).read_text()))
    return limits


def _cgroup_free_bytes() -> list[int]:
    """Free bytes of each limited memory cgroup of this process, and of these cgroups' ancestors."""
    free = []
    for directory, version in cgroups("memory"):
        with suppress(OSError):
            free.append(_free_bytes(directory, *_CGROUP_FILES[version]))
    return [max(size, 0) for size in free if size is not None]


def _free_bytes(cgroup: Path, limit_file: str, usage_file: str, prefix: str) -> int | None:
    """Free bytes of a memory cgroup; None without a limit.

    Cached files count as used, but the kernel drops them before it kills a process: they are free here.
    """
    limit = (cgroup / limit_file).read_text().strip()
    if limit == "max":
        return None
    counters = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    cached = {f"{prefix}inactive_file", f"{prefix}active_file"}
    free = int(limit) - int((cgroup / usage_file).read_text())
    return free + sum(int(value) for name, value in counters if name in cached)
