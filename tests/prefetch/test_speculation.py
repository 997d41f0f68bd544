"""prefetch.speculation: guesses are read behind demands, and used, cancelled or wasted; never in the way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from fetch_rig import WAIT, Rig, after, rigs
from prefetch.transfer import Transfer
from toys import MERGED, SLICED, ToyForm, contents, disk_bytes, expected, put

from cache.lru import LRU
from cache.plane_tier import PlaneTier
from prefetch.fetcher import Fetcher
from storage.base import ExpertKey

A, B, C = (ExpertKey(0, e) for e in range(3))
W, X, Y, Z = (ExpertKey(1, e) for e in range(4))
P, Q = (ExpertKey(2, e) for e in range(2))

FORMS = pytest.mark.parametrize("form", [MERGED, SLICED], ids=["merged", "sliced"])

rig = pytest.fixture(rigs)


@FORMS
@pytest.mark.parametrize("dram", [None, 4])
def test_what_was_read_ahead_is_a_hit(rig: type[Rig], form: ToyForm, dram: int | None) -> None:
    """A right guess that has arrived is handed out without a read, and counted as hidden, whole."""
    r = rig(form, 4, dram, speculate="full")
    r.guess({X: 4, Y: 8}, during={A: 4})
    r.landed(X, Y)
    r.fetcher.take_counts()
    assert r.fetch({X: 4, Y: 8}) == [X, Y]
    counts = r.fetcher.take_counts()
    assert sorted(r.reader.reads) == [A, X, Y]
    assert (counts.vram_hits, counts.speculated_used) == (2, 2)
    assert (counts.hidden_bytes, counts.wasted_bytes) == (disk_bytes(0, 4) + disk_bytes(0, 8), 0)


def test_a_guess_on_its_way_is_waited_for(rig: type[Rig]) -> None:
    """The demand for an expert that is being read ahead does not read it again."""
    r = rig(MERGED, 4, speculate="full")
    begun, go = r.reader.hold(X)
    r.guess({X: 4})
    assert begun.wait(WAIT)
    with r.fetcher.stream({W: 4, X: 4}) as leases:
        assert next(leases).key == W
        go.set()
        lease = next(leases)
        assert (lease.key, contents(lease.blocks)) == (X, expected(MERGED, X, 4))
    r.whole()
    assert r.reader.reads == [X, W]
    assert r.fetcher.take_counts().vram_hits == 0


def test_a_guess_that_comes_true_before_it_begins_is_raised(rig: type[Rig]) -> None:
    """With X under way: Y is refuted and never read; Z, which was behind it, is now before the next demand."""
    r = rig(MERGED, 6, workers=1, speculate="full")
    begun, go = r.reader.hold(X)
    r.guess({X: 4, Y: 4, Z: 4})
    assert begun.wait(WAIT)
    with r.fetcher.stream({W: 4, Z: 4}) as leases:
        r.clock.now = 1.0
        go.set()
        assert {lease.key for lease in leases} == {W, Z}
    r.whole()
    assert r.reader.reads == [X, Z, W]
    counts = r.fetcher.take_counts()
    assert (counts.speculated, counts.speculated_used, counts.speculated_cancelled) == (3, 1, 1)
    assert counts.hidden_bytes == 0
    assert counts.wasted_bytes == disk_bytes(0, 4)


def on_demand(patch: pytest.MonkeyPatch, r: Rig, then: Callable[[], object]) -> None:
    """Calls `then` whenever a demand has just been queued."""
    submit = r.fetcher._traffic.workers.submit

    def both(transfer: Transfer, *, ahead: bool = False) -> None:
        submit(transfer, ahead=ahead)
        if not ahead:
            then()

    patch.setattr(r.fetcher._traffic.workers, "submit", both)


def test_demand_overtakes_guesses(rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that becomes necessary while guesses are queued goes before all that have not begun."""
    r = rig(MERGED, 6, workers=1, speculate="full")
    begun, go = r.reader.hold(X)
    r.guess({X: 2})
    assert begun.wait(WAIT)
    with r.fetcher.stream({X: 4}) as leases:
        _, go_p = r.reader.hold(P)
        r.fetcher.speculate({P: 4, Q: 4})
        # What X lacks is demanded once X has arrived at 2, while the worker is at P; then P may end.
        on_demand(monkeypatch, r, go_p.set)
        go.set()
        assert next(leases).key == X
    r.landed(P, Q)
    assert r.reader.reads == [X, P, X, Q]
    r.fetcher.settle()
    r.whole()


def test_a_refuted_guess_under_way_arrives_in_peace(rig: type[Rig]) -> None:
    """Nobody waits for it; it becomes a resident like any other, and its bytes are counted as wasted."""
    r = rig(MERGED, 3, speculate="full")
    begun, go = r.reader.hold(X)
    r.guess({X: 4})
    assert begun.wait(WAIT)
    with r.fetcher.stream({W: 4}) as leases:
        assert [lease.key for lease in leases] == [W]
    go.set()
    r.landed(X)
    assert r.fetch({W: 4}) == [W]
    assert r.vram.resident() == {W: 4, X: 4}
    counts = r.fetcher.take_counts()
    assert (counts.hidden_bytes, counts.wasted_bytes, counts.speculated_used) == (0, disk_bytes(0, 4), 0)


def test_what_is_resident_is_predicted_for_free(rig: type[Rig]) -> None:
    """It counts for recall and precision, and moves no byte."""
    r = rig(MERGED, 4, speculate="full")
    put(r.vram, MERGED, X, 4)
    put(r.vram, MERGED, Y, 8)
    r.guess({X: 4, Y: 4})
    r.fetch({X: 4, Z: 4})
    counts = r.fetcher.take_counts()
    assert (counts.speculated, counts.ssd_bytes) == (0, disk_bytes(0, 4))
    layer = counts.lookahead[1]
    assert (layer.predicted, layer.wanted, layer.right) == (2, 2, 1)
    assert (layer.recall, layer.precision) == (0.5, 0.5)


def test_a_guess_evicts_neither_the_layer_nor_another_guess(rig: type[Rig]) -> None:
    """X is the oldest and A is in use: the read of Y takes the room of B, and Z finds none until A is done with."""
    r = rig(MERGED, 3, speculate="full")
    for key in (X, B, A):
        put(r.vram, MERGED, key, 4)
    with r.fetcher.stream({A: 4}) as leases:
        r.fetcher.speculate({X: 4, Y: 4, Z: 4})
        assert r.vram.resident().keys() == {A, X}
        assert next(leases).key == A
        assert r.vram.level_of(A) == 4
        assert list(leases) == []
        assert r.vram.level_of(A) == 0
    r.landed(Y, Z)
    assert r.fetch({X: 4, Y: 4, Z: 4}) == [X, Y, Z]


def test_a_tier_without_room_to_spare_gets_no_guess(rig: type[Rig]) -> None:
    """While demands of the layer wait for room, no guess takes any."""
    r = rig(MERGED, 1, speculate="full")
    with r.fetcher.stream({A: 4, B: 4}) as leases:
        r.fetcher.speculate({X: 4})
        assert next(leases).key == A
        assert next(leases).key == B
        assert set(r.reader.reads) == {A, B}
        assert list(leases) == []
    r.landed(X)
    assert r.fetch({X: 4}) == [X]
    assert r.reader.reads == [A, B, X]


def test_a_waiting_demand_keeps_guesses_out(rig: type[Rig]) -> None:
    """B waits for the block of d8 that A has: no guess takes the other block that B needs as well."""
    r = rig(MERGED, 1)
    r.fetcher.close()
    r.vram = PlaneTier(MERGED, {"p4": 2, "p0": 1}, LRU, device="cpu", name="vram")
    r.fetcher = Fetcher(r.vram, None, MERGED, r.reader, workers=1, speculate="full")
    put(r.vram, MERGED, A, 8)
    with r.fetcher.stream({A: 8, B: 8}) as leases:
        r.fetcher.speculate({X: 4})
        assert next(leases).key == A
        assert r.fetcher.take_counts().speculated == 0
        assert next(leases).key == B
        assert list(leases) == []
        assert r.fetcher.take_counts().speculated == 1


@pytest.mark.parametrize("available_bytes", [4, 3, 2])
def test_a_demand_takes_room_back(rig: type[Rig], monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """X needs a second block for its promotion: that of a guess not begun, or else of one that is only pinned."""
    r = rig(MERGED, room, workers=1, speculate="full")
    put(r.vram, MERGED, P, 4)
    begun, go = r.reader.hold(X)
    r.guess({X: 2})
    assert begun.wait(WAIT)
    with r.fetcher.stream({X: 4}) as leases:
        begun_q, go_q = r.reader.hold(Q)
        r.fetcher.speculate({P: 4, Q: 4, ExpertKey(2, 2): 4})
        on_demand(monkeypatch, r, go_q.set)
        after(monkeypatch, r.vram, "publish", lambda: room > 2 and begun_q.wait(WAIT))
        go.set()
        lease = next(leases)
        assert (lease.key, lease.level) == (X, 4)
        assert (r.vram.level_of(P) == 4) == (room == 4)
        assert r.fetcher.take_counts().speculated_cancelled == (room == 4)
    r.fetcher.settle()
    r.whole()
    assert r.reader.reads[:3] == ([X, Q, X] if room > 2 else [X, X])


def test_a_demand_waits_for_a_guess_that_has_begun(rig: type[Rig]) -> None:
    """The tier's only block is being filled with a wrong guess: the demand takes it once that is done."""
    r = rig(MERGED, 1, workers=1, speculate="full")
    begun, go = r.reader.hold(X)
    r.guess({X: 4})
    assert begun.wait(WAIT)
    with r.fetcher.stream({W: 4}) as leases:
        assert r.reader.reads == [X]
        go.set()
        assert next(leases).key == W
    r.whole()


def test_read_ahead_and_lost_again_is_wasted(rig: type[Rig]) -> None:
    """P arrived, its room was taken back by a demand, and then it was wanted: read twice, counted once each."""
    r = rig(MERGED, 2, workers=2, speculate="full")
    begun, go = r.reader.hold(X)
    r.guess({X: 2})
    assert begun.wait(WAIT)
    with r.fetcher.stream({X: 4}) as leases:
        r.fetcher.speculate({P: 4})
        r.landed(P)
        r.fetcher.speculate({})
        assert r.vram.level_of(P) == 4
        go.set()
        assert next(leases).key == X
        assert r.vram.level_of(P) == 0
    r.fetch({P: 4})
    counts = r.fetcher.take_counts()
    assert counts.lookahead[2].wasted_bytes == disk_bytes(0, 4)
    assert counts.lookahead[2].hidden_bytes == 0
    assert counts.ssd_bytes == r.reader.bytes == disk_bytes(0, 4) * 3


@FORMS
def test_base_reads_the_base_plane_only(rig: type[Rig], form: ToyForm) -> None:
    """Whatever is predicted, 2 bits are read ahead; what is wanted beyond them is read when it is wanted."""
    r = rig(form, 4, speculate="base")
    r.guess({X: 4, Y: 8, Z: 2})
    r.landed(X, Y, Z)
    assert r.reader.bytes == 3 * disk_bytes(0, 2)
    r.fetch({X: 4})
    assert r.reader.bytes == 3 * disk_bytes(0, 2) + disk_bytes(2, 4)
    counts = r.fetcher.take_counts()
    assert (counts.hidden_bytes, counts.wasted_bytes) == (disk_bytes(0, 2), 2 * disk_bytes(0, 2))


@FORMS
def test_a_guess_below_what_is_wanted_is_promoted(rig: type[Rig], form: ToyForm) -> None:
    """Under way at 2 and wanted at 8: it is waited for, and only d4 and d8 are read then."""
    r = rig(form, 4, speculate="base")
    begun, go = r.reader.hold(X)
    r.guess({X: 8})
    assert begun.wait(WAIT)
    with r.fetcher.stream({W: 4, X: 8}) as leases:
        assert next(leases).key == W
        go.set()
        lease = next(leases)
        assert contents(lease.blocks) == expected(form, X, 8)
    assert r.reader.bytes == disk_bytes(0, 4) + disk_bytes(0, 8)


def test_a_guess_below_what_is_wanted_that_has_not_begun_is_read_in_one(rig: type[Rig]) -> None:
    """Queued at 2 and wanted at 8: one read of all planes instead of two."""
    r = rig(MERGED, 4, workers=1, speculate="base")
    begun, go = r.reader.hold(X)
    r.guess({X: 8, Y: 8})
    assert begun.wait(WAIT)
    with r.fetcher.stream({Y: 8}) as leases:
        go.set()
        assert next(leases).level == 8
    assert r.reader.reads == [X, Y]


@FORMS
def test_a_promotion_is_guessed_too(rig: type[Rig], form: ToyForm) -> None:
    """What is resident at 2 and predicted at 4 has d4 read ahead; wanted at 2 only, it is a hit meanwhile."""
    r = rig(form, 3, speculate="full")
    put(r.vram, form, X, 2)
    begun, go = r.reader.hold(X)
    r.guess({X: 4})
    assert begun.wait(WAIT)
    with r.fetcher.stream({X: 2}) as leases:
        lease = next(leases)
        assert (lease.key, lease.level, contents(lease.blocks)) == (X, 2, expected(form, X, 2))
        go.set()
    r.landed(X)
    r.fetch({X: 4})
    assert r.reader.bytes == disk_bytes(2, 4)


def test_when_nothing_may_be_guessed(rig: type[Rig]) -> None:
    """Off, nothing is read; outside of a stream it is an error; so is settling within one."""
    r = rig(MERGED, 4)
    assert not r.fetcher.looks_ahead
    r.guess({X: 4}, during={A: 4})
    assert r.reader.reads == [A]
    with pytest.raises(ValueError, match="no stream"):
        r.fetcher.speculate({X: 4})
    with r.fetcher.stream({A: 4}), pytest.raises(ValueError, match="a stream is open"):
        r.fetcher.settle()
    r.fetcher.mode = "full"
    assert r.fetcher.looks_ahead
    r.guess({X: 4})
    r.landed(X)
    assert r.reader.reads == [A, X]


def test_an_unknown_mode_is_refused(rig: type[Rig]) -> None:
    """At the start, without leaving threads behind, and later."""
    with pytest.raises(ValueError, match="'some'"):
        Rig(MERGED, 1, speculate="some")
    with pytest.raises(ValueError, match="'most'"):
        rig(MERGED, 1).fetcher.mode = "most"


def test_few_guesses_are_under_way_at_once(rig: type[Rig]) -> None:
    """A long guess does not empty the cache at once: it goes on, best first, as its transfers arrive."""
    r = rig(MERGED, 40, workers=1, speculate="full")
    keys = [ExpertKey(1, e) for e in range(12)]
    begun, go = r.reader.hold(keys[0])
    with r.fetcher.stream({}):
        r.fetcher.speculate(dict.fromkeys(keys, 4))
        assert begun.wait(WAIT)
        assert r.fetcher.take_counts().speculated == 4
        go.set()
        while len(r.reader.reads) < len(keys):
            r.landed(*r.fetcher._traffic.under_way)
            r.fetcher.speculate({})
    assert r.reader.reads == keys
    r.landed(*keys)
    assert r.fetch(dict.fromkeys(keys, 4)) == keys


def test_dram_is_looked_at_first(rig: type[Rig]) -> None:
    """A predicted expert that DRAM has comes up without the disk, and is in one tier only."""
    r = rig(MERGED, 1, 2, speculate="full")
    r.fetch({X: 4})
    r.fetch({A: 4})
    assert r.dram.resident() == {X: 4}
    r.guess({X: 4})
    r.landed(X)
    r.fetch({X: 4})
    assert (r.vram.resident(), r.dram.resident()) == ({X: 4}, {A: 4})
    assert r.reader.reads == [X, A]
    counts = r.fetcher.take_counts()
    assert (counts.dram_bytes, counts.dram_hits, counts.speculated_used) == (MERGED.bytes_at(4), 0, 1)


def test_dram_is_no_hit_for_what_it_has_in_part(rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess that brings level 2 from DRAM, overtaken by the demand for level 4: d4 is read, so DRAM has not hit."""
    r = rig(SLICED, 1, 2, speculate="full")
    r.fetch({X: 2})
    r.fetch({A: 4})
    assert r.dram.resident() == {X: 2}
    r.fetcher.take_counts()
    begun, go, run = threading.Event(), threading.Event(), Transfer.run

    def held(transfer: Transfer, *arguments: object) -> None:
        begun.set()
        assert go.wait(WAIT)
        run(transfer, *arguments)

    monkeypatch.setattr(Transfer, "run", held)
    r.guess({X: 2})
    assert begun.wait(WAIT)
    with r.fetcher.stream({X: 4}) as leases:
        go.set()
        assert [lease.level for lease in leases] == [4]
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.dram_hits, counts.vram_hits) == (disk_bytes(2, 4), 0, 0)
