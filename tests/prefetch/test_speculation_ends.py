"""prefetch.speculation: how guesses end that do not simply come true: an error, Ctrl-C, settling, closing."""

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
def test_an_error_ahead_is_met_only_by_who_wants_it(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch, arrived: bool, lasting: bool
) -> None:
    """A failed guess is silent; wanted, its expert is read again, and that error is raised, or there is none."""
    r = rig(SLICED, 4, speculate="full")
    begun, go = r.reader.hold(X)
    r.reader.errors[X] = broken(X)
    r.guess({X: 4, Y: 4})
    assert begun.wait(WAIT)
    r.landed(Y)
    if not lasting:  # cured when the guess is found to have failed
        after(monkeypatch, r.vram, "abandon", r.reader.errors.clear)
    if arrived:
        go.set()
        r.landed(X)
    with r.fetcher.stream({X: 4, Y: 4}) as leases:
        assert next(leases).key == Y
        go.set()
        if lasting:
            with pytest.raises(ChecksumMismatch, match="expert 1"):
                next(leases)
        else:
            assert next(leases).key == X
    r.whole()
    assert r.reader.reads.count(X) == 2


def test_an_unwanted_error_is_nobodys(rig: type[Rig]) -> None:
    """A failed guess that is refuted leaves the tier as it was."""
    r = rig(MERGED, 2, speculate="full")
    r.reader.errors[X] = broken(X)
    r.guess({X: 4})
    r.landed(X)
    assert r.fetch({W: 4}) == [W]
    assert r.vram.resident() == {W: 4}


def test_ctrl_c_ends_the_guess_as_well(rig: type[Rig]) -> None:
    """After an interrupt nothing is under way: what had begun has arrived, the rest never will."""
    r = rig(MERGED, 6, workers=1, speculate="full")
    begun, go = r.reader.hold(X)

    def interrupted() -> None:
        with r.fetcher.stream({A: 4}) as leases:
            assert next(leases).key == A
            r.fetcher.speculate({X: 4, Y: 4})
            assert begun.wait(WAIT)
            signal.raise_signal(signal.SIGINT)
            go.set()
            next(leases)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    r.whole()
    assert r.vram.resident() == {A: 4, X: 4}
    assert r.fetch({Y: 4}) == [Y]
    counts = r.fetcher.take_counts()
    assert (counts.speculated, counts.speculated_cancelled, counts.wasted_bytes) == (2, 1, disk_bytes(0, 4))


def test_settle_leaves_nothing_under_way(rig: type[Rig]) -> None:
    """Between two streams the tiers can be emptied: nothing arrives afterwards, and nothing is pinned."""
    r = rig(MERGED, 4, workers=1, speculate="full")
    put(r.vram, MERGED, Z, 4)
    r.guess({Z: 4, X: 4, Y: 4})
    r.fetcher.settle()
    r.whole()
    for key in r.vram.resident():
        r.vram.drop(key)
    r.whole()
    assert r.vram.resident() == {}
    counts = r.fetcher.take_counts()
    assert counts.wasted_bytes == r.reader.bytes
    assert r.fetch({X: 4}) == [X]
    assert r.fetcher.take_counts().lookahead == {}


def test_close_waits_for_the_guess(rig: type[Rig]) -> None:
    """Reads ahead that have begun are waited for, the others never begin, and the tier can be closed."""
    r = rig(MERGED, 4, workers=1, speculate="full")
    begun, go = r.reader.hold(X)
    r.guess({X: 4, Y: 4})
    assert begun.wait(WAIT)
    closing = threading.Thread(target=r.fetcher.close)
    closing.start()
    go.set()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert r.reader.reads == [X]
    r.whole()
    r.vram.close()
