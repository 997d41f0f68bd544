"""cache.page_lock: locked pages by the kernel's count, and a limit that forbids them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.cache import page_lock
from edgemoe.cache.page_lock import lock_pages

SIZE = 64 << 10


def locked() -> int:
    """Bytes that the kernel has locked in RAM for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmLck:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_locked_pages_are_counted_until_they_are_unmapped():
    """A small mapping is locked whole, can be written, and closing it unlocks it."""
    before = locked()
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert lock_pages(memory)
    assert locked() - before == SIZE
    memory[:4] = b"abcd"
    memory.close()
    assert locked() == before


REFUSED = """
import mmap, os, resource, sys
from edgemoe.cache.page_lock import lock_pages
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.geteuid() == 0:
    os.setuid(65534)  # root is exempt from the limit
memory = mmap.mmap(-1, 65536)
print(lock_pages(memory))
memory.close()
"""


@pytest.mark.e2e
def test_a_limit_on_locked_memory_is_not_an_error():
    """Where the user may lock no memory, lock_pages returns False and the mapping is closed as usual."""
    root = Path(page_lock.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
