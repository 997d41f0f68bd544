"""What the operating system says of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.machine import process

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_peak_remembers_what_was_freed_until_it_is_reset():
    """50 MB taken and given back show in the peak, not in what is resident, and are gone after a reset."""
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
    """A cgroup's room counts where it is less than what the system has free."""
    monkeypatch.setattr(process, "_cgroup_room", lambda: [123_456, 10**15])
    assert process.available_memory() == 123_456
    monkeypatch.setattr(process, "_cgroup_room", lambda: [])
    assert process.available_memory() > 10_000_000


@pytest.fixture
def cgroup(monkeypatch):
    """Puts files in the place of /proc/self/cgroup and /sys/fs/cgroup, by version and by path below the root."""

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
    """Limit less usage, for the cgroup and those above it; where there is no limit, nothing is lacking."""
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
    """Files that were read count as used, but are dropped before anything is killed; anonymous memory is not."""
    prefix = {1: "total_", 2: ""}[version]
    stat = f"anon 70\n{prefix}inactive_file 600\n{prefix}active_file 30\ninactive_anon 9\n"
    files = {f"box/{LIMIT[version]}": "1000", f"box/{USED[version]}": "900", "box/memory.stat": stat}
    cgroup(version, "/box", files)
    assert process.available_memory() == 1000 - 900 + 630


@linux
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_that_sees_only_its_own_cgroup(cgroup, version):
    """The path is the host's and is not there; the limit lies at the root of what can be seen, and holds."""
    files = {LIMIT[version]: "3000", USED[version]: "1000", "memory.stat": NO_CACHE}
    cgroup(version, "/docker/4d3c2b1a", files)
    assert process.available_memory() == 2000


@linux
@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_above_its_limit_has_no_room(cgroup, version):
    """Never less than nothing."""
    cgroup(version, "/", {LIMIT[version]: "10", USED[version]: "20", "memory.stat": NO_CACHE})
    assert process.available_memory() == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_memory_goes_back_to_the_system():
    """Many small blocks below one that stays are not given back by themselves, and are when asked to be."""
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
