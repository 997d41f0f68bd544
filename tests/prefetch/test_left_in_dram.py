"""Experts that stay in DRAM: which are left there, in what order, and what a device that reads them there counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from device_double import DoubleDevice
from device_rig import DeviceRig, crowd, turmoil
from fetch_rig import broken
from toys import SLICED, contents, expected

from prefetch.base import ExpertSource, Split
from prefetch.layer_request import LayerRequest
from storage.base import ExpertKey
from storage.errors import ChecksumMismatch

A, B, C, D = (ExpertKey(0, expert) for expert in range(4))


@pytest.fixture
def rig() -> Iterator[Callable[..., DeviceRig]]:
    """Makes rigs whose DRAM has A, B, C and D at level 4 and whose VRAM is empty; closes them after the test."""
    made: list[DeviceRig] = []

    def make(haste: float = 0.3, vram: int = 4, dram: int = 4) -> DeviceRig:
        r = DeviceRig(DoubleDevice(haste=haste), vram, dram)
        made.append(r)
        r.fetch(dict.fromkeys((A, B, C, D)[:dram], 4))
        r.fetcher.release_pins()
        for key in r.vram.resident():
            r.vram.drop(key)
        r.fetcher.take_counts()
        return r

    yield make
    for one in made:
        one.close()


def leave(r: DeviceRig, split: Split) -> None:
    """Has the requests that follow leave experts in DRAM."""
    r.fetcher.configure("full", split)


def order(r: DeviceRig, wanted: dict[ExpertKey, int]) -> list[list[tuple[ExpertKey, str]]]:
    """(expert, device of its lease) of every list of a request."""
    with r.fetcher.request(wanted) as request:
        return [[(lease.key, lease.device) for lease in leases] for leases in request]


def test_the_least_important_stay_and_come_alone(rig):
    """An expert left in DRAM has a list of its own, counts as a DRAM hit, and no byte of it is copied."""
    r = rig()
    leave(r, lambda levels: len(levels) // 2)
    came = order(r, {C: 4, A: 2, D: 4, B: 4})
    assert [group for group in came if "cpu" in dict(group).values()] == [[(D, "cpu")], [(B, "cpu")]]
    assert sorted(one for group in came for one in group if one[1] == "double") == [
        (A, "double"),
        (C, "double"),
    ]
    counts = r.fetcher.take_counts()
    assert (counts.dram_hits, counts.left_below, counts.vram_hits, counts.ssd_bytes) == (4, 2, 0, 0)
    assert counts.dram_bytes == SLICED.bytes_at(2) + SLICED.bytes_at(4)
    assert r.vram.resident() == {A: 2, C: 4}


def test_only_whole_misses_may_stay(rig):
    """A split decides on neither a hit, nor an expert partly in VRAM, nor one that DRAM has below its level."""
    r = rig()
    seen = []
    r.fetch({A: 4, B: 2})
    r.dram.drop(C, 2)

    def split(levels):
        seen.append(list(levels))
        return len(levels)

    leave(r, split)
    r.fetcher.take_counts()
    came = order(r, {A: 4, B: 4, C: 4, D: 2})
    assert seen == [[2]]
    assert [pair for together in came for pair in together if pair[1] == "cpu"] == [(D, "cpu")]
    assert r.vram.resident() == {A: 4, B: 4, C: 4}


def test_an_expert_under_way_is_not_left(rig):
    """An expert whose speculative copy is under way is not left in DRAM."""
    r = rig(haste=0)
    with r.fetcher.request({}):
        r.fetcher.read_ahead({A: 4})
    leave(r, lambda levels: len(levels))
    assert order(r, {A: 4, B: 4}) == [[(A, "double")], [(B, "cpu")]]


def test_copies_go_on_meanwhile(rig):
    """The copies of the other experts are enqueued, and not awaited, when the first list is taken."""
    r = rig(haste=0)
    leave(r, lambda levels: 1)
    with r.fetcher.request({A: 4, B: 4}) as request:
        before = r.device.batches
        copied = (
            r.fetcher._transfers.under_way[A].load._copied if A in r.fetcher._transfers.under_way else None
        )
        assert copied is not None
        assert not copied.finished
        assert [[lease.key for lease in leases] for leases in request] == [[A], [B]]
        assert r.device.batches == before


def read_in_a_crowd(r: DeviceRig) -> list[bool]:
    """Whether each lease in DRAM keeps its bytes while every block of DRAM that can be had is overwritten."""
    whole = []
    with r.fetcher.request(dict.fromkeys((A, B, C, D), 4)) as request:
        for lease in (lease for leases in request for lease in leases):
            if lease.device == "cpu":
                crowd(r.dram, 4)
                whole.append(contents(lease.blocks) == expected(SLICED, lease.key, 4))
    return whole


def test_leased_blocks_in_dram_are_not_reused(rig):
    """While an expert in DRAM is leased its blocks are not reused, and afterwards they may be."""
    r = rig()
    leave(r, lambda levels: 2)
    assert read_in_a_crowd(r) == [True, True]
    crowd(r.dram, 4)
    assert not {C, D} & r.dram.resident().keys()


def test_a_lease_released_too_early_is_found(rig, monkeypatch):
    """The test above fails where a lease in DRAM is released before its list is taken."""
    leave_in_dram, release = LayerRequest._leave_in_dram, LayerRequest._release_dram

    def hurried(request: LayerRequest, split: Split) -> None:
        leave_in_dram(request, split)
        for lease in request._in_dram:
            release(request, lease)

    r = rig()
    leave(r, lambda levels: 2)
    with monkeypatch.context() as patch:
        patch.setattr(LayerRequest, "_leave_in_dram", hurried)
        patch.setattr(LayerRequest, "_release_dram", lambda request, lease: None)
        assert not all(read_in_a_crowd(r))


def test_leaving_early_releases_the_leases(rig):
    """An error within the request, or before its first list, leaves no lease in DRAM (DeviceRig.close)."""
    r = rig()
    leave(r, lambda levels: 3)

    def leave_after(taken: int) -> None:
        with r.fetcher.request({A: 4, B: 4, C: 4, D: 4}) as request:
            for _ in range(taken):
                next(request)
            raise ArithmeticError

    for taken in range(4):
        with pytest.raises(ArithmeticError):
            leave_after(taken)
        assert all(lease.key == A for lease in r.dram._leases)  # until its copy is done
        r.vram.drop(A)


def test_a_failed_read_beside_them(rig):
    """The error of another expert's read ends the request, and no lease is left in DRAM."""
    r = rig()
    leave(r, lambda levels: len(levels))
    lost = ExpertKey(0, 5)
    r.reader.errors[lost] = broken(lost)
    with pytest.raises(ChecksumMismatch, match="expert 5"):
        r.fetch({A: 4, lost: 4, B: 4})
    assert not r.dram._leases


@pytest.mark.parametrize("threaded", [False, True], ids=["in calls", "in a thread"])
@pytest.mark.parametrize(("vram", "dram"), [(1, 3), (3, 6), (4, 12)])
def test_any_split_in_turmoil(vram, dram, threaded):
    """With any number of experts left in DRAM every lease has the bytes of its expert, and no block is lost."""
    left = 0
    for seed in range(3):
        chance = Random(seed)
        r = DeviceRig(DoubleDevice(seed, threaded=threaded), vram, dram)
        leave(r, lambda levels, chance=chance: chance.randint(0, len(levels)))
        turmoil(r, seed)
        left += r.fetcher.take_counts().left_below
        r.close()
    assert left > 0


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
    """Bytes are those of the planes that VRAM lacks; an expert that has left VRAM is marked without an error."""
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
