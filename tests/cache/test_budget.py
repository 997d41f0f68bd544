"""cache.budget: reservations never exceed the limit, in one thread and in many."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest

from edgemoe.cache.budget import Budget
from edgemoe.errors import DoesNotFit


def test_reservations_add_up() -> None:
    """A name may reserve again; `used_bytes` counts all reservations."""
    budget = Budget(100)
    budget.reserve("dense", 30)
    budget.reserve("kv", 20)
    budget.reserve("dense", 10)
    assert (budget.used_bytes, budget.limit) == (60, 100)


def test_the_limit_is_inclusive() -> None:
    """The last byte can be reserved, none beyond it, and a refusal changes nothing."""
    budget = Budget(100)
    budget.reserve("a", 100)
    with pytest.raises(DoesNotFit):
        budget.reserve("b", 1)
    budget.reserve("b", 0)
    assert budget.used_bytes == 100
    budget.release(100)
    assert budget.used_bytes == 0


def test_a_refusal_names_the_smallest_limit() -> None:
    """DoesNotFit carries the smallest sufficient limit; its message names purpose, free bytes and limit."""
    budget = Budget(1000)
    budget.reserve("dense", 700)
    with pytest.raises(DoesNotFit, match=r"2 KB free for kv.*300 B of a limit of 1 KB: .* 2\.7KB") as caught:
        budget.reserve("kv", 2000)
    assert caught.value.minimum == 2700
    assert budget.used_bytes == 700
    enough = Budget(caught.value.minimum)
    enough.reserve("dense", 700)
    enough.reserve("kv", 2000)
    assert enough.used_bytes == enough.limit


def test_released_bytes_can_be_reserved_again() -> None:
    """Reservations are released in part or whole."""
    budget = Budget(10)
    budget.reserve("a", 10)
    budget.release(4)
    assert budget.used_bytes == 6
    budget.reserve("b", 4)
    budget.release(6)
    assert budget.used_bytes == 4
    budget.reserve("a", 6)
    budget.release(4)
    assert budget.used_bytes == 6


def test_threads_share_the_limit() -> None:
    """Among many simultaneous reservations exactly as many succeed as fit."""
    budget, start, granted = Budget(1000), Barrier(8), []

    def reserve() -> None:
        start.wait(timeout=30)
        for _ in range(100):
            try:
                budget.reserve("planes", 7)
            except DoesNotFit:
                continue
            granted.append(7)

    threads = [Thread(target=reserve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == budget.used_bytes == 1000 // 7 * 7
