"""tools/peers/warm_up.py: every program warms up for the same minimum time."""

from __future__ import annotations

from itertools import count

import pytest

from tools.peers.warm_up import warm_ups

FIRST, SECOND = [1, 2], [3]


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_warm_up_lasts_its_seconds_in_whole_rounds(seconds, rounds):
    """The clock advances by a second each round."""
    ticks = count(100)
    request = {"warm_up": [FIRST, SECOND], "warm_up_s": seconds}
    assert list(warm_ups(request, lambda: next(ticks))) == [FIRST, SECOND] * rounds


def test_cold_run_has_no_warm_up():
    """Without prompts there is no warm-up, whatever its seconds."""
    assert list(warm_ups({"warm_up": [], "warm_up_s": 10})) == []
