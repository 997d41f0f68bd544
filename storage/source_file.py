"""Reading a range of a file that someone else wrote: all of it, or an error that names file and offset."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from storage.errors import MissingTensor, ReadFailed, TruncatedFile
from storage.retry import BACK_OFF, RETRIES, TRANSIENT

_ADVICE = "Download it again"


def read_exactly(
    path: Path, offset: int, into: memoryview, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Fills `into` with a file's bytes from `offset` on. A transient error is retried RETRIES times.

    Args:
        path: opened anew every time, so that nothing is held between reads.
        offset: bytes from the file's start.
        into: writable bytes.
        sleep: what waits before a retry, for a number of seconds.

    Raises:
        TruncatedFile: the file ends before that.
        MissingTensor: there is no such file.
        ReadFailed: the operating system kept refusing.
    """
    wanted = f"{len(into)} bytes were wanted at {offset} in {path}"
    done = failures = 0
    try:
        with path.open("rb", buffering=0) as file:
            while done < len(into):
                try:
                    got = os.preadv(file.fileno(), [into[done:]], offset + done)
                except OSError as error:
                    if error.errno not in TRANSIENT or failures == RETRIES:
                        raise
                    sleep(BACK_OFF * 2**failures)
                    failures += 1
                    continue
                if not got:
                    raise TruncatedFile(wanted, f"the file ends after {done} of them", _ADVICE)
                done += got
                failures = 0
    except FileNotFoundError as error:
        raise MissingTensor(wanted, "there is no such file", _ADVICE) from error
    except OSError as error:
        found = f"{error.strerror} after {done} of them, {failures + 1} times"
        raise ReadFailed(wanted, found, "Check the disk, then try again") from error


def read_whole(path: Path) -> bytes:
    """A small file's bytes.

    Raises:
        as read_exactly.
    """
    try:
        raw = bytearray(path.stat().st_size)
    except OSError as error:
        raise ReadFailed(
            f"{path} was wanted", str(error.strerror), "Check the disk, then try again"
        ) from error
    read_exactly(path, 0, memoryview(raw))
    return bytes(raw)
