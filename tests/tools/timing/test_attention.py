"""tools/timing/attention.py: the rows of its table."""

from __future__ import annotations

from tools.timing import attention


def test_every_kernel_has_its_rows(capsys):
    """The table has a row for each kernel and number of tokens, and no best time above its median."""
    attention.main(["--tokens", "2", "70", "--rounds", "2"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[1] for row in rows] == ["2", "70"] * (len(rows) // 2)
    assert rows[-1][0] == "torch"
    assert all(0 < float(best) <= float(median) for *_, median, best in rows)
