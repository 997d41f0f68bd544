"""tools/timing/products.py: the rows of its table."""

from __future__ import annotations

import shutil

import pytest

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from tools.timing import products

pytestmark = pytest.mark.skipif(
    not native.available() or shutil.which("gcc") is None,
    reason="no compiled kernel, or no gcc on this machine",
)


@pytest.mark.e2e
@pytest.mark.folders
def test_every_path_stands_beside_the_plain_loops(capsys):
    """The plain loops multiply 4-bit codes and multiples of 16 rows only; the choice of paths is left as it was."""
    before = paths.choice()
    products.main(["--rows", "1", "16", "--levels", "4", "8", "--cores", "1", "--rounds", "1"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    own = [f"edgemoe, {path}" for path in paths.candidates("experts", paths.ROWS[-1])]
    plain = [
        f"plain loop, {name}"
        for name, path in (("vnni", "avx512-vnni"), ("amx", "amx"))
        if f"edgemoe, {path}" in own
    ]
    want = [("1", "1", level, name) for level in "48" for name in own]
    want += [("1", "16", "4", name) for name in own + plain] + [("1", "16", "8", name) for name in own]
    assert [tuple(row[:4]) for row in rows] == want
    assert all(float(row[4]) > 0 for row in rows)
    assert paths.choice() == before
