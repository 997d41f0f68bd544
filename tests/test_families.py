"""Model families: names and config keys against what transformers itself writes and builds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from edgemoe.families import FAMILIES, Family, family_of
from storage.checkpoint import Checkpoint
from storage.errors import ModelRefused
from storage.expert_weights import ExpertWeights

QWEN3 = FAMILIES["qwen3_moe"]
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "hidden_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_names_are_those_that_transformers_saves(checkpoint, fused_checkpoint):
    """Exactly the tensors that transformers wrote for experts are expert names, in both forms."""
    for directory in (checkpoint, fused_checkpoint):
        opened = Checkpoint.open(directory)
        expected = {name for name in opened.names() if ".mlp.experts." in name}
        assert expected
        assert ExpertWeights(opened, family_of(opened.config)).names == expected


def test_routers_are_the_gates_of_moe_layers(checkpoint):
    """mlp.gate of the two MoE layers is a router; the dense layer's gate_proj is not."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        routers = [name for name in sorted(file.keys()) if QWEN3.is_router(name)]
    assert routers == ["model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"]


@pytest.mark.parametrize(
    ("step", "dense"), [(1, []), (2, []), (3, []), (1, [0, 5]), (2, [1, 2])], ids=lambda value: str(value)
)
def test_moe_layers_are_those_that_transformers_builds(step, dense):
    """A layer has experts exactly where transformers' model built from the same config has them."""
    config = Qwen3MoeConfig(
        **{k: v for k, v in CONFIG.items() if k != "model_type"},
        decoder_sparse_step=step,
        mlp_only_layers=dense,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = tuple(i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts"))
    assert QWEN3.moe_layers(CONFIG | {"decoder_sparse_step": step, "mlp_only_layers": dense}) == expected


def test_unknown_model_type_is_refused_by_name():
    """The message has the model type that was found and every one that is known."""
    with pytest.raises(ModelRefused, match=r"'tiny_llama'.*qwen3_moe"):
        family_of(CONFIG | {"model_type": "tiny_llama"})


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_key_that_the_family_needs_must_be_there(key):
    """A config without one of the sizes of its experts is refused, naming the key."""
    with pytest.raises(ModelRefused, match=key):
        family_of({k: v for k, v in CONFIG.items() if k != key})


def test_expert_counts_that_disagree_are_refused():
    """Both spellings may be there only with the same number."""
    assert QWEN3.experts(CONFIG | {"num_local_experts": 4}) == 4
    with pytest.raises(ModelRefused, match="num_local_experts"):
        QWEN3.experts(CONFIG | {"num_local_experts": 5})


def test_mlp_only_layers_must_be_a_list():
    """A value that is no list is refused, not iterated."""
    with pytest.raises(ModelRefused, match="mlp_only_layers"):
        QWEN3.moe_layers(CONFIG | {"mlp_only_layers": "01"})


def test_a_new_family_is_only_a_row(monkeypatch):
    """A family with w1, w3, w2 and other keys works from a row of the table alone."""
    row = Family(
        model_type="madeup",
        experts_keys=("num_local_experts",),
        top_k_key="num_experts_per_tok",
        intermediate_key="intermediate_size",
        sparse_layers=lambda config: tuple(range(config["num_hidden_layers"])),
        gate="model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        up="model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
        down="model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
        fused_gate_up="model.layers.{layer}.block_sparse_moe.experts.w13",
        fused_down="model.layers.{layer}.block_sparse_moe.experts.w2",
        router="model.layers.{layer}.block_sparse_moe.gate.weight",
    )
    monkeypatch.setitem(FAMILIES, row.model_type, row)
    config = {"model_type": "madeup", "num_hidden_layers": 2, "num_local_experts": 3}
    config |= {"num_experts_per_tok": 1, "intermediate_size": 24}
    family = family_of(config)
    assert (family.experts(config), family.intermediate(config), family.moe_layers(config)) == (3, 24, (0, 1))
    assert family.separate(1, 2) == (
        "model.layers.1.block_sparse_moe.experts.2.w1.weight",
        "model.layers.1.block_sparse_moe.experts.2.w3.weight",
        "model.layers.1.block_sparse_moe.experts.2.w2.weight",
    )
    assert family.is_expert("model.layers.0.block_sparse_moe.experts.2.w2.weight")
    assert family.is_router("model.layers.11.block_sparse_moe.gate.weight")


def test_dots_of_a_template_match_only_dots():
    """Templates are names, not patterns."""
    assert not replace(QWEN3, router="a.{layer}").is_router("ax1")
    assert not QWEN3.is_expert("model.layers.x.mlp.experts.down_proj")
