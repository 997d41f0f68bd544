"""prefetch.fetcher: every expert comes once, hits first, in tiers of any size, which stay whole."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

import pytest
from fetch_rig import WAIT, Arrivals, Rig, broken, rigs
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import OneStepFetcher
from toys import MERGED, SLICED, ToyForm, contents, disk_bytes, expected, put

from edgemoe.cache.lru import LRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import ChecksumMismatch, DoesNotFit
from edgemoe.prefetch.base import is_scan
from edgemoe.storage.base import ExpertKey

A, B, C, D, E = (ExpertKey(0, e) for e in range(5))

FORMS = pytest.mark.parametrize("form", [MERGED, SLICED], ids=["merged", "sliced"])


rig = pytest.fixture(rigs)


@FORMS
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_expert_comes_once(rig: type[Rig], form: ToyForm, size: int) -> None:
    """In a tier of any size all wanted experts come, each at its level and with its own bytes."""
    r = rig(form, size)
    wanted = {ExpertKey(layer, e): (2, 4, 8)[e % 3] for layer in range(2) for e in range(3)}
    r.fetch(wanted)
    r.fetch(dict.fromkeys(wanted, 8))
    r.fetch(wanted)


def test_an_empty_request_reads_nothing(rig: type[Rig]) -> None:
    """A request of no experts has no lists."""
    r = rig(MERGED, 1)
    assert r.fetch({}) == []
    assert r.fetcher.take_counts().requests == 0


def test_hits_come_while_misses_are_read(rig: type[Rig]) -> None:
    """Reads begin on entry, and all hits come in the first list, before a read that has not ended."""
    r = rig(MERGED, 4)
    put(r.vram, MERGED, B, 4)
    put(r.vram, MERGED, D, 4)
    begun, go = r.reader.delay(A)
    with r.fetcher.request({A: 4, B: 4, D: 2}) as request:
        assert begun.wait(WAIT)
        assert [lease.key for lease in next(request)] == [B, D]
        go.set()
        assert [lease.key for lease in next(request)] == [A]
        assert list(request) == []
    r.whole()


def test_arrivals_come_as_they_finish(rig: type[Rig]) -> None:
    """A fast read comes before a slow one that began first."""
    r = rig(MERGED, 4)
    begun, go = r.reader.delay(A)
    with r.fetcher.request({A: 4, B: 4, C: 4}) as request:
        assert begun.wait(WAIT)
        arrivals = Arrivals(request)
        assert {next(arrivals).key, next(arrivals).key} == {B, C}
        go.set()
        assert [[lease.key for lease in leases] for leases in request] == [[A]]


def test_misses_are_read_in_disk_order(rig: type[Rig]) -> None:
    """One worker reads by layer and expert, in any order of the request."""
    r = rig(MERGED, 8, workers=1)
    keys = [ExpertKey(1, 0), ExpertKey(0, 7), ExpertKey(0, 2), ExpertKey(1, 3)]
    r.fetch(dict.fromkeys(keys, 4))
    assert r.reader.reads == [ExpertKey(0, 2), ExpertKey(0, 7), ExpertKey(1, 0), ExpertKey(1, 3)]


def test_a_lease_ends_when_the_next_list_is_taken(rig: type[Rig]) -> None:
    """With one block, the second expert is read only after the first list has ended, and then at once."""
    r = rig(MERGED, 1)
    put(r.vram, MERGED, A, 4)
    with r.fetcher.request({A: 4, B: 4}) as request:
        [first] = next(request)
        assert (first.key, r.reader.reads, r.vram.level_of(A)) == (A, [], 4)
        assert contents(first.blocks) == expected(MERGED, A, 4)
        assert [lease.key for lease in next(request)] == [B]
        assert r.reader.reads == [B]
    r.whole()


def test_the_end_of_a_list_starts_reads(rig: type[Rig]) -> None:
    """Misses for which hits leave no blocks are read as soon as the list of the hits has ended, all at once."""
    r = rig(MERGED, 2)
    put(r.vram, MERGED, A, 4)
    put(r.vram, MERGED, B, 4)
    (begun, go), (also_begun, also_go) = r.reader.delay(C), r.reader.delay(D)
    with r.fetcher.request({A: 4, B: 4, C: 4, D: 4}) as request:
        assert [lease.key for lease in next(request)] == [A, B]
        assert r.reader.reads == []
        opener = Thread(
            target=lambda: begun.wait(WAIT) and also_begun.wait(WAIT) and (go.set(), also_go.set())
        )
        opener.start()
        arrivals = Arrivals(request)
        assert {lease.key for lease in arrivals} == {C, D}
        opener.join()
    r.whole()


def test_a_hit_is_not_evicted_by_a_miss_of_its_layer(rig: type[Rig]) -> None:
    """The oldest resident is evicted first, unless the request wants it: then it is leased."""
    r = rig(MERGED, 2)
    put(r.vram, MERGED, C, 4)
    put(r.vram, MERGED, D, 4)
    assert r.fetch({A: 4, C: 4}) == [C, A]
    assert r.reader.reads == [A]
    assert r.vram.resident() == {A: 4, C: 4}


@FORMS
@pytest.mark.parametrize("low", [2, 4])
def test_promotion_reads_what_is_missing(rig: type[Rig], form: ToyForm, low: int) -> None:
    """A promotion reads only the planes above the present level."""
    r = rig(form, 2)
    r.fetch({A: low})
    r.fetcher.take_counts()
    r.fetch({A: 8})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.vram_hits, counts.requests) == (disk_bytes(low, 8), 0, 1)


@FORMS
def test_a_partly_resident_expert_is_not_evicted_by_its_layer(rig: type[Rig], form: ToyForm) -> None:
    """D at level 2 is promoted before A and B are read: only its upper plane is read."""
    r = rig(form, 2)
    r.fetch({D: 2, E: 2})
    r.fetcher.take_counts()
    r.fetch({A: 4, B: 4, D: 4})
    assert r.fetcher.take_counts().ssd_bytes == 2 * disk_bytes(0, 4) + disk_bytes(2, 4)


def test_promotion_in_a_tier_of_one_reads_anew(rig: type[Rig]) -> None:
    """Where the new block does not fit together with the old one, the old one is evicted first."""
    r = rig(MERGED, 1)
    r.fetch({A: 2})
    r.fetcher.take_counts()
    r.fetch({A: 4})
    assert r.fetcher.take_counts().ssd_bytes == disk_bytes(0, 4)
    assert r.vram.resident() == {A: 4}


@pytest.mark.parametrize("dram", [None, 3])
def test_an_expert_that_never_fits_is_refused(rig: type[Rig], dram: int | None) -> None:
    """A level that needs a kind without blocks raises DoesNotFit with the bytes of the expert."""
    r = rig(MERGED, 1, dram)
    r.fetcher.close()
    vram = PlaneTier(MERGED, {"p4": 2}, LRU, device="cpu", name="vram")
    r.vram, r.fetcher = vram, OneStepFetcher(vram, r.dram, MERGED, r.reader, workers=1)
    with pytest.raises(DoesNotFit, match=r"expert 0 of layer 0.*level 8") as caught:
        r.fetch({A: 8})
    assert caught.value.minimum == 8192 + 4096
    r.whole()
    r.fetch({A: 4})


def test_counts_add_up(rig: type[Rig]) -> None:
    """take_counts returns requests by level, hits and bytes since its last call."""
    r = rig(SLICED, 4)
    r.fetch({A: 2, B: 4})
    r.fetch({A: 2, B: 2, C: 8})
    counts = r.fetcher.take_counts()
    assert (counts.requests, counts.vram_hits, counts.levels) == (5, 2, {2: 3, 4: 1, 8: 1})
    assert counts.ssd_bytes == disk_bytes(0, 2) + disk_bytes(0, 4) + disk_bytes(0, 8)
    assert (counts.dram_hits, counts.dram_bytes, counts.spilled_bytes) == (0, 0, 0)
    again = r.fetcher.take_counts()
    assert (again.requests, again.ssd_bytes, again.levels) == (0, 0, {})


def test_any_thread_may_use_a_source(rig: type[Rig]) -> None:
    """A request outside of the main thread, as a server makes it, brings every expert."""
    r = rig(MERGED, 2)
    orders = []
    thread = Thread(target=lambda: orders.append(r.fetch({A: 4, B: 4, C: 4})))
    thread.start()
    thread.join()
    assert sorted(orders[0]) == [A, B, C]


@pytest.mark.e2e
@settings(max_examples=48)
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
    """Requests that end, are left early or fail, in any order: right bytes, one tier each, no block lost."""
    r = Rig(form, vram, dram)
    try:
        for wanted, end in calls:
            if end == "all":
                r.fetch(wanted)
                continue
            if end == "failure":
                r.reader.errors = {key: broken(key) for key in list(wanted)[:1]}
            with suppress(ChecksumMismatch), r.fetcher.request(wanted) as request:
                for leases in request:
                    for lease in leases:
                        assert contents(lease.blocks) == expected(form, lease.key, lease.level)
                    if end == "one":
                        break
            r.reader.errors = {}
            r.whole()
    finally:
        r.fetcher.close()


def test_a_closed_fetcher_refuses_requests(rig: type[Rig]) -> None:
    """A closed fetcher has no threads, may be closed again, and gives no lease, not even on a hit."""
    r = rig(MERGED, 1)
    r.fetch({A: 4})
    r.fetcher.close()
    r.fetcher.close()
    with pytest.raises(ValueError, match="closed"), r.fetcher.request({A: 4}):
        pass


def test_no_workers_is_refused() -> None:
    """A fetcher without workers is an error."""
    with pytest.raises(ValueError, match="at least 1 worker, got 0"):
        Rig(MERGED, 1, workers=0)


def test_configure_refuses_an_unknown_mode(rig: type[Rig]) -> None:
    """The message names the mode, and the mode before stays."""
    r = rig(MERGED, 1, look_ahead="full")
    with pytest.raises(ValueError, match="'most'"):
        r.fetcher.configure("most")
    assert r.fetcher.looks_ahead


def test_scan_wants_more_than_half_of_a_layer() -> None:
    """A prompt that wants 5 of 8 experts scans, one that wants 4 does not."""
    assert [wanted for wanted in range(9) if is_scan(wanted, 8)] == [5, 6, 7, 8]
