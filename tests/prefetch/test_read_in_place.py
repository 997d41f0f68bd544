"""Experts that a device reads in DRAM: their counts, and the ones that move into its memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_double import DoubleDevice
from device_rig import DeviceRig
from toys import SLICED, contents, expected

from edgemoe.prefetch.base import ExpertSource
from edgemoe.storage.base import ExpertKey

A, B, C, D = (ExpertKey(0, expert) for expert in range(4))


@pytest.fixture
def full() -> Iterator[DeviceRig]:
    """A rig whose DRAM has A, B, C and D at level 8, and whose VRAM has room for two and has none."""
    r = DeviceRig(DoubleDevice(), 2, 4)
    r.fetch(dict.fromkeys((A, B), 8))
    r.fetch(dict.fromkeys((C, D), 8))
    r.fetcher.release_pins()
    for key in r.vram.resident():
        r.vram.drop(key)
    r.fetcher.take_counts()
    yield r
    r.close()


def test_a_promotion_moves_bytes_and_is_no_request(full):
    """The expert is resident with its own bytes; only bytes over the link are counted, none from disk."""
    full.fetcher.promote({A: 4, C: 8})
    assert full.vram.resident() == {A: 4, C: 8}
    counts = full.fetcher.take_counts()
    assert counts.dram_bytes == SLICED.bytes_at(4) + SLICED.bytes_at(8)
    assert (counts.requests, counts.ssd_bytes, counts.vram_hits, counts.dram_hits) == (0, 0, 0, 0)
    full.fetch({A: 4, C: 8})  # asserts the bytes that a kernel reads


def test_a_promotion_evicts_and_waits_for_kernels(full):
    """A kernel that runs keeps the bytes of its experts, though a promotion takes their blocks (the double checks)."""
    full.fetcher.promote({A: 8, B: 8})
    for key in (A, B):
        lease = full.vram.acquire(key, 8)
        assert lease
        full.device.await_copies(lease.arriving)
        full.device.launch(lease.blocks)
        full.vram.release(lease)
    full.fetcher.promote({C: 8, D: 8})
    assert full.vram.resident() == {C: 8, D: 8}
    full.fetch({C: 8, D: 8})


def test_counts_from_before_are_kept(full):
    """A promotion between two counts loses none of them."""
    full.fetch({A: 8})
    full.fetcher.promote({B: 8})
    counts = full.fetcher.take_counts()
    assert (counts.requests, counts.dram_hits) == (1, 1)
    assert counts.dram_bytes == 2 * SLICED.bytes_at(8)


def test_reads_in_place_count_as_requests(full):
    """Bytes count the planes that VRAM lacks; an expert that has left VRAM is marked without an error."""
    full.fetcher.promote({A: 2})
    full.fetcher.promote({B: 2})
    full.fetcher.take_counts()
    full.fetcher.pinned.count_computed({(2, 8): 1, (0, 4): 2, (8, 4): 3}, 2)
    full.fetcher.pinned.mark_used([A, C])
    counts = full.fetcher.take_counts()
    assert (counts.requests, counts.levels) == (6, {8: 1, 4: 5})
    assert (counts.vram_hits, counts.dram_hits) == (3, 3)
    assert counts.dram_bytes == SLICED.bytes_at(8) - SLICED.bytes_at(2) + 2 * SLICED.bytes_at(4)
    full.fetcher.promote({C: 2})  # B is the least recently used
    assert full.vram.resident() == {A: 2, C: 2}


def test_observers_see_the_experts_in_dram(full):
    """Present and later ones, with blocks that hold their bytes."""
    seen: dict[ExpertKey, tuple[int, bytes]] = {}

    def observe(key: ExpertKey, level: int, blocks) -> None:
        seen[key] = level, contents(blocks) if level else b""

    full.fetcher.pinned.observe_slower(observe)
    assert {key: level for key, (level, _) in seen.items()} == dict.fromkeys((A, B, C, D), 8)
    assert all(found == expected(SLICED, key, 8) for key, (_, found) in seen.items())
    other = ExpertKey(1, 0)
    full.fetch({other: 4})
    full.fetcher.release_pins()
    assert seen[other][0] == full.dram.level_of(other) == 4


def test_a_fill_goes_on_in_dram(full):
    """Once VRAM is full, experts that neither tier has are read into DRAM's free blocks, through VRAM's."""
    for key in (A, B, C, D):
        full.dram.drop(key)
    keys = [ExpertKey(1, expert) for expert in range(6)]
    source: ExpertSource = full.fetcher
    source.fill(keys, [8], lambda: True)
    assert len(full.vram.resident()) == 2
    assert len(full.dram.resident()) == 4
    assert full.vram.resident().keys() | full.dram.resident().keys() <= set(keys)
    reads = len(full.reader.reads)
    source.fill(keys, [8], lambda: True)
    assert len(full.reader.reads) == reads
