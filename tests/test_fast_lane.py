"""Tests without a mark start no process."""

from __future__ import annotations

import subprocess

import fast_lane
import pytest


def test_a_fast_test_cannot_start_a_process() -> None:
    """A program is refused with the mark that the test lacks, and so is any other start that is guarded."""
    with pytest.raises(AssertionError, match="the mark e2e"):
        subprocess.run(["true"], check=True)
    with pytest.raises(AssertionError, match="the mark e2e"):
        fast_lane.guarded(lambda: 1)()


@pytest.mark.e2e
def test_a_test_with_the_mark_can_start_one() -> None:
    """A program runs."""
    subprocess.run(["true"], check=True)
    assert fast_lane.guarded(lambda: 1)() == 1
