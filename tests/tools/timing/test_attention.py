"""tools/timing/attention.py: a row for every way and number of tokens."""

from __future__ import annotations

from tools.timing import attention as time_attention


def test_every_way_has_its_rows(capsys):
    """Times in milliseconds, the best of them no longer than the median."""
    time_attention.main(["--tokens", "2", "70", "--rounds", "2"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[1] for row in rows] == ["2", "70"] * (len(rows) // 2)
    assert rows[-1][0] == "torch"
    assert all(0 < float(best) <= float(median) for *_, median, best in rows)
