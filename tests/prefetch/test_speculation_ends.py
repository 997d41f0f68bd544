"""prefetch.speculation: predictions that end by an error, Ctrl-C, release_pins or close."""

from __future__ import annotations

import signal
import threading

import pytest
from fetch_rig import WAIT, Rig, after, broken, rigs
from toys import MERGED, SLICED, disk_bytes, put

from storage.base import ExpertKey
from storage.errors import ChecksumMismatch

A = ExpertKey(0, 0)
W, X, Y, Z = (ExpertKey(1, e) for e in range(4))


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
