"""tools.timing.dense: a row for each shape, and a column for each build."""

from __future__ import annotations

import ctypes
import importlib.util

import pytest
from availability import needs_native

from tools.timing import dense

pytestmark = needs_native

SHAPES = ["70x100", "3x40x24", "3x24x40r"]


@pytest.fixture
def few_bytes(monkeypatch):
    """Two small matrices of each shape."""
    monkeypatch.setattr(dense, "BYTES", 1000)


def test_every_shape_has_a_row(capsys, few_bytes):
    """A rate above zero of this build, and of the same one loaded again."""
    library = importlib.util.find_spec("edgemoe.kernels.native._kernels").origin
    dense.main(["--shapes", *SHAPES, "--rounds", "2", "--against", library])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    assert [row[0] for row in rows] == SHAPES
    assert all(len(row) == 3 for row in rows)


def test_other_bits_stop_the_tool(few_bytes, monkeypatch):
    """A build whose results are zeros."""

    class Silent:
        def edgemoe_dense_product(self, pool, weight, x, *sizes):
            ctypes.memset(sizes[2], 0, 2 * sizes[3])

    builds = [(dense.native.library(), dense.native.threads()), (Silent(), None)]
    with pytest.raises(SystemExit, match="same bits"):
        dense.rates("70x100", builds, 1)
