"""tools/timing/low_rank.py, on a small error."""

from __future__ import annotations

import json

import pytest
import torch

from tools.timing import low_rank


def test_shares_are_those_of_the_singular_values(capsys):
    """The exact product takes away what the largest singular values have, and no other takes more."""
    size = ["--rows", "96", "--columns", "192", "--rank", "8", "--rounds", "1"]
    assert low_rank.main([*size, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    exact, *others = found["decompositions"]
    values = torch.linalg.svdvals(torch.randn(96, 192, generator=torch.Generator().manual_seed(0))).square()
    assert exact["taken"] == pytest.approx(float(values[:8].sum() / values.sum()), rel=1e-4)
    assert 0 < others[0]["taken"] < others[1]["taken"] < exact["taken"]
    assert [form["bits"] for form in found["forms"]] == [3.25, 3.5]
    assert all(0.01 < form["lost"] < 0.06 for form in found["forms"])
    assert 0 < found["taken_back"] < 1
    assert low_rank.main(size) == 0
    assert "exact: takes 0." in capsys.readouterr().out


def test_sizes_that_make_no_groups_are_refused():
    with pytest.raises(SystemExit):
        low_rank.main(["--columns", "100"])
