"""prefetch.fetcher: every expert once, hits first, however small the tiers, which stay whole."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

import pytest
from fetch_rig import WAIT, Rig, broken, rigs
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import MERGED, SLICED, ToyForm, contents, disk_bytes, expected, put

from cache.lru import LRU
from cache.plane_tier import PlaneTier
from prefetch.fetcher import Fetcher
from storage.base import ExpertKey
from storage.errors import ChecksumMismatch, DoesNotFit

A, B, C, D, E = (ExpertKey(0, e) for e in range(5))

FORMS = pytest.mark.parametrize("form", [MERGED, SLICED], ids=["merged", "sliced"])


rig = pytest.fixture(rigs)


@FORMS
@pytest.mark.parametrize("available_bytes", [1, 2, 3, 7])
def test_every_expert_comes_once(rig: type[Rig], form: ToyForm, room: int) -> None:
    """However few fit at once, all wanted are handed out, each at its level and with its own bytes."""
    r = rig(form, room)
    wanted = {ExpertKey(layer, e): (2, 4, 8)[e % 3] for layer in range(2) for e in range(3)}
    r.fetch(wanted)
    r.fetch(dict.fromkeys(wanted, 8))
    r.fetch(wanted)


def test_nothing_wanted_is_nothing_done(rig: type[Rig]) -> None:
    """An empty request is an empty stream."""
    r = rig(MERGED, 1)
    assert r.fetch({}) == []
    assert r.fetcher.take_counts().requests == 0


def test_hits_come_while_misses_are_read(rig: type[Rig]) -> None:
    """Reads begin on entry, and a read that never ends holds up no hit."""
    r = rig(MERGED, 4)
    put(r.vram, MERGED, B, 4)
    put(r.vram, MERGED, D, 4)
    begun, go = r.reader.hold(A)
    with r.fetcher.stream({A: 4, B: 4, D: 2}) as leases:
        assert begun.wait(WAIT)
        assert {next(leases).key, next(leases).key} == {B, D}
        go.set()
        assert next(leases).key == A
        assert list(leases) == []
    r.whole()


def test_arrivals_come_as_they_finish(rig: type[Rig]) -> None:
    """A slow read does not hold up a fast one that began after it."""
    r = rig(MERGED, 4)
    begun, go = r.reader.hold(A)
    with r.fetcher.stream({A: 4, B: 4, C: 4}) as leases:
        assert begun.wait(WAIT)
        assert {next(leases).key, next(leases).key} == {B, C}
        go.set()
        assert [lease.key for lease in leases] == [A]


def test_misses_are_read_in_disk_order(rig: type[Rig]) -> None:
    """One worker reads by layer and expert, whatever the order of the request."""
    r = rig(MERGED, 8, workers=1)
    keys = [ExpertKey(1, 0), ExpertKey(0, 7), ExpertKey(0, 2), ExpertKey(1, 3)]
    r.fetch(dict.fromkeys(keys, 4))
    assert r.reader.reads == [ExpertKey(0, 2), ExpertKey(0, 7), ExpertKey(1, 0), ExpertKey(1, 3)]


def test_a_lease_ends_when_the_next_is_asked_for(rig: type[Rig]) -> None:
    """With one block, the second expert is read only after the first was handed back, and then at once."""
    r = rig(MERGED, 1)
    put(r.vram, MERGED, A, 4)
    with r.fetcher.stream({A: 4, B: 4}) as leases:
        first = next(leases)
        assert (first.key, r.reader.reads, r.vram.level_of(A)) == (A, [], 4)
        assert contents(first.blocks) == expected(MERGED, A, 4)
        assert next(leases).key == B
        assert r.reader.reads == [B]
    r.whole()


def test_every_release_lets_more_be_read(rig: type[Rig]) -> None:
    """A miss that found no room beside the waiting hits begins as soon as the first of them is done with."""
    r = rig(MERGED, 2)
    put(r.vram, MERGED, A, 4)
    put(r.vram, MERGED, B, 4)
    begun, go = r.reader.hold(C)
    with r.fetcher.stream({A: 4, B: 4, C: 4}) as leases:
        assert next(leases).key == A
        assert r.reader.reads == []
        assert next(leases).key == B
        assert begun.wait(WAIT)
        go.set()
        assert next(leases).key == C
    r.whole()


def test_a_hit_is_not_evicted_by_a_miss_of_its_layer(rig: type[Rig]) -> None:
    """The oldest resident goes first, unless it is wanted: then it waits pinned."""
    r = rig(MERGED, 2)
    put(r.vram, MERGED, C, 4)
    put(r.vram, MERGED, D, 4)
    assert r.fetch({A: 4, C: 4}) == [C, A]
    assert r.reader.reads == [A]
    assert r.vram.resident() == {A: 4, C: 4}


@FORMS
@pytest.mark.parametrize("low", [2, 4])
def test_promotion_reads_what_is_missing(rig: type[Rig], form: ToyForm, low: int) -> None:
    """From a lower level only the planes above it are read."""
    r = rig(form, 2)
    r.fetch({A: low})
    r.fetcher.take_counts()
    r.fetch({A: 8})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.vram_hits, counts.requests) == (disk_bytes(low, 8), 0, 1)


@FORMS
def test_what_is_there_in_part_is_not_evicted_for_the_rest_of_its_layer(
    rig: type[Rig], form: ToyForm
) -> None:
    """D at level 2 is promoted before A and B take its place: only its upper plane is read."""
    r = rig(form, 2)
    r.fetch({D: 2, E: 2})
    r.fetcher.take_counts()
    r.fetch({A: 4, B: 4, D: 4})
    assert r.fetcher.take_counts().ssd_bytes == 2 * disk_bytes(0, 4) + disk_bytes(2, 4)


def test_promotion_in_a_tier_of_one_reads_anew(rig: type[Rig]) -> None:
    """Where the new block cannot stand beside the old one, the old one goes first."""
    r = rig(MERGED, 1)
    r.fetch({A: 2})
    r.fetcher.take_counts()
    r.fetch({A: 4})
    assert r.fetcher.take_counts().ssd_bytes == disk_bytes(0, 4)
    assert r.vram.resident() == {A: 4}


@pytest.mark.parametrize("dram", [None, 3])
def test_what_cannot_fit_at_all_is_refused(rig: type[Rig], dram: int | None) -> None:
    """A level that needs a kind the tier has no block of ends in DoesNotFit with the bytes it takes."""
    r = rig(MERGED, 1, dram)
    r.fetcher.close()
    vram = PlaneTier(MERGED, {"p4": 2}, LRU, device="cpu", name="vram")
    r.vram, r.fetcher = vram, Fetcher(vram, r.dram, MERGED, r.reader, workers=1)
    with pytest.raises(DoesNotFit, match=r"expert 0 of layer 0.*level 8") as caught:
        r.fetch({A: 8})
    assert caught.value.minimum == 8192 + 4096
    r.whole()
    r.fetch({A: 4})


def test_counts_add_up(rig: type[Rig]) -> None:
    """Requests by level, hits and bytes are those of the calls since they were last taken."""
    r = rig(SLICED, 4)
    r.fetch({A: 2, B: 4})
    r.fetch({A: 2, B: 2, C: 8})
    counts = r.fetcher.take_counts()
    assert (counts.requests, counts.vram_hits, counts.levels) == (5, 2, {2: 3, 4: 1, 8: 1})
    assert counts.ssd_bytes == disk_bytes(0, 2) + disk_bytes(0, 4) + disk_bytes(0, 8)
    assert (counts.dram_hits, counts.dram_bytes, counts.spilled_bytes) == (0, 0, 0)
    again = r.fetcher.take_counts()
    assert (again.requests, again.ssd_bytes, again.levels) == (0, 0, {})


def test_the_engine_may_run_in_any_thread(rig: type[Rig]) -> None:
    """A server's engine thread streams like the main one."""
    r = rig(MERGED, 2)
    orders = []
    thread = Thread(target=lambda: orders.append(r.fetch({A: 4, B: 4, C: 4})))
    thread.start()
    thread.join()
    assert sorted(orders[0]) == [A, B, C]


@pytest.mark.e2e
@settings(max_examples=120, deadline=None)
@given(
    form=st.sampled_from([MERGED, SLICED]),
    vram=st.integers(1, 4),
    dram=st.none() | st.integers(1, 4),
    calls=st.lists(
        st.tuples(
            st.dictionaries(
                st.builds(ExpertKey, st.integers(0, 1), st.integers(0, 4)), st.sampled_from([2, 4, 8])
            ),
            st.sampled_from(["all", "one", "failure"]),
        ),
        max_size=12,
    ),
)
def test_any_sequence_of_calls_leaves_the_tiers_whole(
    form: ToyForm, vram: int, dram: int | None, calls: list[tuple[dict[ExpertKey, int], str]]
) -> None:
    """Streams finished, left early or failed, in any order: right bytes, one tier each, no block lost."""
    r = Rig(form, vram, dram)
    try:
        for wanted, end in calls:
            if end == "all":
                r.fetch(wanted)
                continue
            if end == "failure":
                r.reader.errors = {key: broken(key) for key in list(wanted)[:1]}
            with suppress(ChecksumMismatch), r.fetcher.stream(wanted) as leases:
                for lease in leases:
                    assert contents(lease.blocks) == expected(form, lease.key, lease.level)
                    if end == "one":
                        break
            r.reader.errors = {}
            r.whole()
    finally:
        r.fetcher.close()


def test_close_waits_and_refuses_what_follows(rig: type[Rig]) -> None:
    """A closed fetcher has no threads, may be closed again, and streams nothing, not even hits."""
    r = rig(MERGED, 1)
    r.fetch({A: 4})
    r.fetcher.close()
    r.fetcher.close()
    with pytest.raises(ValueError, match="closed"), r.fetcher.stream({A: 4}):
        pass


def test_no_workers_is_refused() -> None:
    """A fetcher that could never read is an error at once."""
    with pytest.raises(ValueError, match="0 workers"):
        Rig(MERGED, 1, workers=0)
