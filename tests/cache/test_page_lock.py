"""cache/page_lock.py: what the kernel says of locked pages, and a limit that forbids them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cache import page_lock
from cache.page_lock import lock_pages

SIZE = 64 << 10


def locked() -> int:
    """Bytes of this process that the kernel keeps in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmLck:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="locked memory is told through /proc")
def test_locked_pages_are_counted_until_they_are_unmapped():
    """A small mapping is locked whole, can be written, and closing it gives the memory back."""
    before = locked()
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert lock_pages(memory)
    assert locked() - before == SIZE
    memory[:4] = b"abcd"
    memory.close()
    assert locked() == before


REFUSED = """
import mmap, os, resource, sys
from cache.page_lock import lock_pages
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.geteuid() == 0:
    os.setuid(65534)  # root may lock whatever its limit
memory = mmap.mmap(-1, 65536)
print(lock_pages(memory))
memory.close()
"""


def test_a_limit_on_locked_memory_is_no_error():
    """Where the user may lock nothing, nothing is locked, and the mapping is as good as before."""
    root = Path(page_lock.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
