"""Dense weights in huge pages: by the operating system's count, and not a byte of them changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from edgemoe.layers.dense import in_huge_pages

SMAPS = Path("/proc/self/smaps_rollup")
LARGE = 16 << 20


def in_huge() -> int:
    """Bytes of this process's own memory that lie in huge pages."""
    found = re.search(r"AnonHugePages:\s+(\d+) kB", SMAPS.read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not say what lies in huge pages")
def test_large_tensors_come_to_lie_in_huge_pages():
    """All but the ends of a large one; a view and a small one change nothing."""
    large, small = torch.arange(LARGE // 4, dtype=torch.int32), torch.arange(100)
    before = in_huge()
    in_huge_pages([large, large[7:], small])
    if in_huge() == before:
        pytest.skip("the system has no huge pages to give")
    assert in_huge() - before >= LARGE - (4 << 20)
    assert torch.equal(large, torch.arange(LARGE // 4, dtype=torch.int32))
    assert torch.equal(small, torch.arange(100))


def test_nothing_to_move_is_no_fault():
    """No tensor, an empty one, and one that is smaller than a huge page."""
    in_huge_pages([])
    in_huge_pages([torch.empty(0), torch.ones(1000)])
