"""tools/timing/attention.py: the rows of its table."""

from __future__ import annotations

import pytest
from availability import needs_native

from edgemoe.kernels.native import paths
from edgemoe.kv.rows import encode
from tools.timing import attention


def test_every_kernel_has_its_rows(capsys):
    """The table has a row for each kernel and number of tokens, and no best time above its median."""
    attention.main(["--tokens", "2", "70", "--rounds", "2"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[1] for row in rows] == ["2", "70"] * (len(rows) // 2)
    assert rows[-1][0] == "torch"
    assert all(0 < float(best) <= float(median) for *_, median, best in rows)


@needs_native
@pytest.mark.parametrize("form", ["bf16", "q8_0"])
def test_a_token_behind_others_has_a_row_for_each_path(capsys, monkeypatch, form):
    """The compiled kernel alone has rows, over 71 keys and values of each of 4 heads in the given format."""
    stored = []

    def encoded(kind, rows):
        stored.append((kind, tuple(rows.shape)))
        return encode(kind, rows)

    monkeypatch.setattr(attention, "encode", encoded)
    options = ["--tokens", "1", "--behind", "70", "--heads", "4", "--kv-heads", "4", "--rounds", "1"]
    attention.main([*options, "--kv-cache", form])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    wanted = [f"native, {path}" for path in reversed(paths.candidates("attention", "1"))]
    assert [row[0] for row in rows] == wanted
    assert set(stored) == {(form, (4, 71, 128))}
