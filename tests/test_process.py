"""What the operating system says of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe import process

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_peak_remembers_what_was_freed_until_it_is_reset():
    """50 MB taken and given back show in the peak, not in what is resident, and are gone after a reset."""
    code = (
        "import mmap\nfrom edgemoe import process as p\n"
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


@linux
@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_files_of_both_versions_are_read(monkeypatch, version, tmp_path):
    """Limit less usage, for the cgroup and its parents; `max` is no limit."""
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    line = "4:memory:/box/inner\n" if version == 1 else "0::/box/inner\n"
    root = "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup"
    files = {
        "/proc/self/cgroup": line,
        f"{root}/box/inner/{names[0]}": "max" if version == 2 else str(2**63 - 4096),
        f"{root}/box/inner/{names[1]}": "100",
        f"{root}/box/{names[0]}": "5000",
        f"{root}/box/{names[1]}": "1000",
    }

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert min(process._cgroup_room()) == 4000
