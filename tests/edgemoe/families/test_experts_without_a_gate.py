"""Experts without a gate (Nemotron): their matrices in a store, and what refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from folder_models import folder_config, folder_model, save_folder_model
from safetensors import safe_open
from safetensors.torch import load_file

from edgemoe.errors import ModelRefused, UserError
from edgemoe.families.table import family_of
from edgemoe.storage.compensators.making import compensate
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.convert.run import convert
from edgemoe.storage.export.run import export
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def source_and_store(tmp_path_factory) -> tuple[Path, Path]:
    """A small checkpoint, and its store. Not to be changed."""
    directory = tmp_path_factory.mktemp("ungated")
    source = save_folder_model(folder_model("nemotron_h"), directory / "model")
    family = family_of(Checkpoint.open(source).config)
    convert(
        *(source, directory / "store", family),
        **{"max_level": 8, "layout": LAYOUTS["cpu-generic"], "dense_bits": 16},
        progress=lambda done, total: None,
    )
    return source, directory / "store"


def test_a_record_has_an_up_and_a_down_matrix(source_and_store):
    """Both are the checkpoint's own to 8 bits, and no row of the record belongs to a gate."""
    source, store = source_and_store
    manifest = Manifest.load(store)
    sides = [(each.name, each.rows, each.cols) for each in manifest.geometry.matrices]
    assert sides == [("up", 32, 64), ("down", 64, 32)]
    tensors = load_file(source / "model.safetensors")
    for layer, expert in ((1, 0), (3, 7)):
        with safe_open(store / f"experts-{layer:05}.safetensors", "np") as file:
            record = file.get_tensor(f"experts.{layer}.{expert}")
            found = decode(record, manifest.geometry, LAYOUTS["cpu-generic"], 8)
            for part, weights in zip(("up", "down"), found, strict=True):
                want = tensors[f"backbone.layers.{layer}.mixer.experts.{expert}.{part}_proj.weight"].float()
                assert (weights - want).abs().max() < 0.02 * want.abs().max()


def test_what_needs_a_gate_refuses_its_experts(source_and_store, tmp_path):
    """An export and compensators say so before any work."""
    source, store = source_and_store
    family = family_of(Checkpoint.open(source).config)
    with pytest.raises(UserError, match="experts have a gate, for an export"):
        export(store, tmp_path, family, format="safetensors", levels={}, progress=lambda done, total: None)
    with pytest.raises(ModelRefused, match="a gate, for compensators"):
        compensate(
            *(None, store, None),
            **{"base_level": 2, "rule": "uniform", "mean_rank": 8},
            progress=lambda done, total: None,
        )


def test_experts_of_a_projected_state_have_its_size():
    """Where a block projects its states for the experts, their H is the projection's, and the model's stays."""
    config = folder_config("nemotron_h").to_dict() | {"moe_latent_size": 48}
    family = family_of(bounded_config(config))
    assert (family.hidden, family.intermediate, family.gated) == (48, 32, False)
    assert config["hidden_size"] == 64


@pytest.mark.parametrize("kinds", [{"hybrid_override_pattern": "MEM*E"}, {"layers_block_type": ["moe"] * 5}])
def test_layers_are_counted_by_their_kinds(kinds):
    """A list or a pattern of the layers' kinds counts them, whatever number stands next to it."""
    sizes = {"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    for more in ({}, {"num_hidden_layers": 7}):
        assert bounded_config(sizes | kinds | more)["num_hidden_layers"] == 5
