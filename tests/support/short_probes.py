"""Benchmarks of a tiny model: bandwidths are measured for a moment, and the process's memory is not."""

from __future__ import annotations

import pytest

from edgemoe.bench import bandwidth
from edgemoe.engine.peak import PeakMemory


def probe_briefly(patch: pytest.MonkeyPatch, *, peak: int | None = None) -> None:
    """Measures bandwidths for 20 ms.

    Args:
        patch: undoes it.
        peak: bytes that an engine's peak is said to be, since the process's own noise exceeds a limit below 1 MB; None:
            the real peak.
    """
    patch.setattr(bandwidth, "PROBE_SECONDS", 0.02)
    patch.setattr(bandwidth, "PROBE_BYTES", 1 << 20)
    if peak is not None:
        patch.setattr(PeakMemory, "bytes", peak)
