"""cache.budget: no byte is handed out twice, whoever asks and whenever."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest

from cache.budget import Budget
from storage.errors import DoesNotFit


def test_reservations_add_up() -> None:
    """A name may reserve again; used, free and breakdown say what is there."""
    budget = Budget(100)
    budget.reserve("dense", 30)
    budget.reserve("kv", 20)
    assert budget.try_reserve("dense", 10)
    assert (budget.used, budget.free, budget.limit) == (60, 40, 100)
    assert budget.breakdown() == {"dense": 40, "kv": 20}


def test_the_last_byte_can_be_had_and_no_more() -> None:
    """The limit is inclusive, and a refusal changes nothing."""
    budget = Budget(100)
    assert budget.try_reserve("a", 100)
    assert not budget.try_reserve("b", 1)
    assert budget.try_reserve("b", 0)
    assert budget.breakdown() == {"a": 100, "b": 0}


def test_a_refusal_names_the_smallest_limit() -> None:
    """DoesNotFit carries the limit with which exactly this would have fitted, and who asked for what."""
    budget = Budget(1000)
    budget.reserve("dense", 700)
    with pytest.raises(DoesNotFit, match=r"2,000 bytes for kv.*700 of the limit's 1,000 bytes") as caught:
        budget.reserve("kv", 2000)
    assert caught.value.minimum == 2700
    assert budget.breakdown() == {"dense": 700}
    enough = Budget(caught.value.minimum)
    enough.reserve("dense", 700)
    enough.reserve("kv", 2000)
    assert enough.free == 0


def test_release_gives_back_a_part_or_all() -> None:
    """What is released can be reserved again; a name with nothing left is gone."""
    budget = Budget(10)
    budget.reserve("a", 10)
    budget.release("a", 4)
    assert budget.breakdown() == {"a": 6}
    budget.release("a")
    assert budget.breakdown() == {}
    assert budget.try_reserve("b", 10)
    budget.release("b", 10)
    assert budget.breakdown() == {}


@pytest.mark.parametrize(("name", "nbytes"), [("a", 6), ("b", 1), ("b", None), ("a", -1)])
def test_what_is_not_there_cannot_be_released(name: str, nbytes: int | None) -> None:
    """Releasing too much, from the wrong name, or less than nothing is an error and changes nothing."""
    budget = Budget(10)
    budget.reserve("a", 5)
    with pytest.raises(ValueError, match="bytes"):
        budget.release(name, nbytes)
    assert budget.breakdown() == {"a": 5}


def test_sizes_are_not_negative() -> None:
    """A negative limit or reservation would create bytes."""
    with pytest.raises(ValueError, match="negative"):
        Budget(-1)
    with pytest.raises(ValueError, match="negative"):
        Budget(10).reserve("a", -1)


def test_threads_share_the_limit() -> None:
    """Of many threads that ask at once, exactly as many succeed as there is room for."""
    budget, start, granted = Budget(1000), Barrier(8), []

    def ask() -> None:
        start.wait(timeout=30)
        granted.extend(budget.try_reserve("planes", 7) for _ in range(100))

    threads = [Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 1000 // 7
    assert budget.used == 1000 // 7 * 7
