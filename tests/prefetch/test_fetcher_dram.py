"""prefetch.fetcher with a slow tier in RAM: victims are copied there, and come back without a read."""

from __future__ import annotations

import pytest
from fetch_rig import WAIT, Arrivals, Rig, rigs
from one_step import OneStepFetcher
from toys import MERGED, SLICED, ToyForm, check, disk_bytes, put

from edgemoe.cache.lru import LRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.storage.base import ExpertKey

A, B, C, D, E = (ExpertKey(0, e) for e in range(5))

FORMS = pytest.mark.parametrize("form", [MERGED, SLICED], ids=["merged", "sliced"])


rig = pytest.fixture(rigs)


@FORMS
def test_victims_are_copied_into_dram(rig: type[Rig], form: ToyForm) -> None:
    """An expert that VRAM evicts whole is in DRAM with its level and bytes, and comes back without a read."""
    r = rig(form, 1, 2)
    size = form.bytes_at(4)
    r.fetch({A: 4})
    r.fetch({B: 4})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.spilled_bytes, counts.dram_bytes) == (2 * disk_bytes(0, 4), size, 0)
    check(r.dram, form, {A: 4})
    r.fetch({A: 4})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.spilled_bytes, counts.dram_bytes) == (0, size, size)
    assert (counts.dram_hits, counts.vram_hits) == (1, 0)
    assert (r.vram.resident(), r.dram.resident()) == ({A: 4}, {B: 4})


def test_a_full_dram_evicts_its_oldest(rig: type[Rig]) -> None:
    """DRAM evicts the least recently used expert, which is in no tier then."""
    r = rig(MERGED, 1, 2)
    for key in (A, B, C, D):
        r.fetch({key: 8})
    assert (r.vram.resident(), r.dram.resident()) == ({D: 8}, {B: 8, C: 8})


def test_dram_keeps_the_planes_that_it_has_blocks_for(rig: type[Rig]) -> None:
    """Without a block for the upper planes, the lower ones are kept, and the others are read again."""
    r = rig(MERGED, 1, 1)
    r.fetcher.close()
    dram = PlaneTier(MERGED, {"p4": 2}, LRU, device="cpu", name="dram")
    r.dram, r.fetcher = dram, OneStepFetcher(r.vram, dram, MERGED, r.reader, workers=1)
    r.fetch({A: 8})
    r.fetch({B: 8})
    counts = r.fetcher.take_counts()
    assert (r.vram.resident(), dram.resident()) == ({B: 8}, {A: 4})
    assert counts.spilled_bytes == MERGED.bytes_at(4)
    r.fetch({A: 8})
    assert r.fetcher.take_counts().ssd_bytes == disk_bytes(4, 8)


def test_dram_without_free_blocks_drops_the_victim(rig: type[Rig]) -> None:
    """While DRAM's one block is leased for an expert on its way up, no victim is copied into it."""
    r = rig(MERGED, 1, 1)
    for key in (A, B, A):
        r.fetch({key: 4})
    assert (r.vram.resident(), r.dram.resident()) == ({A: 4}, {})
    assert r.fetcher.take_counts().spilled_bytes == MERGED.bytes_at(4)


@FORMS
def test_planes_that_dram_lacks_are_read(rig: type[Rig], form: ToyForm) -> None:
    """An expert that DRAM has at level 2 and is requested at 8: one block from DRAM, d4 and d8 from disk."""
    r = rig(form, 1, 2)
    r.fetch({A: 2})
    r.fetch({B: 2})
    r.fetcher.take_counts()
    r.fetch({A: 8})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.dram_bytes, counts.dram_hits) == (disk_bytes(2, 8), 8192, 0)
    assert r.vram.resident() == {A: 8}


@pytest.mark.parametrize(("form", "level"), [(MERGED, 4), (SLICED, 2)])
def test_a_lower_level_moves_the_fewest_blocks_from_dram(rig: type[Rig], form: ToyForm, level: int) -> None:
    """Level 2 of an expert that DRAM has at 8 moves no plane above it, unless p4 is merged."""
    r = rig(form, 1, 2)
    r.fetch({A: 8})
    r.fetch({B: 2})
    r.fetcher.take_counts()
    r.fetch({A: 2})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.dram_bytes, counts.dram_hits) == (0, 8192, 1)
    assert r.vram.resident() == {A: level}
    assert r.dram.resident() == {B: 2}


def test_a_demoted_victim_is_not_copied_into_dram(rig: type[Rig]) -> None:
    """A victim demoted from 8 to 4 stays in VRAM, and DRAM evicts nothing for it."""
    r = rig(MERGED, 2, 1)
    r.fetcher.close()
    vram = PlaneTier(MERGED, {"p4": 2, "p0": 1}, LRU, device="cpu", name="vram")
    r.vram, r.fetcher = vram, OneStepFetcher(vram, r.dram, MERGED, r.reader, workers=1)
    put(r.dram, MERGED, C, 8)
    r.fetch({A: 8})
    r.fetch({B: 8})
    assert (r.vram.resident(), r.dram.resident()) == ({A: 4, B: 8}, {C: 8})


def test_a_copy_of_a_victim_that_came_back_is_dropped(rig: type[Rig]) -> None:
    """The copy of B, part of A's transfer, ends after B was read again and leased out."""
    r = rig(SLICED, 3, 4, workers=2)
    put(r.vram, SLICED, B, 2)
    put(r.vram, SLICED, D, 8)
    put(r.vram, SLICED, E, 8)
    lease = r.vram.acquire(E, 8)
    assert lease is not None
    begun, go = r.reader.delay(A)
    with r.fetcher.request({A: 2, B: 4}) as request:
        assert begun.wait(WAIT)
        arrivals = Arrivals(request)
        assert next(arrivals).key == B
        go.set()
        assert next(arrivals).key == A
    r.vram.release(lease)
    r.whole()
    assert r.vram.resident() == {A: 2, B: 4, E: 8}
    assert r.dram.resident() == {D: 8}
