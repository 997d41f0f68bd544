"""tools/peers/warm_up.py: every program is warmed up for as long."""

from __future__ import annotations

from itertools import count

import pytest

from tools.peers.warm_up import warm_ups

FIRST, SECOND = [1, 2], [3]


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_it_goes_on_for_so_long(seconds, rounds):
    """Whole rounds; the clock goes on by a second with each."""
    ticks = count(100)
    request = {"warm_up": [FIRST, SECOND], "warm_up_s": seconds}
    assert list(warm_ups(request, lambda: next(ticks))) == [FIRST, SECOND] * rounds


def test_a_cold_run_has_none():
    """However long it might be."""
    assert list(warm_ups({"warm_up": [], "warm_up_s": 10})) == []
