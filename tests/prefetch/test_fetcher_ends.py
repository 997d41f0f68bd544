"""prefetch.fetcher: requests that end before their last lease, by an error, by leaving or by Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from weakref import ref

import pytest
from fetch_rig import WAIT, Rig, after, broken, rigs
from toys import MERGED, SLICED, contents, expected, put

from edgemoe.errors import ChecksumMismatch, ReadFailed
from edgemoe.machine.sigint import DeferredInterrupt
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.files.retry import Retries

A, B, C, D = (ExpertKey(0, e) for e in range(4))


rig = pytest.fixture(rigs)


@pytest.mark.parametrize("dram", [None, 4])
def test_a_failed_read_is_raised_after_the_others(
    rig: type[Rig], dram: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised once nothing is under way; other experts have arrived, the failed one is unchanged."""
    r = rig(SLICED, 4, dram, workers=2)
    put(r.vram, SLICED, A, 2)
    r.reader.errors[A] = broken(A)
    (_, fail), (begun, go) = r.reader.delay(A), r.reader.delay(B)
    threading.Thread(
        target=lambda: begun.wait(30) and fail.set(), daemon=True
    ).start()  # both reads are under way
    after(monkeypatch, r.vram, "abandon", go.set)  # B's read ends only when A's error has been met
    with r.fetcher.request({A: 4, B: 4}) as request:
        with pytest.raises(ChecksumMismatch, match="expert 0"):
            next(request)
        assert r.vram.resident() == {A: 2, B: 4}
        assert list(request) == []
    r.whole()
    r.reader.errors.clear()
    r.fetch({A: 4, B: 4})


def test_leaving_early_waits_and_leaves_the_tiers_whole(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three misses and one worker, the one under way arrives, and the others are never read."""
    r = rig(MERGED, 4, workers=1)
    put(r.vram, MERGED, D, 4)
    begun, go = r.reader.delay(A)

    def fail_at_the_first_hit() -> None:
        with r.fetcher.request(dict.fromkeys((A, B, C, D), 4)) as request:
            assert [lease.key for lease in next(request)] == [D]
            assert begun.wait(WAIT)
            after(monkeypatch, r.vram, "release", go.set)  # A's read ends only when leaving has begun
            raise RuntimeError("the engine failed")

    with pytest.raises(RuntimeError, match="engine"):
        fail_at_the_first_hit()
    r.whole()
    assert r.reader.reads == [A]
    assert r.vram.resident() == {A: 4, D: 4}


def test_a_closed_fetcher_keeps_no_model(rig: type[Rig]) -> None:
    """A model whose launches it waited for can be freed: nothing of what was added stays."""
    r, model = rig(SLICED, 4, workers=1), threading.Event()
    r.fetcher.launched.add(model.set)
    there = ref(model)
    del model
    assert there()
    r.fetcher.close()
    assert there() is None


def test_a_request_left_early_gives_no_more_leases(rig: type[Rig]) -> None:
    """An iterator that is used after its context gives no lease."""
    r = rig(MERGED, 2)
    with r.fetcher.request({A: 4, B: 4, C: 4}) as request:
        next(request)
    assert list(request) == []
    r.whole()


def test_a_request_without_iteration_ends_its_leases(rig: type[Rig]) -> None:
    """Hits are leased on entry; leaving without taking a list releases them."""
    r = rig(MERGED, 2)
    put(r.vram, MERGED, A, 4)
    with r.fetcher.request({A: 4, B: 4}):
        pass
    r.whole()


def test_ctrl_c_is_raised_between_two_lists(rig: type[Rig]) -> None:
    """SIGINT within a request ends it at the next list; nothing is leaked and Python's handler is restored."""
    r = rig(MERGED, 3)
    with r.fetcher.request({A: 4, B: 4, C: 4}) as request:
        first = next(request)[0]
        signal.raise_signal(signal.SIGINT)
        assert contents(first.blocks) == expected(MERGED, first.key, 4)
        with pytest.raises(KeyboardInterrupt):
            next(request)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    r.whole()
    r.fetch({A: 4, B: 4, C: 4})


def test_requests_within_a_wider_context_are_part_of_it(rig: type[Rig]) -> None:
    """Ctrl-C between two requests waits for the next safe point; the outer context's end restores the handler."""
    r = rig(MERGED, 3)

    def two_requests() -> None:
        with DeferredInterrupt():
            r.fetch({A: 4})
            signal.raise_signal(signal.SIGINT)
            with r.fetcher.request({B: 4}) as request:
                next(request)

    with pytest.raises(KeyboardInterrupt):
        two_requests()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    r.whole()
    r.fetch({A: 4, B: 4})


def test_ctrl_c_at_the_last_list_is_not_lost(rig: type[Rig]) -> None:
    """Where no further list is taken, the end of the context raises KeyboardInterrupt."""
    r = rig(MERGED, 1)
    request = r.fetcher.request({A: 4})
    next(request.__enter__())
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        request.__exit__(None, None, None)
    r.whole()


def test_a_second_ctrl_c_does_not_wait(rig: type[Rig]) -> None:
    """A second SIGINT is raised at once, and no third KeyboardInterrupt follows."""
    r = rig(MERGED, 1)
    with r.fetcher.request({A: 4}) as request:
        next(request)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert list(request) == []
    r.whole()


def test_a_handler_of_the_programs_own_is_deferred_like_pythons(rig: type[Rig]) -> None:
    """It is called at the next list and not before, so that what it raises meets no tier half changed."""
    r = rig(MERGED, 1)
    signals = []

    def handler(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with r.fetcher.request({A: 4}) as request:
            signal.raise_signal(signal.SIGINT)
            assert signals == []
            assert [[lease.key for lease in leases] for leases in request] == [[A]]
            assert signals == [signal.SIGINT]
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert signals == [signal.SIGINT] * 3
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_between_entering_and_deferring_leaves_the_next_context_whole() -> None:
    """Where the signal comes just before the handler is replaced, later contexts still defer."""
    replace, came = signal.signal, []

    def interrupted(number: int, handler: object) -> object:
        if not came:
            came.append(number)
            signal.raise_signal(signal.SIGINT)
        return replace(number, handler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
            pass
    with DeferredInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()


def failing(r: Rig, monkeypatch: pytest.MonkeyPatch, *keys: ExpertKey) -> threading.Event:
    """Makes reads of some experts fail with EIO, retries included; returns an event that the first of them sets."""
    begun, read = threading.Event(), r.reader.read

    def fail(key, first, last, into):
        retries = Retries(Path("experts"))
        while key in keys:
            begun.set()
            if found := retries.failed(OSError(errno.EIO, "Input/output error")):
                raise ReadFailed("an expert", found, "check the disk")
        return read(key, first, last, into)

    monkeypatch.setattr(r.reader, "read", fail)
    return begun


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_does_not_wait_for_retries(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """SIGINT while the only reads are tried again is raised at once, and leaves the tiers whole."""
    r = rig(MERGED, 4, workers=workers)
    begun = failing(r, monkeypatch, A, B, C)
    interrupted: list[float] = []

    def interrupt() -> None:
        assert begun.wait(WAIT)
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def wait_for_experts() -> None:
        with r.fetcher.request({A: 4, B: 4, C: 4}) as request:
            threading.Thread(target=interrupt).start()
            next(request)

    with pytest.raises(KeyboardInterrupt):
        wait_for_experts()
    assert time.monotonic() - interrupted[0] < 1
    r.whole()
    assert r.vram.resident() == {}


def test_a_failed_request_does_not_wait_for_other_retries(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is met at once ends the request while the reads of other experts are tried again."""
    r = rig(MERGED, 4, workers=3)
    begun = failing(r, monkeypatch, B, C)
    r.reader.errors[A] = broken(A)
    _, go = r.reader.delay(A)
    with r.fetcher.request({A: 4, B: 4, C: 4}) as request:
        assert begun.wait(WAIT)
        start = time.monotonic()
        go.set()
        with pytest.raises(ChecksumMismatch):
            next(request)
    assert time.monotonic() - start < 1
    r.whole()


def test_the_end_of_a_prediction_does_not_wait_for_retries(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """release_pins, as at the end of the program, gives up reads ahead that fail."""
    r = rig(MERGED, 4, workers=2, look_ahead="full")
    begun = failing(r, monkeypatch, A)
    r.predict({A: 4})
    assert begun.wait(WAIT)
    start = time.monotonic()
    r.fetcher.release_pins()
    assert time.monotonic() - start < 1
    r.whole()


def test_retries_of_reads_are_counted(rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """take_counts has the reader's retries since the call before."""
    r = rig(MERGED, 4)
    monkeypatch.setattr(type(r.reader), "retries", 3, raising=False)
    assert r.fetcher.take_counts().read_retries == 3
    monkeypatch.setattr(type(r.reader), "retries", 5)
    assert r.fetcher.take_counts().read_retries == 2
    assert r.fetcher.take_counts().read_retries == 0
