"""The directory of this machine's memory cgroups, and a mark for tests that make some."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
CGROUPS = V1 if V1.is_dir() else V2

needs_cgroup = pytest.mark.skipif(
    not (hasattr(os, "geteuid") and os.geteuid() == 0 and os.access(CGROUPS, os.W_OK)),
    reason="memory cgroups need root and a writable cgroup filesystem",
)
