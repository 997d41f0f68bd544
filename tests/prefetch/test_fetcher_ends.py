"""prefetch.fetcher: streams that end before their last lease, by an error, by leaving or by Ctrl-C."""

from __future__ import annotations

import signal

import pytest
from fetch_rig import WAIT, Rig, after, broken, rigs
from toys import MERGED, SLICED, contents, expected, put

from prefetch.sigint import deferred_interrupt
from storage.base import ExpertKey
from storage.errors import ChecksumMismatch

A, B, C, D = (ExpertKey(0, e) for e in range(4))


rig = pytest.fixture(rigs)


@pytest.mark.parametrize("dram", [None, 4])
def test_a_failed_read_is_raised_after_the_others(
    rig: type[Rig], dram: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes once nothing is under way; what else arrived stays, what failed is as it was."""
    r = rig(SLICED, 4, dram, workers=2)
    put(r.vram, SLICED, A, 2)
    r.reader.errors[A] = broken(A)
    _, go = r.reader.hold(B)
    after(monkeypatch, r.vram, "abandon", go.set)  # B's read ends only when A's error has been met
    with r.fetcher.stream({A: 4, B: 4}) as leases:
        with pytest.raises(ChecksumMismatch, match="expert 0"):
            next(leases)
        assert r.vram.resident() == {A: 2, B: 4}
        assert list(leases) == []
    r.whole()
    r.reader.errors.clear()
    r.fetch({A: 4, B: 4})


def test_leaving_early_waits_and_leaves_the_tiers_whole(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three misses and one worker, the one under way is finished and kept, the others are never read."""
    r = rig(MERGED, 4, workers=1)
    put(r.vram, MERGED, D, 4)
    begun, go = r.reader.hold(A)

    def fail_at_the_first_hit() -> None:
        with r.fetcher.stream(dict.fromkeys((A, B, C, D), 4)) as leases:
            assert next(leases).key == D
            assert begun.wait(WAIT)
            after(monkeypatch, r.vram, "release", go.set)  # A's read ends only when leaving has begun
            raise RuntimeError("the engine failed")

    with pytest.raises(RuntimeError, match="engine"):
        fail_at_the_first_hit()
    r.whole()
    assert r.reader.reads == [A]
    assert r.vram.resident() == {A: 4, D: 4}


def test_a_stream_left_early_gives_nothing_more(rig: type[Rig]) -> None:
    """An iterator kept beyond its context has no leases."""
    r = rig(MERGED, 2)
    with r.fetcher.stream({A: 4, B: 4, C: 4}) as leases:
        next(leases)
    assert list(leases) == []
    r.whole()


def test_an_iterator_never_started_leaves_nothing(rig: type[Rig]) -> None:
    """Hits are pinned on entry; leaving without asking for one releases them."""
    r = rig(MERGED, 2)
    put(r.vram, MERGED, A, 4)
    with r.fetcher.stream({A: 4, B: 4}):
        pass
    r.whole()


def test_ctrl_c_comes_between_two_leases(rig: type[Rig]) -> None:
    """SIGINT within a stream ends it at the next lease, with nothing leaked and Python's handler back."""
    r = rig(MERGED, 3)
    with r.fetcher.stream({A: 4, B: 4, C: 4}) as leases:
        first = next(leases)
        signal.raise_signal(signal.SIGINT)
        assert contents(first.blocks) == expected(MERGED, first.key, 4)
        with pytest.raises(KeyboardInterrupt):
            next(leases)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    r.whole()
    r.fetch({A: 4, B: 4, C: 4})


def test_streams_within_a_wider_context_are_part_of_it(rig: type[Rig]) -> None:
    """Ctrl-C between two streams waits for the next safe point; the handler is back with the outer context's end."""
    r = rig(MERGED, 3)

    def two_streams() -> None:
        with deferred_interrupt():
            r.fetch({A: 4})
            signal.raise_signal(signal.SIGINT)
            with r.fetcher.stream({B: 4}) as leases:
                next(leases)

    with pytest.raises(KeyboardInterrupt):
        two_streams()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    r.whole()
    r.fetch({A: 4, B: 4})


def test_ctrl_c_at_the_last_lease_is_not_lost(rig: type[Rig]) -> None:
    """Where no further lease is asked for, the end of the context raises it."""
    r = rig(MERGED, 1)
    stream = r.fetcher.stream({A: 4})
    next(stream.__enter__())
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stream.__exit__(None, None, None)
    r.whole()


def test_a_second_ctrl_c_does_not_wait(rig: type[Rig]) -> None:
    """Who asks twice does not wait for the next lease, and is not told a third time."""
    r = rig(MERGED, 1)
    with r.fetcher.stream({A: 4}) as leases:
        next(leases)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert list(leases) == []
    r.whole()


def test_a_handler_of_the_programs_own_is_left_alone(rig: type[Rig]) -> None:
    """A program that handles SIGINT itself is told at once, also within a stream."""
    r = rig(MERGED, 1)
    told = []
    before = signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    try:
        with r.fetcher.stream({A: 4}) as leases:
            signal.raise_signal(signal.SIGINT)
            assert told == [signal.SIGINT]
            assert [lease.key for lease in leases] == [A]
    finally:
        signal.signal(signal.SIGINT, before)
