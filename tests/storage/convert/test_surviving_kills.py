"""SIGKILL at random moments of a real conversion: the next run ends with the same bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import small_checkpoint
from programs import random_kills

pytestmark = pytest.mark.e2e


def test_kills_at_random_moments(tmp_path):
    """A conversion that is killed at any moment resumes to the bytes of an uninterrupted one."""
    memory = Path("/dev/shm")
    work = memory if os.access(memory, os.W_OK) else tmp_path
    assert random_kills(small_checkpoint.save(tmp_path / "model"), work, 14) >= 2, (
        "kills fell into too few moments"
    )
