"""Concurrency of a conversion: overlap of reads, encoding and writes, page cache, and memory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import small_checkpoint
from pairwise import pairwise
from small_conversion import contents, run

import edgemoe.storage.convert.run
import edgemoe.storage.files.source_file
import edgemoe.storage.store.record_file
import edgemoe.storage.store.writer
import edgemoe.storage.threads
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.files import unbuffered
from edgemoe.storage.files.source_file import read_range

PATIENCE = 60
"""Seconds after which an awaited event counts as absent."""


def watch_reads(monkeypatch, before: Callable[[int, int], None]) -> None:
    """Calls `before` with layer and expert before every read of an expert."""
    real = ExpertWeights.read

    def read(self: ExpertWeights, layer: int, expert: int):
        before(layer, expert)
        return real(self, layer, expert)

    monkeypatch.setattr(ExpertWeights, "read", read)


def test_the_next_layer_is_read_while_one_is_made_durable(
    small_source, straight_files, tmp_path, monkeypatch
):
    """The first layer's fsync ends only after a read of the second layer; the store has the same bytes."""
    second = threading.Event()
    watch_reads(monkeypatch, lambda layer, expert: second.set() if layer == 1 else None)
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        if "experts-00000" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            synced.append(second.wait(PATIENCE))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    run(small_source, tmp_path / "store", threads=2)
    assert synced == [True]
    assert contents(tmp_path / "store") == straight_files


class Arriving:
    """Makes the weights of one layer available at a time, and records every call."""

    peak_bytes = 0
    contents: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.events: list[tuple[str, int | None]] = []

    def require(self, layer: int | None) -> None:
        self.events.append(("require", layer))

    def release(self, layer: int, keep: object) -> None:
        self.events.append(("release", layer))


def test_arriving_layers_are_on_disk_one_at_a_time(small_source, straight_files, tmp_path, monkeypatch):
    """A layer is required after the previous one is released, and its experts are read only after that."""
    arriving = Arriving()
    watch_reads(monkeypatch, lambda layer, expert: arriving.events.append(("read", layer)))
    run(small_source, tmp_path / "store", threads=3, arrivals=arriving)
    reads = small_checkpoint.EXPERTS
    assert arriving.events == [
        *(("require", 0), *[("read", 0)] * reads, ("release", 0)),
        *(("require", 1), *[("read", 1)] * reads, ("release", 1)),
        ("require", None),
    ]
    assert contents(tmp_path / "store") == straight_files


EXPERT = 3 * 64 * 32 * (2 + 2)
"""Bytes of an expert in memory: its bf16 weights, and two bytes per weight for codes and record."""


@pytest.mark.parametrize(("memory", "limit"), [(1, 1), (2 * EXPERT, 2), (3 * EXPERT - 1, 2), (1 << 30, 6)])
def test_experts_in_memory_at_a_time_are_bounded(
    small_source, straight_files, tmp_path, monkeypatch, memory, limit
):
    """With any number of threads, the experts in memory stay within the limit, and at least one is allowed."""
    monkeypatch.setattr(edgemoe.storage.convert.run, "_MEMORY", memory)
    begun = taken = 0
    seen: list[int] = []

    class Counting(ThreadPoolExecutor):
        def submit(self, *arguments):
            nonlocal begun
            begun += 1
            seen.append(begun - taken)
            return super().submit(*arguments)

    def written(count: int, total: int) -> None:
        nonlocal taken
        taken += 1

    monkeypatch.setattr(edgemoe.storage.threads, "ThreadPoolExecutor", Counting)
    run(small_source, tmp_path / "store", threads=5, progress=written)
    assert max(seen) == limit
    assert contents(tmp_path / "store") == straight_files


def refuse_direct(monkeypatch, call: str, refusals: list[int]) -> None:
    """Makes os.`call` fail with EINVAL on a descriptor with O_DIRECT, as some file systems do."""
    real = getattr(os, call)

    def refusing(fd: int, *arguments: object):
        if unbuffered.fcntl.fcntl(fd, unbuffered.fcntl.F_GETFL) & os.O_DIRECT:
            refusals.append(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, *arguments)

    monkeypatch.setattr(os, call, refusing)


@pytest.mark.skipif(
    not hasattr(os, "O_DIRECT"), reason="only Linux tells by a flag that the cache is bypassed"
)
@pytest.mark.parametrize("call", ["preadv", "write"])
def test_a_filesystem_without_direct_access_gives_the_same_store(
    small_source, straight_files, tmp_path, monkeypatch, call
):
    """Reads and writes that O_DIRECT refuses are repeated through the page cache."""
    refusals: list[int] = []
    monkeypatch.setattr(edgemoe.storage.files.source_file, "DIRECT_FROM", 1)
    refuse_direct(monkeypatch, call, refusals)
    run(small_source, tmp_path / "store")
    assert refusals
    assert contents(tmp_path / "store") == straight_files


def test_a_filesystem_that_refuses_at_once_gives_the_same_store(
    small_source, straight_files, tmp_path, monkeypatch
):
    """Where the flag itself is refused, all reads and writes go through the page cache."""
    monkeypatch.setattr(edgemoe.storage.files.source_file, "DIRECT_FROM", 1)
    for module in (edgemoe.storage.files.source_file, edgemoe.storage.store.record_file):
        monkeypatch.setattr(module, "bypass_cache", lambda fd: False)
    run(small_source, tmp_path / "store")
    assert contents(tmp_path / "store") == straight_files


@pairwise(offset=[0, 1, 4095, 4096, 5000], size=[0, 1, 4096, 9999], pieces=[1 << 30, 4096, 1000])
def test_any_range_is_read_past_the_cache(tmp_path, monkeypatch, offset, size, pieces):
    """Any range up to the end of the file is read exactly, with any number of bytes per call."""
    raw = bytes(range(256)) * 64
    path = tmp_path / "file"
    path.write_bytes(raw[: offset + size])
    monkeypatch.setattr(edgemoe.storage.files.source_file, "DIRECT_FROM", 0)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: real(fd, [into[0][:pieces]], at))
    assert read_range(path, offset, size).tobytes() == raw[offset : offset + size]
