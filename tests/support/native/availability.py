"""The mark of tests that need the compiled kernel; tests/edgemoe/kernels/test_kernels.py fails where it should run."""

from __future__ import annotations

import pytest

from edgemoe.kernels.native import library as native

needs_native = pytest.mark.skipif(not native.available(), reason="the compiled kernel does not run here")
