"""The bound of a step is one: probes reach the rates that the engine reaches, and no row takes less time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgemoe.bench import bandwidth
from edgemoe.bench.bandwidth import disk_speed
from edgemoe.bench.rows import single_row
from edgemoe.bench.run import BenchRequest, run_bench
from edgemoe.bench.sample import Phase
from edgemoe.bench.summary import decode_bound
from edgemoe.engine.engine import StoreModel
from edgemoe.experts.use import ExpertUse
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.workers import SCAN_WORKERS
from edgemoe.storage.base import ExpertKey, Plane, PlaneReader

NOISE = 0.02


class Disk(PlaneReader):
    """A disk that takes the same time for a read however many it has, and more while it is slow.

    Args:
        read_s: Seconds of a read.
        slow_s: Seconds, from the first read on, for which a read takes ten times as long.
    """

    def __init__(self, read_s: float, slow_s: float = 0.0) -> None:
        self._read_s, self._slow_s = read_s, slow_s
        self._began = 0.0

    def read(self, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]) -> int:
        now = time.perf_counter()
        self._began = self._began or now
        time.sleep(self._read_s * (10 if now - self._began < self._slow_s else 1))
        return sum(map(len, into))


@pytest.mark.e2e
def test_a_disk_is_probed_with_as_many_readers_as_a_prompt_has(tiny_store):
    """A disk whose rate grows with the reads at once gives the rate of SCAN_WORKERS reads."""
    manifest = StoreModel.open(tiny_store).manifest
    known = SCAN_WORKERS * manifest.geometry.prefix_bytes(8) / 0.02
    assert 0.75 * known < disk_speed(Disk(0.02), manifest, 8) <= (1 + NOISE) * known


def private(address: int) -> bool:
    """Whether an address of this process lies in private memory, which alone gets huge pages."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        span, permissions, *_ = line.split()
        first, end = (int(place, 16) for place in span.split("-"))
        if first <= address < end:
            return permissions.endswith("p")
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.e2e
def test_a_disk_is_probed_into_memory_as_blocks_have_it(tiny_store):
    """The engine reads into private memory; reads into shared memory take longer, and would make no bound."""
    found = []

    class Watched(Disk):
        def read(self, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]) -> int:
            found.extend(private(np.frombuffer(plane, np.uint8).ctypes.data) for plane in into)
            return super().read(key, first, last, into)

    disk_speed(Watched(0.02), StoreModel.open(tiny_store).manifest, 8)
    assert set(found) == {True}


@pytest.mark.e2e
def test_a_slow_moment_does_not_make_a_slow_disk(tiny_store):
    """A disk that is slow for the first half of the probes has the rate of the other half."""
    manifest = StoreModel.open(tiny_store).manifest
    known = SCAN_WORKERS * manifest.geometry.prefix_bytes(8) / 0.02
    slow = Disk(0.02, slow_s=bandwidth.PROBE_SECONDS / 2)
    assert 0.75 * known < disk_speed(slow, manifest, 8) <= (1 + NOISE) * known


@pytest.mark.parametrize(
    ("ssd", "dram", "experts", "seconds"),
    [
        (300, 0, 1, 3.0),  # the disk reads while 2 s of dense weights and 1 s of an expert are computed
        (900, 0, 1, 9.0),
        (0, 0, 4, 6.0),  # dense weights and experts share the memory's rate
        (0, 4000, 1, 4.0),
    ],
)
def test_the_bound_is_the_time_of_the_slowest_tier(ssd, dram, experts, seconds):
    """A step that moves its bytes at the known rates, all tiers at once, reaches 100 % of the bound, and not more."""
    store = SimpleNamespace(form=SimpleNamespace(bytes_at=lambda level: 10_000), dense_bytes_per_token=20_000)
    counts, use = TransferCounts(ssd_bytes=ssd, dram_bytes=dram), ExpertUse({8: experts})
    rates = {"ssd": 100.0, "dram": 1_000.0, "vram": 10_000.0}
    row = decode_bound(Phase(counts, use), 1, seconds, store, rates)
    assert row["fraction_of_bound"] == pytest.approx(1)


@pytest.mark.e2e
def test_no_row_exceeds_the_bound(tiny_store, monkeypatch):
    """Resident and within a limit, cold and warm, a row takes no less than its bound, but for noise."""
    monkeypatch.setattr(bandwidth, "PROBE_SECONDS", 0.25)
    store = StoreModel.open(tiny_store)
    least = store.plan(vram_limit=None, context=64).minimum_vram_bytes
    for limit in (None, least + 8 * 20_480):
        rows = single_row(RunSettings.uniform(8))
        request = BenchRequest(rows, vram_limit=limit, prompt_tokens=8, new_tokens=20, runs=1, context=64)
        for row in run_bench(store, request)["rows"]:
            assert 0 < row["fraction_of_bound"] <= 1 + NOISE, (limit, row["arm"])
