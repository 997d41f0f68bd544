"""prefetch.workers: demands run before reads ahead, and an item that has not begun can be cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Lock, Semaphore, current_thread, main_thread

import pytest

from edgemoe.prefetch.workers import MANY, Workers

WAIT = 30


class Line:
    """Workers of one thread, which the first item keeps busy until `go`; `ran` has the items in order."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.start, self.go = Event(), Event()
        self.workers: Workers[str] = Workers(1, self._run)
        self.workers.submit("first")
        assert self.start.wait(WAIT)

    def _run(self, item: str) -> None:
        self.ran.append(item)
        if item == "first":
            self.start.set()
            assert self.go.wait(WAIT)

    def end(self) -> list[str]:
        """Lets the thread go on, and returns the items that ran after the first."""
        self.go.set()
        self.workers.close()
        return self.ran[1:]


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.end()


def test_demands_overtake(line: Line) -> None:
    """An item submitted ahead waits for every demand, and each class keeps its order."""
    for item, ahead in [("a1", True), ("d1", False), ("a2", True), ("d2", False)]:
        line.workers.submit(item, ahead=ahead)
    assert line.end() == ["d1", "d2", "a1", "a2"]


def test_a_hastened_item_is_a_demand(line: Line) -> None:
    """It joins the end of the demands, and runs once."""
    line.workers.submit("a1", ahead=True)
    line.workers.submit("a2", ahead=True)
    line.workers.submit("d1")
    line.workers.hasten("a2")
    line.workers.submit("d2")
    assert line.end() == ["d1", "a2", "d2", "a1"]


def test_hastening_an_item_that_has_begun_does_nothing(line: Line) -> None:
    """An item that a thread has taken is not queued again."""
    line.workers.hasten("first")
    assert line.end() == []


@pytest.mark.parametrize("ahead", [False, True])
def test_a_cancelled_item_never_runs(line: Line, ahead: bool) -> None:
    """An item of either class can be cancelled once, before it has begun; the other items run."""
    line.workers.submit("x", ahead=ahead)
    line.workers.submit("y", ahead=ahead)
    assert line.workers.cancel("x")
    assert not line.workers.cancel("x")
    assert not line.workers.cancel("first")
    assert line.end() == ["y"]


def test_closed_workers_refuse_items(line: Line) -> None:
    """submit raises after close."""
    line.end()
    with pytest.raises(ValueError, match="closed"):
        line.workers.submit("late", ahead=True)


def test_many_threads_run_every_item_once() -> None:
    """In four threads every item that was not cancelled runs, once."""
    ran: list[int] = []
    workers: Workers[int] = Workers(4, ran.append)
    cancelled = set()
    for item in range(2000):
        workers.submit(item, ahead=item % 3 == 0)
        if item % 5 == 0 and workers.cancel(item - item % 2):
            cancelled.add(item - item % 2)
        if item % 7 == 0:
            workers.hasten(item)
    workers.close()
    assert sorted(ran) == sorted(set(range(2000)) - cancelled)


class NotingLock:
    """A lock that releases a semaphore whenever a worker thread has looked at the queues."""

    def __init__(self, looked: Semaphore) -> None:
        self._lock, self._looked = Lock(), looked

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        if current_thread() is not main_thread():
            self._looked.release()


def test_scan_threads_run_while_many_items_wait() -> None:
    """One thread runs while fewer than MANY items wait, another begins at MANY, and every item runs once."""
    ran: list[int] = []
    begun, looked, go = Semaphore(0), Semaphore(0), Event()

    def run(item: int) -> None:
        ran.append(item)
        begun.release()
        assert go.wait(WAIT)

    workers: Workers[int] = Workers(1, run, scan_count=3)
    workers._lock = NotingLock(looked)
    workers.submit(0)
    assert begun.acquire(timeout=WAIT)
    assert looked.acquire(timeout=WAIT)
    for item in range(1, MANY):
        workers.submit(item)
        assert looked.acquire(timeout=WAIT)
    assert ran == [0]
    workers.submit(MANY)
    assert begun.acquire(timeout=WAIT)
    assert ran == [0, 1]
    go.set()
    workers.close()
    assert sorted(ran) == list(range(MANY + 1))
