"""tools.timing.families: a store of each model's sizes, and a row of its table."""

from __future__ import annotations

import pytest

from tools.synthetic import family_sizes
from tools.timing import families

pytestmark = pytest.mark.e2e

TINY = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % 5 == 0 else pytest.mark.folders)
        for number, name in enumerate(family_sizes.MODELS)
    ],
)
def test_every_model_has_a_config(name):
    """transformers makes a config of the sizes, and the number of experts is the wanted one."""
    config = family_sizes.config_of(name, 6, 12, 400)
    known = [getattr(config, key, None) for key in ("num_experts", "n_routed_experts", "num_local_experts")]
    assert (config.num_hidden_layers, config.vocab_size) == (6, 400)
    assert 12 in known


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", pytest.param("glm-4.5-air", marks=pytest.mark.folders)])
def test_a_row(name, tmp_path, monkeypatch, capsys):
    """Every model with small matrices: its layers are converted, run in both ways and compared with the bound."""
    model_type, sizes = family_sizes.MODELS[name]
    small = sizes | TINY | ({"intermediate_size": 96} if "intermediate_size" in sizes else {})
    monkeypatch.setitem(family_sizes.MODELS, name, (model_type, small | {"num_experts_per_tok": 2}))
    monkeypatch.setattr(families, "read_memory", lambda: 1e9)
    options = ["--layers", "2", "--experts", "8", "--after", "5", "--tokens", "5", "--vocab", "400"]
    families.main([name, *options, "--place", str(tmp_path)])
    *_, row = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == [name, "5"]
    ms, by_modules, bound = map(float, cells[3:6])
    assert 0 < bound < ms
    assert by_modules > ms / 4
    assert 50 < int(cells[7]) < 200
    families.main([name, *options, "--place", str(tmp_path)])  # the store is there
