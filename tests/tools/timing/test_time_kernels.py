"""tools/timing/kernels.py: a row for every kernel, level and number of tokens, and nothing that would measure none."""

from __future__ import annotations

import pytest

from edgemoe.kernels.native import library as native
from edgemoe.kernels.registry import kernels_for
from tools.timing import kernels as time_kernels


def test_every_way_has_its_rows(capsys):
    """Times in whole microseconds, the best of them no longer than the median."""
    time_kernels.main(["--tokens", "1", "2", "--levels", "4", "8", "--rounds", "2", "--experts", "1"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    own = (
        ["native, VNNI", "native, AVX2"] if native.available() and native.use_vnni(True) else ["native, AVX2"]
    )
    names = [name for way in kernels_for() for name in (own if way.name == "native" else [way.name])]
    cases = [(name, level, tokens) for name in names for level in "48" for tokens in "12"]
    assert [tuple(row[:3]) for row in rows] == cases
    assert all(0 < int(best) <= int(median) for *_, median, best in rows)


@pytest.mark.parametrize(
    ("name", "value"), [("--tokens", "0"), ("--rounds", "0"), ("--experts", "-1"), ("--levels", "3")]
)
def test_what_measures_nothing_is_named(capsys, name, value):
    """It exits 2 before an expert is made."""
    with pytest.raises(SystemExit) as stopped:
        time_kernels.main([name, value])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err
