"""The peak of a model's memory: the program's own memory is no part of it, and it never falls."""

from __future__ import annotations

import pytest

from edgemoe.engine import peak
from edgemoe.engine.peak import PeakMemory


@pytest.fixture
def counts(monkeypatch):
    """The system's counts, in bytes: resident now, at most, and pages of files."""
    found = {"resident": 1000, "most": 1000, "files": 300}
    monkeypatch.setattr(peak, "reset_peak", lambda: True)
    monkeypatch.setattr(peak, "resident_bytes", lambda: found["resident"])
    monkeypatch.setattr(peak, "peak_resident_bytes", lambda: found["most"])
    monkeypatch.setattr(peak, "file_backed_bytes", lambda: found["files"])
    return found


def test_pages_of_libraries_are_no_part_of_it(counts):
    """Pages that become resident at any time, in an answer too, are left out; the model's own memory is not."""
    memory = PeakMemory(None)
    assert memory.bytes == 0
    counts |= {"most": 1500, "files": 500}
    assert memory.bytes == 300
    counts |= {"most": 1900, "files": 900}
    assert memory.bytes == 300
    counts |= {"most": 2400}
    assert memory.bytes == 800


def test_pages_that_come_or_go_later_change_no_peak(counts):
    """Libraries' pages that are touched after the peak change nothing, nor do pages that the system drops."""
    memory = PeakMemory(None)
    counts |= {"most": 1700}
    assert memory.bytes == 700
    counts |= {"files": 600}
    assert memory.bytes == 700
    counts |= {"files": 100}
    assert memory.bytes == 700
