"""Reports of the operating system about the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.machine import process

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.e2e
@linux
def test_the_peak_includes_freed_memory_until_it_is_reset():
    """50 MB mapped and unmapped count in the peak, not in resident memory, and a reset removes them."""
    code = (
        "import mmap\nfrom edgemoe.machine import process as p\n"
        "p.reset_peak(); before = p.peak_resident_bytes()\n"
        "m = mmap.mmap(-1, 50_000_000); m.write(b'x' * 50_000_000); m.close()\n"
        "peak = p.peak_resident_bytes(); p.reset_peak()\n"
        "print(peak - before, p.peak_resident_bytes() - p.resident_bytes(), peak - p.peak_resident_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, above_now, dropped = map(int, done.stdout.split())
    assert grown >= 50_000_000
    assert above_now < 5_000_000
    assert dropped >= 50_000_000


@linux
def test_disk_reads_are_the_kernels_count(tmp_path):
    """Bytes read past the page cache are counted once each."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = process.disk_read_bytes()
    path.read_bytes()
    after = process.disk_read_bytes()
    assert before is not None
    assert after is not None
    if after == before:
        pytest.skip("this file system does not account its reads")
    assert 1 << 20 <= after - before < 2 << 20


def test_available_memory_obeys_the_smallest_cgroup(monkeypatch, tmp_path):
    """A cgroup's free bytes count where they are fewer than the system's."""
    monkeypatch.setattr(process, "_cgroup_free_bytes", lambda: [123_456, 10**15])
    assert process.available_memory() == 123_456
    monkeypatch.setattr(process, "_cgroup_free_bytes", lambda: [])
    assert process.available_memory() > 10_000_000


@pytest.fixture
def cgroup(monkeypatch):
    """Replaces /proc/self/cgroup and the files of /sys/fs/cgroup, by version and by path below the root."""

    def place(version: int, own: str, files: dict[str, str]) -> None:
        root = "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup"
        line = f"4:cpu,memory:{own}\n" if version == 1 else f"0::{own}\n"
        there = {"/proc/self/cgroup": f"9:name=systemd:/\n{line}"}
        there |= {f"{root}/{name}": text for name, text in files.items()}

        def read_text(path: Path) -> str:
            if str(path) not in there:
                raise FileNotFoundError(path)
            return there[str(path)]

        monkeypatch.setattr(Path, "read_text", read_text)

    return place


LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
NONE = {1: str(2**63 - 4096), 2: "max\n"}
NO_CACHE = "anon 5\ninactive_file 0\nactive_file 0\ntotal_inactive_file 0\n"


@linux
@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_files_of_both_versions_are_read(cgroup, version):
    """Limit less usage, of the cgroup and its ancestors; a cgroup without a limit is ignored."""
    files = {
        f"box/inner/{LIMIT[version]}": NONE[version],
        f"box/inner/{USED[version]}": "100",
        "box/inner/memory.stat": NO_CACHE,
        f"box/{LIMIT[version]}": "5000\n",
        f"box/{USED[version]}": "1000\n",
        "box/memory.stat": NO_CACHE,
    }
    cgroup(version, "/box/inner", files)
    assert process.available_memory() == 4000


@linux
@pytest.mark.parametrize("version", [1, 2])
def test_the_page_cache_of_a_cgroup_is_free(cgroup, version):
    """Cached files count as free, since the kernel drops them before it kills a process; anonymous memory does not."""
    prefix = {1: "total_", 2: ""}[version]
    stat = f"anon 70\n{prefix}inactive_file 600\n{prefix}active_file 30\ninactive_anon 9\n"
    files = {f"box/{LIMIT[version]}": "1000", f"box/{USED[version]}": "900", "box/memory.stat": stat}
    cgroup(version, "/box", files)
    assert process.available_memory() == 1000 - 900 + 630


@linux
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_reads_its_cgroup_at_the_root(cgroup, version):
    """The path is the host's and does not exist in the container; the limit at the mounted root applies."""
    files = {LIMIT[version]: "3000", USED[version]: "1000", "memory.stat": NO_CACHE}
    cgroup(version, "/docker/4d3c2b1a", files)
    assert process.available_memory() == 2000


@linux
@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_above_its_limit_has_nothing_free(cgroup, version):
    """Usage above the limit gives 0 bytes, not a negative number."""
    cgroup(version, "/", {LIMIT[version]: "10", USED[version]: "20", "memory.stat": NO_CACHE})
    assert process.available_memory() == 0


@pytest.mark.e2e
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_memory_goes_back_to_the_system():
    """return_free_memory trims small blocks that malloc keeps below a live one."""
    program = """
import ctypes
from edgemoe.machine.process import resident_bytes, return_free_memory
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [malloc(65536) for _ in range(3000)]
for block in blocks:
    ctypes.memset(block, 1, 65536)
stays = malloc(65536)
for block in blocks:
    free(block)
before = resident_bytes()
return_free_memory()
print(before - resident_bytes())
"""
    given = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(given) > 3000 * 65536 / 2


@pytest.mark.e2e
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_threads_that_compute_in_turn_share_freed_memory():
    """Memory that one thread has freed serves the next one: eight threads take little more than one."""
    program = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from edgemoe.machine.process import resident_bytes, return_free_memory
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def compute(_):
    blocks = [malloc(65536) for _ in range(500)]
    for block in blocks:
        ctypes.memset(block, 1, 65536)
    stays = malloc(65536)
    for block in blocks:
        free(block)
return_free_memory()
with ThreadPoolExecutor(8) as threads:
    together = Barrier(8)
    list(threads.map(lambda _: together.wait(), range(8)))  # so that eight threads exist
    before = resident_bytes()
    for _ in range(24):
        threads.submit(compute, 0).result()
    print(resident_bytes() - before)
"""
    given = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(given) < 2 * 500 * 65536
