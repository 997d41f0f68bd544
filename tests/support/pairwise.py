"""Few cases instead of a cross product: every value of each parameter together with every value of each other one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pytest


def all_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of indices, one index below each size, that contain every pair of indices of every two columns.

    The rows are the same on every call, and their number is near the product of the two largest sizes.
    """
    left = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(sizes)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }
    row: dict[int, int] = {}

    def gain(column: int, value: int) -> int:
        """How many missing pairs a value adds to the row."""
        return len(left & {tuple(sorted((cell, (column, value)))) for cell in row.items()})

    rows = []
    while left:
        row.clear()
        row.update(min(left))
        for column in sorted(set(range(len(sizes))) - set(row), key=lambda column: -sizes[column]):
            row[column] = max(range(sizes[column]), key=partial(gain, column))
        rows.append(tuple(row[column] for column in range(len(sizes))))
        left -= set(combinations(sorted(row.items()), 2))
    return rows


def smaller_set(rows: Sequence[tuple[int, ...]], alone: Collection[int]) -> set[tuple[int, ...]]:
    """Rows that contain every index of every column, and every pair of two columns that are not in `alone`.

    Args:
        rows: rows of indices, as all_pairs gives them.
        alone: columns of which no pair is needed.
    """

    def parts(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        """Indices, and pairs of indices, that the row contains."""
        cells = [*enumerate(row)]
        pairs = combinations([cell for cell in cells if cell[0] not in alone], 2)
        return {*pairs, *((cell,) for cell in cells)}

    parts_of = {row: parts(row) for row in rows}
    left, few = set[tuple[tuple[int, int], ...]]().union(*parts_of.values()), set[tuple[int, ...]]()
    while left:
        best = max(rows, key=lambda row: len(left & parts_of[row]))
        few.add(best)
        left -= parts_of[best]
    return few


def few(values: Collection[Any], fast: Collection[Any]) -> list[Any]:
    """Values of one argument, for pytest.mark.parametrize; all but `fast` are left to `make test-folders`.

    Args:
        values: the values.
        fast: the values that `make test` runs too.
    """
    assert {*map(str, fast)} <= {*map(str, values)}
    return [value if value in fast else pytest.param(value, marks=pytest.mark.folders) for value in values]


def pairwise(
    *,
    indirect: Collection[str] = (),
    alone: Collection[str] = (),
    slow: Collection[str] = (),
    e2e: Callable[[dict[str, Any]], bool] = lambda case: False,
    **domains: Collection[Any],
) -> pytest.MarkDecorator:
    """Parametrizes a test with rows of values in which every two values of different arguments meet.

    Args:
        indirect: Names of arguments whose values go to the fixture of that name.
        alone: Names of arguments whose pairs are left to `make test-folders`, such as a family of models whose code no
            other argument changes. Each of their values is in a row that `make test` runs too.
        slow: Values of the arguments in `alone` that have no code of their own: their rows are left to
            `make test-folders`.
        e2e: Whether `make test-fast` leaves out the row with these values.
        domains: Argument name -> its values.
    """
    values = [list(domain) for domain in domains.values()]
    indices = all_pairs([len(each) for each in values])
    cases = [tuple(each[index] for each, index in zip(values, row, strict=True)) for row in indices]
    fast = [row for row, case in zip(indices, cases, strict=True) if not {*slow} & {*map(str, case)}]
    fast = [*smaller_set(fast, [[*domains].index(name) for name in alone])] if alone else fast
    names = ["-".join(getattr(v, "__name__", str(v)).replace(" ", "") for v in case) for case in cases]
    marks = [[pytest.mark.e2e] * e2e(dict(zip(domains, case, strict=True))) for case in cases]
    marks = [
        each + [pytest.mark.folders] * (row not in fast) for each, row in zip(marks, indices, strict=True)
    ]
    rows = [pytest.param(*c, id=n, marks=m) for c, n, m in zip(cases, names, marks, strict=True)]
    return pytest.mark.parametrize(list(domains), rows, indirect=list(indirect))
