"""edgemoe.engine.cpu_offload.split: which experts of a layer the CPU computes, by hand and by property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.engine.cpu_offload import Pace, split

SECONDS = st.floats(1e-6, 1.0)
PACES = st.lists(st.builds(Pace, SECONDS, SECONDS, SECONDS), max_size=9)


@pytest.mark.parametrize(
    ("computed", "moved", "alone", "experts", "left"),
    [
        (1, 1, 1, 8, 4),  # alike: half each, 4 instead of 8
        (3, 1, 1, 8, 2),  # 2 x 3 = 6 beside 6 x 1
        (1, 3, 3, 8, 6),  # 6 x 1 beside 2 x 3 = 6, instead of 24
        (8, 1, 1, 8, 0),  # one alone takes as long as moving all: moving all wins
        (7, 1, 1, 8, 1),  # 7 beside 7, instead of 8
        (3, 2, 1, 4, 0),  # copies are half as fast beside it: 6 at best, and 4 without
        (1, 1, 1, 1, 0),  # as fast: moved
        (0.5, 1, 1, 1, 1),
        (0.5, 1, 1, 0, 0),
    ],
)
def test_cases_by_hand(computed, moved, alone, experts, left):
    """Both sides end at about the same time, unless moving everything ends sooner."""
    assert split([Pace(computed, moved, alone)] * experts) == left


def test_the_last_are_left():
    """Of experts of different sizes the last ones: the second alone takes 3 beside 4, and 4 + 3 if both are moved."""
    assert split([Pace(9, 4, 4), Pace(3, 3, 3)]) == 1
    assert split([Pace(3, 3, 3), Pace(9, 4, 4)]) == 0


def seconds(paces: list[Pace], left: int) -> float:
    """Seconds of a split by the model of cpu_split."""
    if not left:
        return sum(pace.moved_alone for pace in paces)
    cut = len(paces) - left
    return max(sum(pace.moved for pace in paces[:cut]), sum(pace.computed for pace in paces[cut:]))


@given(PACES)
def test_no_plan_is_better(paces):
    """No other number of experts on the CPU is faster."""
    best = min(seconds(paces, left) for left in range(len(paces) + 1))
    assert seconds(paces, split(paces)) == pytest.approx(best)


@given(PACES)
def test_a_slow_cpu_gets_no_expert(paces):
    """The CPU gets no expert where one takes it as long as moving all of them."""
    whole = sum(pace.moved_alone for pace in paces)
    assert split([Pace(whole + pace.computed, pace.moved, pace.moved_alone) for pace in paces]) == 0
