"""Experts that a fetcher leaves in DRAM: which, in what order they come, and that nothing moves under their reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from device_double import DoubleDevice
from device_rig import DeviceRig, crowd, turmoil
from toys import SLICED, contents, expected

from prefetch.layer_request import LayerStream
from storage.base import ExpertKey
from storage.errors import ChecksumMismatch

A, B, C, D = (ExpertKey(0, expert) for expert in range(4))


@pytest.fixture
def rig() -> Iterator[Callable[..., DeviceRig]]:
    """Makes rigs whose DRAM has A, B, C and D at level 4 and whose VRAM has nothing; closes them after the test."""
    made: list[DeviceRig] = []

    def make(haste: float = 0.3, vram: int = 4, dram: int = 4) -> DeviceRig:
        r = DeviceRig(DoubleDevice(haste=haste), vram, dram)
        made.append(r)
        r.fetch(dict.fromkeys((A, B, C, D)[:dram], 4))
        r.fetcher.settle()
        for key in r.vram.resident():
            r.vram.drop(key)
        r.fetcher.take_counts()
        return r

    yield make
    for one in made:
        one.close()


def order(r: DeviceRig, wanted: dict[ExpertKey, int]) -> list[list[tuple[ExpertKey, str]]]:
    """(expert, where it lies) of what is handed out together."""
    with r.fetcher.stream(wanted) as leases:
        return [[(one.key, one.device) for one in (lease, *leases.ready())] for lease in leases]


def test_the_last_stay_and_come_alone(rig):
    """Whatever copies are done by then; what stays counts as found in DRAM, and no byte of it is copied."""
    r = rig()
    r.fetcher.split = lambda levels: len(levels) // 2
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
    """Neither a hit, nor what VRAM has a part of, nor what DRAM has not enough of is asked about."""
    r = rig()
    asked = []
    r.fetch({A: 4, B: 2})
    r.dram.drop(C, 2)

    def split(levels):
        asked.append(list(levels))
        return len(levels)

    r.fetcher.split = split
    r.fetcher.take_counts()
    came = order(r, {A: 4, B: 4, C: 4, D: 2})
    assert asked == [[2]]
    assert [pair for together in came for pair in together if pair[1] == "cpu"] == [(D, "cpu")]
    assert r.vram.resident() == {A: 4, B: 4, C: 4}


def test_a_guess_on_its_way_is_taken(rig):
    """What a guess has a device copy already is not computed elsewhere as well."""
    r = rig(haste=0)
    with r.fetcher.stream({}):
        r.fetcher.speculate({A: 4})
    r.fetcher.split = lambda levels: len(levels)
    assert order(r, {A: 4, B: 4}) == [[(A, "double")], [(B, "cpu")]]


def test_copies_go_on_meanwhile(rig):
    """When the CPU's expert is handed out, the others' copies have been enqueued, and nobody has waited for them."""
    r = rig(haste=0)
    r.fetcher.split = lambda levels: 1
    with r.fetcher.stream({A: 4, B: 4}) as leases:
        before = r.device.batches
        copied = r.fetcher._traffic.under_way[A].load._copied if A in r.fetcher._traffic.under_way else None
        assert copied is not None
        assert not copied.finished
        assert [next(leases).key, next(leases).key, next(leases, None)] == [A, B, None]
        assert r.device.batches == before


def read_in_a_crowd(r: DeviceRig) -> list[bool]:
    """For every expert handed out in DRAM: whether it is still itself when all others there have been evicted."""
    whole = []
    with r.fetcher.stream(dict.fromkeys((A, B, C, D), 4)) as leases:
        for lease in leases:
            if lease.device == "cpu":
                crowd(r.dram, 4)
                whole.append(contents(lease.blocks) == expected(SLICED, lease.key, 4))
    return whole


def test_nothing_moves_under_the_cpu(rig):
    """While an expert is computed where it lies its blocks are nobody else's, and afterwards they may be."""
    r = rig()
    r.fetcher.split = lambda levels: 2
    assert read_in_a_crowd(r) == [True, True]
    crowd(r.dram, 4)
    assert not {C, D} & r.dram.resident().keys()


def test_a_lease_given_up_too_early_is_noticed(rig, monkeypatch):
    """The test above fails where blocks are released before they are computed from."""
    leave, release = LayerStream._leave_below, LayerStream._release_below

    def hurried(stream: LayerStream) -> None:
        leave(stream)
        for lease in stream._below:
            release(stream, lease)

    r = rig()
    r.fetcher.split = lambda levels: 2
    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "_leave_below", hurried)
        patch.setattr(LayerStream, "_release_below", lambda stream, lease: None)
        assert not all(read_in_a_crowd(r))


def test_leaving_early_gives_the_leases_back(rig):
    """An error in the middle, or before, leaves nothing pinned in DRAM: closing the rig looks."""
    r = rig()
    r.fetcher.split = lambda levels: 3

    def leave_after(taken: int) -> None:
        with r.fetcher.stream({A: 4, B: 4, C: 4, D: 4}) as leases:
            for _ in range(taken):
                next(leases)
            raise ArithmeticError

    for taken in range(4):
        with pytest.raises(ArithmeticError):
            leave_after(taken)
        assert all(lease.key == A for lease in r.dram._leases)  # until its copy is done
        r.vram.drop(A)


def test_a_failed_read_beside_them(rig):
    """The error of another expert's read ends the layer, and nothing stays pinned."""
    r = rig()
    r.fetcher.split = lambda levels: len(levels)
    lost = ExpertKey(0, 5)
    r.reader.errors[lost] = ChecksumMismatch("expert 5 was wanted", "other bytes", "Convert again")
    with pytest.raises(ChecksumMismatch, match="expert 5"):
        r.fetch({A: 4, lost: 4, B: 4})
    assert not r.dram._leases


@pytest.mark.parametrize("threaded", [False, True], ids=["when asked", "in a thread"])
@pytest.mark.parametrize(("vram", "dram"), [(1, 3), (3, 6), (4, 12)])
def test_any_split_in_turmoil(vram, dram, threaded):
    """However many stay below, whoever reads an expert finds its own bytes, and nothing is lost."""
    left = 0
    for seed in range(3):
        chance = Random(seed)
        r = DeviceRig(DoubleDevice(seed, threaded=threaded), vram, dram)
        r.fetcher.split = lambda levels, chance=chance: chance.randint(0, len(levels))
        turmoil(r, seed)
        left += r.fetcher.take_counts().left_below
        r.close()
    assert left > 0
