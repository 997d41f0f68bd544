"""Families, derived from transformers' modules, against what transformers itself writes and builds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from family_models import SEPARATE, SMALL, random_model, save, small_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from edgemoe.errors import ModelRefused
from edgemoe.families.base import Family
from edgemoe.families.table import family_of, traits_of
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.resolve import resolve_store
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.files.header import read_header


def derived(model_type: str, **changes: object) -> Family:
    """The family of a small model's config."""
    return family_of(bounded_config(small_config(model_type, **changes).to_dict()))


def test_names_are_those_that_transformers_saves(checkpoint, fused_checkpoint):
    """Exactly the tensors that transformers wrote for experts are expert names, in both forms."""
    for directory in (checkpoint, fused_checkpoint):
        opened = Checkpoint.open(directory)
        expected = {name for name in opened.names() if ".mlp.experts." in name}
        assert expected
        assert ExpertWeights(opened, family_of(opened.config)).names == expected


def test_routers_are_the_gates_of_moe_layers(checkpoint):
    """mlp.gate of the two MoE layers is a router; the dense layer's gate_proj is not."""
    opened = Checkpoint.open(checkpoint)
    family = family_of(opened.config)
    routers = [name for name in sorted(opened.names()) if family.is_router(name)]
    assert routers == ["model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"]


def built_moe_layers(model_type: str, **changes) -> tuple[int, ...]:
    """The layers of transformers' model that have experts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(model_type, **changes))
    layers = enumerate(model.model.layers)
    return tuple(i for i, layer in layers if any(hasattr(part, "_apply_gate") for part in layer.modules()))


STARTS = {
    "qwen3_moe": [
        {"decoder_sparse_step": step, "mlp_only_layers": dense, "num_hidden_layers": 6}
        for step, dense in ((2, []), (3, []), (1, [0, 5]), (2, [1, 2]))
    ],
    "ernie4_5_moe": [
        {"moe_layer_start_index": 0},
        {"moe_layer_start_index": 2, "moe_layer_interval": 2, "num_hidden_layers": 7},
        {"moe_layer_start_index": 1, "moe_layer_end_index": 3, "num_hidden_layers": 6},
    ],
    **{
        name: [{"first_k_dense_replace": n} for n in (0, 2)]
        for name in ("deepseek_v2", "deepseek_v3", "glm4_moe")
    },
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [(name, {}) for name in SMALL] + [(name, one) for name, several in STARTS.items() for one in several],
)
def test_moe_layers_are_those_that_transformers_builds(model_type, changes):
    """A layer has experts where transformers' model has them, in every family, with default values left out or not."""
    expected = built_moe_layers(model_type, **changes)
    assert expected
    assert derived(model_type, **changes).moe_layers == expected


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("deepseek_v3", {"first_k_dense_replace": "1"}),
        ("ernie4_5_moe", {"moe_layer_start_index": [1, 1]}),
        ("ernie4_5_moe", {"moe_layer_interval": 0}),
        ("qwen3_moe", {"mlp_only_layers": 1}),
        ("qwen3_moe", {"num_experts": [8]}),
        ("qwen3_moe", {"moe_intermediate_size": 1 << 40}),
    ],
)
def test_keys_of_a_wrong_kind_are_refused(model_type, changes):
    """A key of the wrong kind, or an absurd size, is an error of the model that names config.json."""
    config = small_config(model_type).to_dict() | changes
    with pytest.raises(ModelRefused, match=r"config\.json"):
        family_of(bounded_config(config))


def test_a_model_whose_layers_are_all_dense_is_refused():
    """A config that leaves no layer with experts is one of a dense model."""
    with pytest.raises(ModelRefused, match="dense"):
        derived("deepseek_v3", first_k_dense_replace=3)


def test_unknown_model_type_is_refused_by_name():
    """The message has the model type that was found and every one that is known."""
    with pytest.raises(ModelRefused, match=r"'tiny_llama'.*qwen3_moe"):
        family_of({"model_type": "tiny_llama"})


def test_llama4_is_refused_with_its_reason_and_the_list():
    """The message has the reason and the list of supported families."""
    with pytest.raises(
        ModelRefused, match=r"'llama4'; its experts are one product.*deepseek_v2, .*qwen3_next"
    ):
        traits_of("llama4")


@pytest.mark.covers("llama4")
@pytest.mark.parametrize("model_type", ["llama4", "dbrx", "qwen3"])
def test_an_unknown_family_is_refused_before_any_work(tmp_path, model_type):
    """A directory with a config.json of another family, nested or not, and no weights is refused by that name."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": {}}))
    with pytest.raises(ModelRefused, match=rf"'{model_type}'.*mixtral"):
        convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    with pytest.raises(ModelRefused, match=rf"'{model_type}'.*mixtral"):
        resolve_store(source)
    assert list(tmp_path.iterdir()) == [source]


def test_dots_of_a_template_match_only_dots():
    """Templates are names, not patterns."""
    family = derived("qwen3_moe")
    assert not replace(family, router_name="a.{layer}").is_router("ax1")
    assert not family.is_expert("model.layers.x.mlp.experts.down_proj")


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", SMALL)
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_names_of_every_family_are_those_that_transformers_saves(tmp_path, model_type, fused):
    """Expert names cover all expert weights, router names are found, and every other name has a module."""
    model = random_model(model_type)
    names = Checkpoint.open(save(model, tmp_path / "model", fused=fused)).names()
    family = family_of(model.config.to_dict())
    experts = {name for name in names if family.is_expert(name)}
    layers = family.moe_layers
    wanted = {name for layer in layers for pair in family.fused(layer) for name in pair}
    if not fused and model_type in SEPARATE:
        wanted = {name for layer in layers for e in range(8) for name in family.separate(layer, e) or ()}
    assert experts
    assert experts <= wanted
    assert len(experts) == (len(wanted) if model_type in SEPARATE else 2 * len(layers))
    assert sum(family.is_router(name) for name in names) == len(layers)
    modules = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert {family.in_modules(name) for name in names - experts} <= modules
    if not fused:
        assert {family.in_checkpoint(family.in_modules(name)) for name in names - experts} == names - experts


@pytest.mark.parametrize("model_type", SMALL)
def test_precise_tensors_are_those_that_transformers_keeps_in_float32(model_type):
    """A dense tensor stays float32 exactly where transformers' bf16 model has it in float32."""
    model, family = random_model(model_type), derived(model_type)
    kept = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    assert {name for name in model.state_dict() if family.keeps_precision(name)} == kept


AHEAD = {
    "deepseek_v3": "model.layers.3.enorm.weight",
    "glm4_moe": "model.layers.3.eh_proj.weight",
    "qwen3_next": "mtp.layers.0.mlp.experts.1.up_proj.weight",
    "ernie4_5_moe": "model.mtp_block.0.mlp.up_proj.weight",
    "mixtral": "model.layers.2.self_attn.rotary_emb.inv_freq",
}


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", AHEAD)
def test_tensors_outside_the_model_are_left_out_of_its_store(tmp_path, model_type):
    """A checkpoint with a tensor of multi-token prediction or of old rotary code is converted without it."""
    source = save(random_model(model_type), tmp_path / "model", fused=False)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {AHEAD[model_type]: torch.full((8,), torch.nan)}, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    assert AHEAD[model_type] not in read_header(tmp_path / "store" / "dense.safetensors").tensors


def test_unexplained_layers_are_refused(tmp_path):
    """Layers beyond the layers for prediction that config.json announces are refused."""
    source = save(random_model("deepseek_v3"), tmp_path / "model", fused=False)
    tensors = load_file(source / "model.safetensors")
    more = {"model.layers.4.mlp.experts.0.up_proj.weight": torch.zeros(32, 64)}
    save_file(tensors | more, source / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"layers\.4\."):
        ExpertWeights(Checkpoint.open(source), derived("deepseek_v3"))
