"""Which experts enter and leave a layer's hot set, against a search in plain Python, and that rest is rest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.residency import Moves, capacity, moves

SCORES = st.integers(0, 6).map(lambda n: n / 4)
"""Few values, so that many are equal."""


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[float], list[bool], list[bool], int]:
    """Scores, hot now, may enter, most hot experts."""
    count = draw(st.integers(1, 9))
    scores, hot, enter = (
        draw(st.lists(each, min_size=count, max_size=count))
        for each in (SCORES, st.booleans(), st.booleans())
    )
    return scores, hot, enter, draw(st.integers(0, count + 1))


def by_search(
    scores: list[float], hot: list[bool], enter: list[bool], size: int, margin: float
) -> tuple[set[int], set[int]]:
    """The hot set, one move after another: excess leaves, free places fill, then the best outside meets the worst."""
    now = {i for i, each in enumerate(hot) if each}
    waiting = {i for i in range(len(scores)) if not hot[i] and enter[i] and scores[i] > 0}
    start, least = set(now), None
    while len(now) > size:
        now.remove(min(now, key=lambda i: (scores[i], i)))
    stayed = set(now)
    while waiting and len(now) < size:
        best = max(waiting, key=lambda i: (scores[i], -i))
        waiting.remove(best)
        now.add(best)
    if stayed:
        least = margin * sum(scores[i] for i in stayed) / len(stayed)
    while waiting and stayed and least is not None:
        best, worst = max(waiting, key=lambda i: (scores[i], -i)), min(stayed, key=lambda i: (scores[i], i))
        if not scores[best] > scores[worst] + least:
            break
        waiting.remove(best)
        stayed.remove(worst)
        now = now - {worst} | {best}
    return now - start, start - now


def changed(scores: list[float], hot: list[bool], enter: list[bool], size: int, margin: float) -> Moves:
    return moves(np.array(scores), np.array(hot), np.array(enter), size, margin)


@pytest.mark.e2e
@given(layer=layers(), margin=st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_moves_are_those_of_a_search(
    layer: tuple[list[float], list[bool], list[bool], int], margin: float
) -> None:
    """The changed set equals the search's, never exceeds its capacity, and moves nothing twice."""
    scores, hot, enter, most = layer
    change = changed(scores, hot, enter, most, margin)
    assert (set(change.promote), set(change.demote)) == by_search(scores, hot, enter, most, margin)
    assert len(set(change.promote)) == len(change.promote)
    assert len(set(change.demote)) == len(change.demote)
    assert all(enter[e] and not hot[e] and scores[e] > 0 for e in change.promote)
    assert all(hot[e] for e in change.demote)
    assert sum(hot) + len(change.promote) - len(change.demote) <= most
    assert [scores[e] for e in change.promote] == sorted((scores[e] for e in change.promote), reverse=True)


@given(layer=layers())
def test_a_second_look_at_the_same_scores_moves_nothing(
    layer: tuple[list[float], list[bool], list[bool], int],
) -> None:
    """Without a margin and with every promotion done, the hot set is the best one, and stays."""
    scores, hot, _, most = layer
    anything = [True] * len(scores)
    first = changed(scores, hot, anything, most, 0.0)
    now = [(hot[e] or e in first.promote) and e not in first.demote for e in range(len(scores))]
    assert changed(scores, now, anything, most, 0.0) == Moves([], [])
    inside, outside = (
        [s for s, h in zip(scores, now, strict=True) if h is is_hot] for is_hot in (True, False)
    )
    assert len(inside) == most or not any(outside)
    assert max(outside, default=0.0) <= min(inside, default=9.0)


def swaps(turns: list[list[float]], margin: float) -> int:
    """Experts that enter a full hot set of two over some looks, with every promotion done in between."""
    hot, entered = [True, True, False, False], 0
    for scores in turns:
        change = changed(scores, hot, [True] * 4, 2, margin)
        entered += len(change.promote)
        hot = [(hot[e] or e in change.promote) and e not in change.demote for e in range(4)]
        assert sum(hot) == 2
    return entered


@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_equal_scores_move_nothing(margin: float) -> None:
    """Equal for ever, or equal but for who is first in the order of another look."""
    assert swaps([[1.0, 1.0, 1.0, 1.0]] * 10, margin) == 0
    assert swaps([[1.0, 0.5, 0.5, 0.5], [1.0, 0.5, 0.5, 0.5]] * 10, margin) == 0


def test_a_margin_ends_the_swaps_of_alternating_scores() -> None:
    """Two experts that are a little hotter in turn change places at every look without a margin, and never with one."""
    turns = [[1.0, 0.50, 0.52, 0.0], [1.0, 0.52, 0.50, 0.0]] * 10
    assert swaps(turns, 0.0) == 20
    assert swaps(turns, 0.1) == 0
    assert swaps([[1.0, 0.5, 0.6, 0.0]], 0.1) == 1


def test_a_slack_lets_an_expert_stay_a_few_ranks_below_the_hot_set() -> None:
    """Two of four hot experts have the ranks 4 and 6, from 0, and two outsiders the ranks 2 and 3."""
    scores = [9.0, 8.0, 5.0, 3.0, 7.0, 6.0, 4.0]
    hot = [True, True, True, True, False, False, False]
    leaving = {
        slack: set(moves(*map(np.array, (scores, hot, [True] * 7)), 4, 0.0, slack).demote)
        for slack in range(4)
    }
    assert leaving == {0: {2, 3}, 1: {3}, 2: {3}, 3: set()}
    free = moves(*map(np.array, (scores, hot, [True] * 7)), 5, 0.0, 3)
    assert free == Moves([4], [])


def test_the_margin_is_a_fraction_of_the_mean_heat() -> None:
    """0.5 must exceed 0.2 by 0.25 times the hot set's mean of 0.6, as 0.36 does not; scores of any scale compare."""
    for scale in (1e-12, 1.0, 1e12):
        hot = [True, True, False]
        for score, want in ((0.34, 0), (0.36, 1)):
            scores = [scale * each for each in (1.0, 0.2, score)]
            assert len(changed(scores, hot, [True] * 3, 2, 0.25).promote) == want


@given(blocks=st.integers(0, 5000), count=st.integers(1, 50))
def test_capacity_is_even_and_complete(blocks: int, count: int) -> None:
    """Every block belongs to a layer, and no two layers differ by more than one."""
    each = capacity(blocks, count)
    assert len(each) == count
    assert sum(each) == blocks
    assert max(each) - min(each) <= 1
