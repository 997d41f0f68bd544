"""The checkpoint of a model and the head that was trained on it: its config, and the names of its tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from edgemoe.errors import UserError
from edgemoe.families.head import HeadFamily, head_family
from edgemoe.families.table import family_of
from edgemoe.storage.convert.config import bounded_config
from tools.training.head_model import TrainedHead
from tools.training.model import DEMO_FAMILY

CARRIER = "mellum"
"""A family whose modules compute what qwen3_moe's compute, and whose checkpoints have a head."""

COMPANIONS = ("tokenizer*", "chat_template*", "generation_config.json", "special_tokens_map.json")
"""Files of a checkpoint that are copied."""


def carried(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint with a head, made of a model's config.json.

    Raises:
        UserError: the model has windows or layers without experts, which qwen3_moe names in another way.
    """
    own = config | {"num_nextn_predict_layers": 1}
    if config["model_type"] != DEMO_FAMILY:
        return own
    if (
        config.get("use_sliding_window")
        or config.get("mlp_only_layers")
        or config["decoder_sparse_step"] != 1
    ):
        raise UserError(
            f"a {DEMO_FAMILY} without windows, whose layers all have experts",
            "another one",
            "name another --model",
        )
    left_out = ("architectures", "decoder_sparse_step", "mlp_only_layers", "use_sliding_window")
    layers = config["num_hidden_layers"]
    return {key: value for key, value in own.items() if key not in left_out} | {
        "model_type": CARRIER,
        "architectures": ["MellumForCausalLM"],
        "rope_parameters": {"full_attention": config["rope_parameters"]},
        "layer_types": ["full_attention"] * layers,
        "mlp_layer_types": ["sparse"] * layers,
        "mtp_layer_types": ["full_attention"],
        "mtp_mlp_layer_types": ["sparse"],
    }


def head_of(config: dict[str, Any], directory: Path) -> HeadFamily:
    """The head of a config.

    Raises:
        UserError: edgemoe reads no head of this family. ModelRefused: edgemoe does not run it.
    """
    bounded = bounded_config(config)
    head = head_family(family_of(bounded, directory), bounded)
    if head is None:
        raise UserError(
            "a model of a family with a head for further tokens", config["model_type"], "name another --model"
        )
    return head


def write_start(source: Path, config: dict[str, Any], directory: Path) -> None:
    """Writes the checkpoint without its head: the model's tensors in one file, its new config and its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            shutil.copy(path, directory / path.name)
    tensors = dict[str, torch.Tensor]()
    for path in sorted(source.glob("model*.safetensors")):
        tensors |= load_file(path)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def save_head(directory: Path, family: HeadFamily, trained: TrainedHead) -> None:
    """Writes the head's tensors into the checkpoint, in place of the ones of an earlier call."""
    path = directory / "model.safetensors"
    tensors = load_file(path) | in_checkpoint(trained, family)
    partial_file = path.with_suffix(".partial")
    save_file(tensors, partial_file, {"format": "pt"})
    partial_file.replace(path)


def in_checkpoint(trained: TrainedHead, family: HeadFamily) -> dict[str, torch.Tensor]:
    """The head's tensors in bf16, with the names that published checkpoints of its family have."""
    made = dict[str, torch.Tensor]()
    for name, value in trained.head.state_dict().items():
        tensor = value.detach().to("cpu", torch.bfloat16)
        before, experts, part = name.rpartition(".experts.")
        if not experts or "shared" in before or "." in part:
            made[family.in_checkpoint(name)] = tensor
        else:
            for expert, each in enumerate(tensor):
                names = family.separate(family.layer, expert) or ()
                own = names[-1:] if part == "down_proj" else names[:-1]
                made |= dict(zip(own, each.chunk(len(own)), strict=True))
    return {name: tensor.contiguous() for name, tensor in made.items()}
