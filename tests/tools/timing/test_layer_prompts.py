"""tools.timing.layer_prompts: a line for each kind of a model's parts that know earlier tokens."""

from __future__ import annotations

import pytest
from availability import needs_native

from tools.synthetic import family_sizes
from tools.timing import layer_prompts

pytestmark = [pytest.mark.e2e, needs_native]

SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 32, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32}
SMALL |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}


@pytest.mark.folders
def test_every_kind_has_a_line(tmp_path, monkeypatch, capsys):
    """Qwen3-Next has gated delta nets and attention; products are a part of the time of either."""
    monkeypatch.setitem(family_sizes.MODELS, "qwen3-next-80b", ("qwen3_next", SMALL))
    options = ["--layers", "4", "--experts", "8", "--tokens", "5", "--runs", "2", "--vocab", "400"]
    layer_prompts.main(["qwen3-next-80b", *options, "--place", str(tmp_path)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sorted(line[-1] for line in lines) == ["GatedDeltaNet", "GroupedQueryAttention"]
    for milliseconds, _, products, *_ in lines:
        assert 0 < float(products) <= float(milliseconds)
