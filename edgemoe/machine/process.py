"""What the operating system says of this process and machine: peak memory, disk reads, memory to be had."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil


def _status(field: str) -> int:
    """Bytes of a kB field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def resident_bytes() -> int:
    """Memory of the whole process that is resident now, bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most memory the whole process has had resident since its start (or reset_peak), bytes."""
    try:
        return _status("VmHWM")
    except (OSError, KeyError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if psutil.MACOS else peak * 1024


def reset_peak() -> bool:
    """Starts peak_resident_bytes anew from what is resident now. False where the system has no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def return_free_memory() -> None:
    """Gives what has been freed back to the system, and from now on large blocks as soon as they are freed.

    The C library would otherwise learn from the first closed model to keep blocks up to 32 MB in its heap, whose
    holes take 100 MB beside the next one's. Elsewhere than under glibc, without effect.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.malloc_trim(0)


_M_MMAP_THRESHOLD = -3
_LARGE = 8 << 20
"""Bytes from which a block is mapped by itself: dense weights are, a prompt's activations mostly are not."""


@cache
def freeze_what_is_there() -> None:
    """Keeps all objects that there are, mostly what imports have made, from Python's garbage collector. Once.

    They stay as long as the process, and looking through them takes longer than a token.
    """
    gc.collect()
    gc.freeze()


def disk_read_bytes() -> int | None:
    """Bytes this process has caused to be fetched from storage, by the kernel's count. None where it keeps none."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def available_memory() -> int:
    """Bytes this process may still take: what the system has free, or its memory cgroup if that is less."""
    return min([int(psutil.virtual_memory().available), *_cgroup_room()])


def _cgroup_room() -> list[int]:
    """Room left in each memory cgroup this process is in, version 1 or 2, and in those above it."""
    room = []
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, path in entries:
        if controllers == "":
            root, read = Path("/sys/fs/cgroup"), _room_v2
        elif "memory" in controllers.split(","):
            root, read = Path("/sys/fs/cgroup/memory"), _room_v1
        else:
            continue
        directory = root / path.lstrip("/")
        while directory.is_relative_to(root):
            # In a container the path may be the host's, and the container's own cgroup lie at the root.
            with suppress(OSError):
                room.append(read(directory))
            directory = directory.parent
    return [max(bytes_, 0) for bytes_ in room if bytes_ is not None]


def _room_v2(cgroup: Path) -> int | None:
    limit = (cgroup / "memory.max").read_text().strip()
    if limit == "max":
        return None
    return int(limit) - int((cgroup / "memory.current").read_text()) + _page_cache(cgroup, "")


def _room_v1(cgroup: Path) -> int | None:
    limit = int((cgroup / "memory.limit_in_bytes").read_text())
    used = int((cgroup / "memory.usage_in_bytes").read_text())
    return limit - used + _page_cache(cgroup, "total_")


def _page_cache(cgroup: Path, prefix: str) -> int:
    """Bytes of files in memory: they count as used, but the kernel drops them before it kills anything."""
    lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    return sum(int(value) for name, value in lines if name in names)
