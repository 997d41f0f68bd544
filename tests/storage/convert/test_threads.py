"""Work in order with a bound on its bytes: order, bound, errors and early ends."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial

import pytest
from small_store import FailureError

from edgemoe.storage.threads import in_order, one_core_each


def test_results_come_in_order_whatever_ends_first():
    """The second task ends before the first, and its result comes after the first one's."""
    second_ran = threading.Event()

    def first() -> str:
        assert second_ran.wait(30)
        return "first"

    def second() -> str:
        second_ran.set()
        return "second"

    with one_core_each(2) as pool:
        assert list(in_order(pool, [(1, first), (1, second)], limit=2)) == ["first", "second"]


@pytest.mark.parametrize(
    ("sizes", "limit", "starts"), [([4] * 6, 12, 3), ([4, 9, 1, 1], 10, 1), ([50, 50], 10, 1)]
)
def test_begun_tasks_stay_within_the_limit(sizes, limit, starts):
    """Until the first result is used up only so many have begun; a task above the limit runs alone."""
    started = []

    def task(number: int) -> int:
        started.append(number)
        return number

    with one_core_each(4) as pool:
        tasks = ((size, partial(task, number)) for number, size in enumerate(sizes))
        results = in_order(pool, tasks, limit)
        assert next(results) == 0
        pool.submit(int).result()
        assert len(started) <= starts
        assert [0, *results] == list(range(len(sizes)))
    assert sorted(started) == list(range(len(sizes)))


def test_many_small_tasks_begin_at_once():
    """The bound is of bytes alone: eight tasks that wait for one another end with eight threads."""
    together = threading.Barrier(8, timeout=30)
    with one_core_each(8) as pool:
        tasks = [(1, together.wait)] * 8
        assert sorted(in_order(pool, tasks, limit=100)) == list(range(8))


def test_an_error_comes_in_its_place_and_ends_the_rest():
    """Results before the error are yielded; tasks that have not begun never run."""
    ran, go = [], threading.Event()

    def fails() -> None:
        raise FailureError

    def blocks() -> None:
        go.wait(30)

    with one_core_each(1) as pool:
        tasks = [
            (1, lambda: "good"),
            (1, fails),
            (1, blocks),
            *[(1, partial(ran.append, n)) for n in range(5)],
        ]
        results = in_order(pool, tasks, limit=100)
        assert next(results) == "good"
        with pytest.raises(FailureError):
            next(results)
        go.set()
    assert ran == []


def test_an_early_end_cancels_what_has_not_begun():
    """A consumer that stops leaves no task running."""
    ran, go = [], threading.Event()

    def blocks() -> None:
        go.wait(30)

    with one_core_each(1) as pool:
        tasks = [(1, int), (1, blocks), *[(1, partial(ran.append, n)) for n in range(5)]]
        with closing(in_order(pool, tasks, limit=100)) as results:
            next(results)
        go.set()
    assert ran == []
