"""prefetch.speculation: speculative reads wait for demands, and end as used, cancelled or wasted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from fetch_rig import WAIT, Arrivals, Rig, after, rigs
from one_step import OneStepFetcher
from toys import MERGED, SLICED, ToyForm, contents, disk_bytes, expected, put

from edgemoe.cache.lru import LRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.prefetch.transfers import Transfer
from edgemoe.storage.base import ExpertKey

A, B, C = (ExpertKey(0, e) for e in range(3))
W, X, Y, Z = (ExpertKey(1, e) for e in range(4))
P, Q = (ExpertKey(2, e) for e in range(2))

FORMS = pytest.mark.parametrize("form", [MERGED, SLICED], ids=["merged", "sliced"])

rig = pytest.fixture(rigs)


@FORMS
@pytest.mark.parametrize("dram", [None, 4])
def test_an_expert_read_ahead_is_a_hit(rig: type[Rig], form: ToyForm, dram: int | None) -> None:
    """A predicted expert that has arrived is leased without a read, and all its bytes count as hidden."""
    r = rig(form, 4, dram, look_ahead="full")
    r.predict({X: 4, Y: 8}, during={A: 4})
    r.landed(X, Y)
    r.fetcher.take_counts()
    assert r.fetch({X: 4, Y: 8}) == [X, Y]
    counts = r.fetcher.take_counts()
    assert sorted(r.reader.reads) == [A, X, Y]
    assert (counts.vram_hits, counts.speculated_used) == (2, 2)
    assert (counts.hidden_bytes, counts.wasted_bytes) == (disk_bytes(0, 4) + disk_bytes(0, 8), 0)


def test_a_read_ahead_under_way_is_awaited(rig: type[Rig]) -> None:
    """The demand for an expert whose read has begun does not read it again."""
    r = rig(MERGED, 4, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.predict({X: 4})
    assert begun.wait(WAIT)
    with r.fetcher.request({W: 4, X: 4}) as request:
        assert [lease.key for lease in next(request)] == [W]
        go.set()
        [lease] = next(request)
        assert (lease.key, contents(lease.blocks)) == (X, expected(MERGED, X, 4))
    r.whole()
    assert r.reader.reads == [X, W]
    assert r.fetcher.take_counts().vram_hits == 0


def test_a_right_prediction_becomes_a_demand(rig: type[Rig]) -> None:
    """With X under way: Y is wrong and never read; Z, which waited after Y, is read before the next demand."""
    r = rig(MERGED, 6, workers=1, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.predict({X: 4, Y: 4, Z: 4})
    assert begun.wait(WAIT)
    with r.fetcher.request({W: 4, Z: 4}) as request:
        r.clock.now = 1.0
        go.set()
        assert {lease.key for leases in request for lease in leases} == {W, Z}
    r.whole()
    assert r.reader.reads == [X, Z, W]
    counts = r.fetcher.take_counts()
    assert (counts.speculated, counts.speculated_used, counts.speculated_cancelled) == (3, 1, 1)
    assert counts.hidden_bytes == 0
    assert counts.wasted_bytes == disk_bytes(0, 4)


def on_demand(patch: pytest.MonkeyPatch, r: Rig, then: Callable[[], object]) -> None:
    """Calls `then` after every demand that is queued."""
    submit = r.fetcher.transfers.workers.submit

    def both(transfer: Transfer, *, ahead: bool = False) -> None:
        submit(transfer, ahead=ahead)
        if not ahead:
            then()

    patch.setattr(r.fetcher.transfers.workers, "submit", both)


def test_demands_overtake_reads_ahead(rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A demand that follows reads ahead runs before all of them that have not begun."""
    r = rig(MERGED, 6, workers=1, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.predict({X: 2})
    assert begun.wait(WAIT)
    with r.fetcher.request({X: 4}) as request:
        _, go_p = r.reader.delay(P)
        r.fetcher.read_ahead({P: 4, Q: 4})
        # The missing planes of X are demanded once X has arrived at 2, while the worker reads P; then P may end.
        on_demand(monkeypatch, r, go_p.set)
        go.set()
        assert [lease.key for lease in next(request)] == [X]
    r.landed(P, Q)
    assert r.reader.reads == [X, P, X, Q]
    r.fetcher.release_pins()
    r.whole()


def test_a_demand_again_and_a_read_ahead_arrive_together(rig: type[Rig]) -> None:
    """X came at 2 and is demanded again at 4, while P of the next layer is done as well: both arrive once."""
    r = rig(MERGED, 4, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.predict({X: 2})
    assert begun.wait(WAIT)
    with r.fetcher.request({X: 4}) as request:
        r.fetcher.read_ahead({P: 4})
        go.set()
        r.landed(X, P)
        assert [lease.key for lease in next(request)] == [X]
    assert r.fetch({P: 4}) == [P]
    assert r.reader.bytes == 2 * disk_bytes(0, 4)


def test_a_wrong_read_under_way_arrives(rig: type[Rig]) -> None:
    """No request waits for it; its expert becomes resident, and its bytes count as wasted."""
    r = rig(MERGED, 3, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.predict({X: 4})
    assert begun.wait(WAIT)
    with r.fetcher.request({W: 4}) as request:
        assert [lease.key for leases in request for lease in leases] == [W]
    go.set()
    r.landed(X)
    assert r.fetch({W: 4}) == [W]
    assert r.vram.resident() == {W: 4, X: 4}
    counts = r.fetcher.take_counts()
    assert (counts.hidden_bytes, counts.wasted_bytes, counts.speculated_used) == (0, disk_bytes(0, 4), 0)


def test_a_resident_expert_is_predicted_without_a_read(rig: type[Rig]) -> None:
    """It counts in recall and precision, and moves no byte."""
    r = rig(MERGED, 4, look_ahead="full")
    put(r.vram, MERGED, X, 4)
    put(r.vram, MERGED, Y, 8)
    r.predict({X: 4, Y: 4})
    r.fetch({X: 4, Z: 4})
    counts = r.fetcher.take_counts()
    assert (counts.speculated, counts.ssd_bytes) == (0, disk_bytes(0, 4))
    layer = counts.lookahead[1]
    assert (layer.predicted, layer.wanted, layer.right) == (2, 2, 1)
    assert (layer.recall, layer.precision) == (0.5, 0.5)


def test_a_read_ahead_evicts_neither_the_layer_nor_the_prediction(rig: type[Rig]) -> None:
    """X is the oldest and A is leased: the read of Y evicts B, and the read of Z waits until A is released."""
    r = rig(MERGED, 3, look_ahead="full")
    for key in (X, B, A):
        put(r.vram, MERGED, key, 4)
    with r.fetcher.request({A: 4}) as request:
        r.fetcher.read_ahead({X: 4, Y: 4, Z: 4})
        assert r.vram.resident().keys() == {A, X}
        assert [lease.key for lease in next(request)] == [A]
        assert r.vram.level_of(A) == 4
        assert list(request) == []
        assert r.vram.level_of(A) == 0
    r.landed(Y, Z)
    assert r.fetch({X: 4, Y: 4, Z: 4}) == [X, Y, Z]


def test_a_full_tier_reads_nothing_ahead(rig: type[Rig]) -> None:
    """While demands wait for blocks, no speculative read takes any."""
    r = rig(MERGED, 1, look_ahead="full")
    with r.fetcher.request({A: 4, B: 4}) as request:
        r.fetcher.read_ahead({X: 4})
        arrivals = Arrivals(request)
        assert next(arrivals).key == A
        assert next(arrivals).key == B
        assert set(r.reader.reads) == {A, B}
        assert list(arrivals) == []
    r.landed(X)
    assert r.fetch({X: 4}) == [X]
    assert r.reader.reads == [A, B, X]


def test_a_waiting_demand_keeps_its_blocks(rig: type[Rig]) -> None:
    """B waits for the p0 block that A has: no speculative read takes the p4 block that B needs as well."""
    r = rig(MERGED, 1)
    r.fetcher.close()
    r.vram = PlaneTier(MERGED, {"p4": 2, "p0": 1}, LRU, device="cpu", name="vram")
    r.fetcher = OneStepFetcher(r.vram, None, MERGED, r.reader, workers=1)
    r.fetcher.configure("full")
    put(r.vram, MERGED, A, 8)
    with r.fetcher.request({A: 8, B: 8}) as request:
        r.fetcher.read_ahead({X: 4})
        assert [lease.key for lease in next(request)] == [A]
        assert r.fetcher.take_counts().speculated == 0
        assert [lease.key for lease in next(request)] == [B]
        assert list(request) == []
        assert r.fetcher.take_counts().speculated == 1


@pytest.mark.parametrize("size", [4, 3, 2])
def test_a_demand_takes_blocks_of_a_prediction(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """X needs a second block for its promotion: of a read ahead that has not begun, or else of a leased expert."""
    r = rig(MERGED, size, workers=1, look_ahead="full")
    put(r.vram, MERGED, P, 4)
    begun, go = r.reader.delay(X)
    r.predict({X: 2})
    assert begun.wait(WAIT)
    with r.fetcher.request({X: 4}) as request:
        begun_q, go_q = r.reader.delay(Q)
        r.fetcher.read_ahead({P: 4, Q: 4, ExpertKey(2, 2): 4})
        on_demand(monkeypatch, r, go_q.set)
        after(monkeypatch, r.vram, "publish", lambda: size > 2 and begun_q.wait(WAIT))
        go.set()
        [lease] = next(request)
        assert (lease.key, lease.level) == (X, 4)
        assert (r.vram.level_of(P) == 4) == (size == 4)
        assert r.fetcher.take_counts().speculated_cancelled == (size == 4)
    r.fetcher.release_pins()
    r.whole()
    assert r.reader.reads[:3] == ([X, Q, X] if size > 2 else [X, X])


def test_a_demand_waits_for_a_read_that_has_begun(rig: type[Rig]) -> None:
    """A wrong read fills the tier's only block: the demand takes the block once that read has ended."""
    r = rig(MERGED, 1, workers=1, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.predict({X: 4})
    assert begun.wait(WAIT)
    with r.fetcher.request({W: 4}) as request:
        assert r.reader.reads == [X]
        go.set()
        assert [lease.key for lease in next(request)] == [W]
    r.whole()


def test_an_expert_read_ahead_and_evicted_is_wasted(rig: type[Rig]) -> None:
    """P arrived, a demand evicted it, and then it was wanted: read twice, each time counted once."""
    r = rig(MERGED, 2, workers=2, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.predict({X: 2})
    assert begun.wait(WAIT)
    with r.fetcher.request({X: 4}) as request:
        r.fetcher.read_ahead({P: 4})
        r.landed(P)
        r.fetcher.read_ahead({})
        assert r.vram.level_of(P) == 4
        go.set()
        assert [lease.key for lease in next(request)] == [X]
        assert r.vram.level_of(P) == 0
    r.fetch({P: 4})
    counts = r.fetcher.take_counts()
    assert counts.lookahead[2].wasted_bytes == disk_bytes(0, 4)
    assert counts.lookahead[2].hidden_bytes == 0
    assert counts.ssd_bytes == r.reader.bytes == disk_bytes(0, 4) * 3


@FORMS
def test_base_reads_the_base_plane_only(rig: type[Rig], form: ToyForm) -> None:
    """Base mode reads 2 bits of any predicted level ahead; planes above them are read on demand."""
    r = rig(form, 4, look_ahead="base")
    r.predict({X: 4, Y: 8, Z: 2})
    r.landed(X, Y, Z)
    assert r.reader.bytes == 3 * disk_bytes(0, 2)
    r.fetch({X: 4})
    assert r.reader.bytes == 3 * disk_bytes(0, 2) + disk_bytes(2, 4)
    counts = r.fetcher.take_counts()
    assert (counts.hidden_bytes, counts.wasted_bytes) == (disk_bytes(0, 2), 2 * disk_bytes(0, 2))


@FORMS
def test_a_read_below_the_wanted_level_is_promoted(rig: type[Rig], form: ToyForm) -> None:
    """An expert under way at 2 and wanted at 8 is awaited, and only d4 and d8 are read then."""
    r = rig(form, 4, look_ahead="base")
    begun, go = r.reader.delay(X)
    r.predict({X: 8})
    assert begun.wait(WAIT)
    with r.fetcher.request({W: 4, X: 8}) as request:
        assert [lease.key for lease in next(request)] == [W]
        go.set()
        [lease] = next(request)
        assert contents(lease.blocks) == expected(form, X, 8)
    assert r.reader.bytes == disk_bytes(0, 4) + disk_bytes(0, 8)


def test_a_queued_read_below_the_wanted_level_is_replaced(rig: type[Rig]) -> None:
    """An expert queued at 2 and wanted at 8 is read once, with all planes."""
    r = rig(MERGED, 4, workers=1, look_ahead="base")
    begun, go = r.reader.delay(X)
    r.predict({X: 8, Y: 8})
    assert begun.wait(WAIT)
    with r.fetcher.request({Y: 8}) as request:
        go.set()
        assert [lease.level for lease in next(request)] == [8]
    assert r.reader.reads == [X, Y]


@FORMS
def test_a_promotion_is_read_ahead(rig: type[Rig], form: ToyForm) -> None:
    """An expert resident at 2 and predicted at 4 has d4 read ahead; a request at 2 is a hit meanwhile."""
    r = rig(form, 3, look_ahead="full")
    put(r.vram, form, X, 2)
    begun, go = r.reader.delay(X)
    r.predict({X: 4})
    assert begun.wait(WAIT)
    with r.fetcher.request({X: 2}) as request:
        [lease] = next(request)
        assert (lease.key, lease.level, contents(lease.blocks)) == (X, 2, expected(form, X, 2))
        go.set()
    r.landed(X)
    r.fetch({X: 4})
    assert r.reader.bytes == disk_bytes(2, 4)


def test_when_nothing_is_read_ahead(rig: type[Rig]) -> None:
    """Mode off reads nothing; read_ahead outside of a request is an error, and release_pins within one."""
    r = rig(MERGED, 4)
    assert not r.fetcher.looks_ahead
    r.predict({X: 4}, during={A: 4})
    assert r.reader.reads == [A]
    with pytest.raises(ValueError, match="an open request to read ahead in, got none"):
        r.fetcher.read_ahead({X: 4})
    with r.fetcher.request({A: 4}), pytest.raises(ValueError, match="no open request, got one"):
        r.fetcher.release_pins()
    r.fetcher.configure("full")
    assert r.fetcher.looks_ahead
    r.predict({X: 4})
    r.landed(X)
    assert r.reader.reads == [A, X]


def test_an_unknown_mode_is_refused(rig: type[Rig]) -> None:
    """configure refuses it."""
    with pytest.raises(ValueError, match="'most'"):
        rig(MERGED, 1).fetcher.configure("most")


def test_few_reads_ahead_are_under_way_at_once(rig: type[Rig]) -> None:
    """A long prediction is read a few experts at a time, the likeliest first, as its transfers arrive."""
    r = rig(MERGED, 40, workers=1, look_ahead="full")
    keys = [ExpertKey(1, e) for e in range(12)]
    begun, go = r.reader.delay(keys[0])
    with r.fetcher.request({}):
        r.fetcher.read_ahead(dict.fromkeys(keys, 4))
        assert begun.wait(WAIT)
        assert r.fetcher.take_counts().speculated == 4
        go.set()
        while len(r.reader.reads) < len(keys):
            r.landed(*r.fetcher.transfers.under_way)
            r.fetcher.read_ahead({})
    assert r.reader.reads == keys
    r.landed(*keys)
    assert r.fetch(dict.fromkeys(keys, 4)) == keys


def test_a_predicted_expert_comes_from_dram(rig: type[Rig]) -> None:
    """A predicted expert that DRAM has moves up without a read, and is in one tier only."""
    r = rig(MERGED, 1, 2, look_ahead="full")
    r.fetch({X: 4})
    r.fetch({A: 4})
    assert r.dram.resident() == {X: 4}
    r.predict({X: 4})
    r.landed(X)
    r.fetch({X: 4})
    assert (r.vram.resident(), r.dram.resident()) == ({X: 4}, {A: 4})
    assert r.reader.reads == [X, A]
    counts = r.fetcher.take_counts()
    assert (counts.dram_bytes, counts.dram_hits, counts.speculated_used) == (MERGED.bytes_at(4), 0, 1)


def test_a_part_from_dram_is_no_hit(rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction brings level 2 from DRAM, and level 4 is requested: d4 is read, so that it is no DRAM hit."""
    r = rig(SLICED, 1, 2, look_ahead="full")
    r.fetch({X: 2})
    r.fetch({A: 4})
    assert r.dram.resident() == {X: 2}
    r.fetcher.take_counts()
    begun, go, fill = threading.Event(), threading.Event(), ToyForm.fill

    def delayed(form: ToyForm, *arguments: object) -> int:
        begun.set()
        assert go.wait(WAIT)
        return fill(form, *arguments)

    monkeypatch.setattr(ToyForm, "fill", delayed)
    r.predict({X: 2})
    assert begun.wait(WAIT)
    with r.fetcher.request({X: 4}) as request:
        go.set()
        assert [[lease.level for lease in leases] for leases in request] == [[4]]
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.dram_hits, counts.vram_hits) == (disk_bytes(2, 4), 0, 0)


@pytest.mark.parametrize("read", [False, True])
def test_predicting_lasts_until_the_next_request(rig: type[Rig], read: bool) -> None:
    """A prediction waits for the next request, also where all of it is resident and nothing is read."""
    r = rig(MERGED, 4, look_ahead="full")
    if not read:
        put(r.vram, MERGED, X, 4)
    assert not r.fetcher.predicting
    r.predict({X: 4})
    assert r.fetcher.predicting
    r.landed(X)
    assert r.fetcher.predicting
    r.fetch({X: 4})
    assert not r.fetcher.predicting


def test_release_pins_ends_a_prediction(rig: type[Rig]) -> None:
    """Afterwards nothing waits and no expert is leased."""
    r = rig(MERGED, 4, look_ahead="full")
    r.predict({X: 4})
    r.fetcher.release_pins()
    assert not r.fetcher.predicting
    r.whole()
