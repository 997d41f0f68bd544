"""CPU features, against the kernel's own list."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgemoe.machine.cpu import fast_bf16

CPUINFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(not CPUINFO.exists(), reason="needs /proc/cpuinfo")
def test_fast_bf16_agrees_with_the_kernels_flags():
    """AVX512-BF16 or AMX, and neither of them, as /proc/cpuinfo lists them."""
    flags = set(CPUINFO.read_text().split())
    assert fast_bf16() == bool(flags & {"avx512_bf16", "amx_tile"})
