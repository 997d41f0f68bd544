"""tools.timing.dense_bits: a row per number of bits, whose bytes fall with the bits."""

from __future__ import annotations

import pytest

from tools.synthetic import family_sizes
from tools.timing import dense_bits

SIZES = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.e2e
@pytest.mark.folders
def test_rows_of_one_model(tmp_path, monkeypatch, capsys):
    """The first row is compared with itself; every row has times, and fewer bits have fewer bytes."""
    name = "qwen3-30b-a3b"
    monkeypatch.setitem(family_sizes.MODELS, name, ("qwen3_moe", SIZES | {"num_experts_per_tok": 2}))
    options = ["--layers", "2", "--experts", "8", "--after", "5", "--tokens", "5", "--vocab", "400"]
    dense_bits.main([name, *options, "--bits", "16", "6", "4", "--place", str(tmp_path)])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[1] for row in rows] == ["bf16", "6", "4"]
    sizes = [float(row[2]) for row in rows]
    assert sizes[0] > sizes[1] > sizes[2]
    assert all(float(row[3]) > 0 for row in rows)
    assert float(rows[0][5]) == 1
