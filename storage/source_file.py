"""Reading a range of a file that someone else wrote: all of it, or an error that names file and offset."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from storage.base import BLOCK
from storage.errors import MissingTensor, ReadFailed, TruncatedFile
from storage.planes import Bytes
from storage.record import align
from storage.retry import BACK_OFF, RETRIES, TRANSIENT
from storage.unbuffered import aligned, bypass_cache, use_cache

DIRECT_FROM = 1 << 20
"""Bytes from which on a range is read past the page cache; below, what the kernel reads ahead is worth more."""

_ACTION = "download the file again"


def read_range(path: Path, offset: int, size: int, *, sleep: Callable[[float], None] = time.sleep) -> Bytes:
    """uint8 [size]: a file's bytes from `offset` on. A transient error is retried RETRIES times.

    They are as aligned in memory as in the file, up to BLOCK.

    Args:
        path: opened anew every time, so that nothing is held between reads.
        offset: bytes from the file's start.
        size: bytes.
        sleep: what waits before a retry, for a number of seconds.

    Raises:
        TruncatedFile: the file ends before that.
        MissingTensor: there is no such file.
        ReadFailed: the operating system kept refusing.
    """
    wanted = f"{size} bytes at {offset} in {path}"
    before = offset % BLOCK
    buffer = aligned(align(before + size))
    try:
        with path.open("rb", buffering=0) as file:
            fd = file.fileno()
            direct = size >= DIRECT_FROM and bypass_cache(fd)
            got = _fill(fd, offset - before, buffer.data, before + size, direct, sleep)
    except FileNotFoundError as error:
        raise MissingTensor(wanted, "no such file", _ACTION) from error
    except OSError as error:
        raise ReadFailed(wanted, str(error.strerror), "check the disk, then try again") from error
    if got < before + size:
        raise TruncatedFile(wanted, f"{max(got - before, 0)} bytes before the end of the file", _ACTION)
    return buffer[before : before + size]


def _fill(
    fd: int, start: int, into: memoryview, wanted: int, direct: bool, sleep: Callable[[float], None]
) -> int:
    """Reads from `start`, a whole block, until at least `wanted` bytes are there; returns how many before the end."""
    done = failures = 0
    while done < wanted:
        try:
            got = os.preadv(fd, [into[done:]], start + done)
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                if error.errno not in TRANSIENT or failures == RETRIES:
                    raise
                sleep(BACK_OFF * 2**failures)
                failures += 1
                continue
            got = 0
        else:
            if not got:
                break
            failures = 0
        done += got
        if direct and done < wanted:
            # Refused, or cut short inside a block: only through the cache can it go on there.
            use_cache(fd)
            direct = False
    return done


def read_whole(path: Path) -> bytes:
    """A small file's bytes.

    Raises:
        as read_range.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ReadFailed(f"to read {path}", str(error.strerror), "check the disk, then try again") from error
    return read_range(path, 0, size).tobytes()
