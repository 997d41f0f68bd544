"""The pairwise helper in tests/support."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import all_pairs, few, pairwise, smaller_set


@pytest.mark.parametrize(
    ("sizes", "limit"), [((2, 3), 6), ((2, 2, 2, 2), 6), ((5, 5, 4, 3), 27), ((3, 1), 3)]
)
def test_every_pair_is_in_a_row(sizes: tuple[int, ...], limit: int) -> None:
    """Every two values of two columns meet, in few rows, the same ones on every call."""
    rows = all_pairs(sizes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(set(rows)) == len(rows) <= limit
    assert all_pairs(sizes) == rows


def test_cases_have_the_values() -> None:
    """A case has one value per argument, its id shows them, and it is marked by them."""
    mark = pairwise(level=[8, 4], shape=[(1, 2)], e2e=lambda case: case["level"] == 4).mark
    names, cases = mark.args
    assert names == ["level", "shape"]
    assert [(case.values, case.id) for case in cases] == [((8, (1, 2)), "8-(1,2)"), ((4, (1, 2)), "4-(1,2)")]
    assert [[mark.name for mark in case.marks] for case in cases] == [[], ["e2e"]]
    assert mark.kwargs == {"indirect": []}


def test_a_smaller_set_has_every_value_and_the_pairs_of_the_others() -> None:
    """Pairs of the first column are left to the slow lane; every other pair and every value stays."""
    rows = all_pairs((9, 3, 2))
    few = smaller_set(rows, [0])
    assert few < {*rows}
    assert {row[0] for row in few} == set(range(9))
    assert {row[1:] for row in few} == set(product(range(3), range(2)))
    assert len(few) <= 12
    mark = pairwise(alone=["family"], family=range(9), level=[8, 4, 2], kv=[16, 8]).mark
    slow = [[mark.name for mark in case.marks] for case in mark.args[1]]
    assert slow.count([]) == len(few)
    assert slow.count(["folders"]) == len(rows) - len(few)


def test_slow_values_are_in_no_fast_row() -> None:
    """The other rows have every pair that is not of a family, and the slow lane has all rows."""
    how = {"family": ["a", "b", "c"], "level": [8, 4, 2], "kv": [16, 8]}
    cases = pairwise(alone=["family"], slow=["c"], **how).mark.args[1]
    fast = [case.values for case in cases if not case.marks]
    assert {family for family, *_ in fast} == {"a", "b"}
    assert {tuple(rest) for _, *rest in fast} == set(product(how["level"], how["kv"]))
    assert {case.values[0] for case in cases} == {"a", "b", "c"}


def test_few_values_are_fast() -> None:
    """All others are marked, in their order."""
    one, two, three = few([1, 2, 3], [2])
    assert two == 2
    assert [[mark.name for mark in each.marks] for each in (one, three)] == [["folders"]] * 2
