"""Tensors of a checkpoint that no module has: harmless ones are left out, others are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgemoe.errors import ModelRefused
from edgemoe.models.conversion.run import convert_checkpoint

Tensors = dict[str, torch.Tensor]
ATTENTION = "model.layers.0.self_attn."
UNUSED = (
    "k_proj.k_scale",
    "v_proj.v_scale",
    "kv_scale",
    "attn.q_scale",
    "o_proj.output_scale",
    "q_proj.input_scale",
)


@pytest.fixture
def convert(checkpoint, tmp_path) -> Callable[[Callable[[Tensors], None]], Path]:
    """Converts a copy of the tiny checkpoint with other tensors."""

    def made(edit: Callable[[Tensors], None]) -> Path:
        source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
        tensors = load_file(source / "model.safetensors")
        edit(tensors)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
        return tmp_path / "store"

    return made


def add_what_changes_nothing(tensors: Tensors) -> None:
    """Scales of what edgemoe does not quantize, rotary frequencies, and zeros as bias next to every matrix."""
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight"):
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
    tensors |= {ATTENTION + name: torch.ones(1) for name in UNUSED}
    tensors["model.rotary_emb.inv_freq"] = torch.ones(8)


@pytest.mark.e2e
def test_what_changes_nothing_is_left_out(convert, open_engine, tiny_store):
    """The model has the logits of the checkpoint without it."""
    found, want = open_engine(convert(add_what_changes_nothing)), open_engine(tiny_store)
    tokens = [5, 17, 90, 201]
    assert torch.equal(
        found.prefill(found.sequences.new(), tokens), want.prefill(want.sequences.new(), tokens)
    )


def test_a_bias_of_an_expert_is_refused(convert):
    """It would change the answer."""

    def edit(tensors: Tensors) -> None:
        add_what_changes_nothing(tensors)
        next(value for name, value in tensors.items() if ".experts.3." in name and name.endswith("bias"))[
            0
        ] = 1

    with pytest.raises(ModelRefused, match=r"experts\.3\..*bias"):
        convert(edit)


@pytest.mark.e2e
def test_a_bias_of_attention_is_refused(convert, open_engine):
    """At the latest where the model is opened."""

    def edit(tensors: Tensors) -> None:
        add_what_changes_nothing(tensors)
        tensors[f"{ATTENTION}q_proj.bias"][1] = 0.5

    with pytest.raises(ModelRefused, match=r"q_proj\.bias"):
        open_engine(convert(edit))


def test_other_tensors_are_refused(convert):
    """Nothing else is passed over."""
    with pytest.raises(ModelRefused, match="lora_scale"):
        convert(lambda tensors: tensors.update({f"{ATTENTION}lora_scale": torch.ones(1)}))
