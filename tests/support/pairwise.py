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


def pairwise(
    *,
    indirect: Collection[str] = (),
    e2e: Callable[[dict[str, Any]], bool] = lambda case: False,
    **domains: Collection[Any],
) -> pytest.MarkDecorator:
    """Parametrizes a test with rows of values in which every two values of different arguments meet.

    Args:
        indirect: Names of arguments whose values go to the fixture of that name.
        e2e: Whether `make test-fast` leaves out the row with these values.
        domains: Argument name -> its values.
    """
    values = [list(domain) for domain in domains.values()]
    indices = all_pairs([len(each) for each in values])
    cases = [tuple(each[index] for each, index in zip(values, row, strict=True)) for row in indices]
    names = ["-".join(getattr(v, "__name__", str(v)).replace(" ", "") for v in case) for case in cases]
    marks = [[pytest.mark.e2e] * e2e(dict(zip(domains, case, strict=True))) for case in cases]
    rows = [pytest.param(*c, id=n, marks=m) for c, n, m in zip(cases, names, marks, strict=True)]
    return pytest.mark.parametrize(list(domains), rows, indirect=list(indirect))
