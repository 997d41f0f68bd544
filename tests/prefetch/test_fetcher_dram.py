"""prefetch.fetcher with a second tier in RAM: where victims go, and what comes back without the disk."""

from __future__ import annotations

import pytest
from fetch_rig import WAIT, Rig, rigs
from toys import MERGED, SLICED, ToyForm, check, disk_bytes, put

from cache.lru import LRU
from cache.plane_tier import PlaneTier
from prefetch.fetcher import Fetcher
from storage.base import ExpertKey

A, B, C, D, E = (ExpertKey(0, e) for e in range(5))

FORMS = pytest.mark.parametrize("form", [MERGED, SLICED], ids=["merged", "sliced"])


rig = pytest.fixture(rigs)


@FORMS
def test_victims_land_in_dram(rig: type[Rig], form: ToyForm) -> None:
    """What VRAM evicts whole is in DRAM with its level and bytes, and comes back without the disk."""
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


def test_a_full_dram_forgets_its_oldest(rig: type[Rig]) -> None:
    """DRAM evicts like any tier; what it evicts is gone."""
    r = rig(MERGED, 1, 2)
    for key in (A, B, C, D):
        r.fetch({key: 8})
    assert (r.vram.resident(), r.dram.resident()) == ({D: 8}, {B: 8, C: 8})


def test_dram_keeps_as_much_of_a_victim_as_it_has_blocks_for(rig: type[Rig]) -> None:
    """Without a block for the upper planes, the lower ones are kept, and the disk gives the rest again."""
    r = rig(MERGED, 1, 1)
    r.fetcher.close()
    dram = PlaneTier(MERGED, {"p4": 2}, LRU, device="cpu", name="dram")
    r.dram, r.fetcher = dram, Fetcher(r.vram, dram, MERGED, r.reader, workers=1)
    r.fetch({A: 8})
    r.fetch({B: 8})
    counts = r.fetcher.take_counts()
    assert (r.vram.resident(), dram.resident()) == ({B: 8}, {A: 4})
    assert counts.spilled_bytes == MERGED.bytes_at(4)
    r.fetch({A: 8})
    assert r.fetcher.take_counts().ssd_bytes == disk_bytes(4, 8)


def test_dram_without_room_forgets_the_victim(rig: type[Rig]) -> None:
    """With its one block pinned by what moves up, DRAM cannot take what moves down."""
    r = rig(MERGED, 1, 1)
    for key in (A, B, A):
        r.fetch({key: 4})
    assert (r.vram.resident(), r.dram.resident()) == ({A: 4}, {})
    assert r.fetcher.take_counts().spilled_bytes == MERGED.bytes_at(4)


@FORMS
def test_dram_gives_what_it_has_and_the_disk_the_rest(rig: type[Rig], form: ToyForm) -> None:
    """An expert that DRAM has at level 2 and is asked for at 8: one block from DRAM, d4 and d8 from disk."""
    r = rig(form, 1, 2)
    r.fetch({A: 2})
    r.fetch({B: 2})
    r.fetcher.take_counts()
    r.fetch({A: 8})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.dram_bytes, counts.dram_hits) == (disk_bytes(2, 8), 8192, 0)
    assert r.vram.resident() == {A: 8}


@pytest.mark.parametrize(("form", "level"), [(MERGED, 4), (SLICED, 2)])
def test_a_lower_level_is_taken_from_dram_as_far_as_blocks_make_it(
    rig: type[Rig], form: ToyForm, level: int
) -> None:
    """Level 2 of an expert that DRAM has at 8 moves no plane above it, unless p4 is merged already."""
    r = rig(form, 1, 2)
    r.fetch({A: 8})
    r.fetch({B: 2})
    r.fetcher.take_counts()
    r.fetch({A: 2})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.dram_bytes, counts.dram_hits) == (0, 8192, 1)
    assert r.vram.resident() == {A: level}
    assert r.dram.resident() == {B: 2}


def test_who_loses_only_upper_planes_stays_up(rig: type[Rig]) -> None:
    """A victim demoted from 8 to 4 is still in VRAM, so DRAM evicts nothing for it."""
    r = rig(MERGED, 2, 1)
    r.fetcher.close()
    vram = PlaneTier(MERGED, {"p4": 2, "p0": 1}, LRU, device="cpu", name="vram")
    r.vram, r.fetcher = vram, Fetcher(vram, r.dram, MERGED, r.reader, workers=1)
    put(r.dram, MERGED, C, 8)
    r.fetch({A: 8})
    r.fetch({B: 8})
    assert (r.vram.resident(), r.dram.resident()) == ({A: 4, B: 8}, {C: 8})


def test_a_spill_that_outlives_its_victims_return_is_dropped(rig: type[Rig]) -> None:
    """B's spill, part of A's transfer, is settled after B itself was read again and handed out."""
    r = rig(SLICED, 3, 4, workers=2)
    put(r.vram, SLICED, B, 2)
    put(r.vram, SLICED, D, 8)
    put(r.vram, SLICED, E, 8)
    lease = r.vram.acquire(E, 8)
    assert lease is not None
    begun, go = r.reader.hold(A)
    with r.fetcher.stream({A: 2, B: 4}) as leases:
        assert begun.wait(WAIT)
        assert next(leases).key == B
        go.set()
        assert next(leases).key == A
    r.vram.release(lease)
    r.whole()
    assert r.vram.resident() == {A: 2, B: 4, E: 8}
    assert r.dram.resident() == {D: 8}
