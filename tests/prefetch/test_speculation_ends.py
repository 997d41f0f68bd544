"""prefetch.speculation: predictions that end by an error, Ctrl-C, release_pins or close; counts, and mode `auto`."""

from __future__ import annotations

import signal
import threading

import pytest
from fetch_rig import WAIT, Rig, after, broken, rigs
from toys import MERGED, SLICED, disk_bytes, put

from edgemoe.errors import ChecksumMismatch
from edgemoe.prefetch.counts import LookaheadCounts, TransferCounts
from edgemoe.prefetch.lookahead import LookaheadGate
from edgemoe.storage.base import ExpertKey

A = ExpertKey(0, 0)
W, X, Y, Z = (ExpertKey(1, e) for e in range(4))
P, Q = (ExpertKey(2, e) for e in range(2))


rig = pytest.fixture(rigs)


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("arrived", [False, True])
def test_an_error_of_a_read_ahead_is_raised_on_demand(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch, arrived: bool, lasting: bool
) -> None:
    """A failed read ahead raises nothing; a requested expert is read again, and the error of that read is raised."""
    r = rig(SLICED, 4, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.reader.errors[X] = broken(X)
    r.predict({X: 4, Y: 4})
    assert begun.wait(WAIT)
    r.landed(Y)
    if not lasting:  # the disk recovers once the read ahead has failed
        after(monkeypatch, r.vram, "abandon", r.reader.errors.clear)
    if arrived:
        go.set()
        r.landed(X)
    with r.fetcher.request({X: 4, Y: 4}) as request:
        assert [lease.key for lease in next(request)] == [Y]
        go.set()
        if lasting:
            with pytest.raises(ChecksumMismatch, match="expert 1"):
                next(request)
        else:
            assert [lease.key for lease in next(request)] == [X]
    r.whole()
    assert r.reader.reads.count(X) == 2


def test_an_error_of_a_wrong_prediction_is_not_raised(rig: type[Rig]) -> None:
    """A failed read of an expert that is not requested changes nothing."""
    r = rig(MERGED, 2, look_ahead="full")
    r.reader.errors[X] = broken(X)
    r.predict({X: 4})
    r.landed(X)
    assert r.fetch({W: 4}) == [W]
    assert r.vram.resident() == {W: 4}


def test_ctrl_c_ends_the_prediction(rig: type[Rig]) -> None:
    """After an interrupt nothing is under way: a read that had begun has arrived, the others never begin."""
    r = rig(MERGED, 6, workers=1, look_ahead="full")
    begun, go = r.reader.delay(X)

    def interrupted() -> None:
        with r.fetcher.request({A: 4}) as request:
            assert [lease.key for lease in next(request)] == [A]
            r.fetcher.read_ahead({X: 4, Y: 4})
            assert begun.wait(WAIT)
            signal.raise_signal(signal.SIGINT)
            go.set()
            next(request)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    r.whole()
    assert r.vram.resident() == {A: 4, X: 4}
    assert r.fetch({Y: 4}) == [Y]
    counts = r.fetcher.take_counts()
    assert (counts.speculated, counts.speculated_cancelled, counts.wasted_bytes) == (2, 1, disk_bytes(0, 4))


def test_release_pins_leaves_nothing_under_way(rig: type[Rig]) -> None:
    """After it the tiers can be emptied: nothing arrives any more, and nothing is leased."""
    r = rig(MERGED, 4, workers=1, look_ahead="full")
    put(r.vram, MERGED, Z, 4)
    r.predict({Z: 4, X: 4, Y: 4})
    r.fetcher.release_pins()
    r.whole()
    for key in r.vram.resident():
        r.vram.drop(key)
    r.whole()
    assert r.vram.resident() == {}
    counts = r.fetcher.take_counts()
    assert counts.wasted_bytes == r.reader.bytes
    assert r.fetch({X: 4}) == [X]
    assert r.fetcher.take_counts().lookahead == {}


def test_close_waits_for_reads_ahead(rig: type[Rig]) -> None:
    """Reads ahead that have begun end before close does, the others never begin, and the tier can be closed."""
    r = rig(MERGED, 4, workers=1, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.predict({X: 4, Y: 4})
    assert begun.wait(WAIT)
    closing = threading.Thread(target=r.fetcher.close)
    closing.start()
    go.set()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert r.reader.reads == [X]
    r.whole()
    r.vram.close()


def test_a_part_of_a_read_is_hidden(rig: type[Rig]) -> None:
    """Requested 1 second into a read of 4: a quarter of its bytes and that second were hidden, of layer 1."""
    r = rig(MERGED, 2, look_ahead="full")
    begun, go = r.reader.delay(X)
    r.predict({X: 4})
    assert begun.wait(WAIT)
    r.clock.now = 1.0
    with r.fetcher.request({X: 4}) as request:
        r.clock.now = 4.0
        go.set()
        assert [lease.key for lease in next(request)] == [X]
    counts = r.fetcher.take_counts()
    assert counts.lookahead == {1: LookaheadCounts(1, 1, 1, disk_bytes(0, 4) // 4, 0, 1.0)}
    assert counts.hidden_s == 1.0


def test_predictions_are_counted_by_layer(rig: type[Rig]) -> None:
    """Recall is of the wanted experts, precision of the predicted; a layer without a prediction has neither."""
    r = rig(MERGED, 12, look_ahead="full")
    r.predict({W: 4, X: 4, Y: 4}, during={A: 4})
    r.landed(W, X, Y)
    r.predict({P: 4}, during={X: 4, Y: 4, Z: 4, ExpertKey(1, 7): 4})
    r.fetch({P: 4, Q: 4})
    r.fetch({A: 4})
    counts = r.fetcher.take_counts()
    assert counts.lookahead.keys() == {1, 2}
    assert (counts.lookahead[1].recall, counts.lookahead[1].precision) == (2 / 4, 2 / 3)
    assert (counts.lookahead[2].recall, counts.lookahead[2].precision) == (1 / 2, 1)
    assert (LookaheadCounts().recall, LookaheadCounts().precision) == (None, None)


def test_auto_turns_off_and_on(rig: type[Rig]) -> None:
    """Two wrong layers turn it off; after three more it tries again, and stays on once predictions are right."""
    r = rig(MERGED, 8, look_ahead="auto", gate=LookaheadGate(window=2, rest=3))
    on = []
    for turn in range(12):
        on.append(r.fetcher.looks_ahead)
        predicted, other = ExpertKey(1, turn), ExpertKey(2, turn)
        r.predict({predicted: 4})
        r.landed(predicted)
        r.fetch({predicted if turn > 4 else other: 4})
    counts = r.fetcher.take_counts()
    # A turn is two layers; the second decides whether the prediction was right. The first rest ends in the middle of
    # turn 2, the second, twice as long, in the middle of turn 6.
    assert on == [True, False, False, True, False, False, False] + [True] * 5
    assert (counts.auto_off, counts.auto_resting) == (2, 3 + 6)


def test_counts_add_up() -> None:
    """The sum of two counts adds every number, by layer and by level."""
    one = TransferCounts(
        ssd_bytes=5,
        levels={4: 1},
        speculated=2,
        lookahead={1: LookaheadCounts(4, 3, 2, 10, 20, 0.5)},
    )
    two = TransferCounts(
        ssd_bytes=6,
        levels={4: 2, 2: 1},
        auto_off=1,
        lookahead={1: LookaheadCounts(1, 1, 1, 1, 1, 0.25), 3: LookaheadCounts(wasted_bytes=7)},
    )
    both = one + two
    assert both == TransferCounts(
        ssd_bytes=11,
        levels={4: 3, 2: 1},
        speculated=2,
        auto_off=1,
        lookahead={1: LookaheadCounts(5, 4, 3, 11, 21, 0.75), 3: LookaheadCounts(wasted_bytes=7)},
    )
    assert (both.hidden_bytes, both.wasted_bytes, both.hidden_s) == (11, 28, 0.75)
    assert one.lookahead[1].predicted == 4
