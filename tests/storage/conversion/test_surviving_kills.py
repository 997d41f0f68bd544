"""SIGKILL at random moments of a real conversion: the next run ends with the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_checkpoint

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]

KILLS = 80


def test_kills_at_random_moments(tmp_path):
    """A conversion that is killed at any moment resumes to the bytes of an uninterrupted one."""
    source = small_checkpoint.save(tmp_path / "model")
    memory = Path("/dev/shm")
    work = memory if os.access(memory, os.W_OK) else tmp_path
    options = ("--model", str(source), "--kills", str(KILLS), "--work", str(work))
    done = subprocess.run(
        [sys.executable, "-m", "tools.reliability.kills", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["killed"], result["wrong"]) == (KILLS, [])
    assert result["states"] >= 6, "the kills did not fall into different moments"
