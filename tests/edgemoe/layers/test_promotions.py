"""layers.graph.promotions: which experts move, and which stay where they are."""

from __future__ import annotations

import numpy as np

from edgemoe.layers.graph.promotions import HALF_LIFE, MOST, Promotions
from edgemoe.storage.base import ExpertKey

HOT, WARM = ExpertKey(0, 0), ExpertKey(0, 1)


def promotions_after(times: int, resident_times: int) -> Promotions:
    """Experts 0 and 1 of layer 0 were used so often, and the residents of layer 1 so often."""
    promotions = Promotions(layers=2, experts=8)
    for _ in range(times):
        promotions.note([0], np.array([[0, 1]]))
    for _ in range(resident_times):
        promotions.note([1], np.array([[2, 3]]))
    return promotions


LEVELS = np.zeros((2, 8), np.int64)
LEVELS[1, 2:4] = 4


def test_only_a_hotter_expert_moves():
    """Equal heat moves none, so that two experts do not take turns; free blocks take what comes."""
    assert promotions_after(3, 3).choose([(HOT, 4)], LEVELS) == {}
    assert promotions_after(6, 3).choose([(HOT, 4)], LEVELS) == {HOT: 4}
    assert promotions_after(1, 0).choose([(HOT, 4)], np.zeros_like(LEVELS)) == {HOT: 4}


def test_uses_fade():
    """An expert that was hot loses to one that is used now."""
    promotions = promotions_after(10, 0)
    for _ in range(8 * HALF_LIFE):
        promotions.note([0], np.array([[4]]))
    promotions.note([1], np.array([[2]]))
    promotions.note([1], np.array([[3]]))
    assert promotions.choose([(HOT, 4)], LEVELS) == {}


def test_the_residents_at_the_level_are_compared():
    """An expert that is resident at fewer bits is no rival: none of its blocks of the higher plane could be freed."""
    promotions = promotions_after(2, 3)
    low = LEVELS.copy()
    low[0, 5] = 2
    assert promotions.choose([(HOT, 4)], low) == {}
    assert promotions.choose([(HOT, 2)], low) == {HOT: 2}


def test_few_move_at_a_time_the_hottest_first():
    """At most MOST, and each replaces another resident."""
    promotions = Promotions(layers=1, experts=64)
    for expert in range(16):
        for _ in range(expert + 1):
            promotions.note([0], np.array([[expert]]))
    away = [(ExpertKey(0, expert), 4) for expert in range(16)]
    chosen = promotions.choose(away, np.zeros((1, 64), np.int64))
    assert list(chosen) == [ExpertKey(0, expert) for expert in range(15, 15 - MOST, -1)]
    one = np.zeros((1, 64), np.int64)
    one[0, 40:60] = 4
    assert len(promotions.choose(away, one)) == MOST
