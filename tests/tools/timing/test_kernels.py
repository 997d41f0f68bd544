"""tools/timing/kernels.py: the rows of its table, and the numbers that it refuses."""

from __future__ import annotations

import pytest

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from edgemoe.kernels.registry import kernels_for
from tools.timing import kernels


def test_every_kernel_has_its_rows(capsys):
    """Times are whole microseconds, and no best time is above its median."""
    kernels.main(["--tokens", "1", "2", "--levels", "4", "8", "--rounds", "2", "--experts", "1"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    here = reversed(paths.candidates("experts", paths.ROWS[-1])) if native.available() else []
    own = [f"native, {path}" for path in here]
    names = [name for path in kernels_for() for name in (own if path.name == "native" else [path.name])]
    cases = [(name, level, tokens) for name in names for level in "48" for tokens in "12"]
    assert [tuple(row[:3]) for row in rows] == cases
    assert all(0 < int(best) <= int(median) for *_, median, best in rows)


@pytest.mark.parametrize(
    ("name", "value"), [("--tokens", "0"), ("--rounds", "0"), ("--experts", "-1"), ("--levels", "3")]
)
def test_numbers_that_measure_nothing_are_refused(capsys, name, value):
    """The tool exits 2 with the option's name before it makes an expert."""
    with pytest.raises(SystemExit) as stopped:
        kernels.main([name, value])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err
