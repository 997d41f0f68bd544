"""Tensors in huge pages: by the operating system's count, with every byte unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from edgemoe.machine.huge_pages import in_huge_pages

SMAPS = Path("/proc/self/smaps_rollup")
LARGE = 16 << 20


def huge_bytes() -> int:
    """Bytes of this process's anonymous memory that lie in huge pages."""
    found = re.search(r"AnonHugePages:\s+(\d+) kB", SMAPS.read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not count huge pages")
def test_large_tensors_move_into_huge_pages():
    """A large tensor moves except for its ends; its view and a small tensor are accepted, and no byte changes."""
    large, small = torch.arange(LARGE // 4, dtype=torch.int32), torch.arange(100)
    before = huge_bytes()
    in_huge_pages([large, large[7:], small])
    if huge_bytes() == before:
        pytest.skip("the system grants no huge pages")
    assert huge_bytes() - before >= LARGE - (4 << 20)
    assert torch.equal(large, torch.arange(LARGE // 4, dtype=torch.int32))
    assert torch.equal(small, torch.arange(100))


def test_small_tensors_are_accepted():
    """No tensor, an empty one, and one smaller than a huge page are no error."""
    in_huge_pages([])
    in_huge_pages([torch.empty(0), torch.ones(1000)])
