"""A small random model with a head for further tokens, as its checkpoints have it, and transformers' own head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from family_models import LOUDER, random_model, save
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_layers import MtpModel

LAYERS = 3
"""Layers of the model: the head has the number after them."""

_WEIGHTS = "model.safetensors"


def model_with_head(model_type: str, **changes: Any) -> tuple[nn.Module, MtpModel]:
    """A random model of a family, and a random head for it, in bf16."""
    model = random_model(model_type, **changes)
    head = MtpModel(_announcing(model), 1)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in _own(head).items():
            if "norm" in name:
                louder = (
                    2 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1
                )  # attention that knows places
                tensor.copy_(louder + torch.randn_like(tensor) * 0.2)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(8 + torch.randn_like(tensor))
            else:
                spread = 0.3 if "eh_proj" in name else 0.05 * (LOUDER if ".experts." in name else 1)
                tensor.copy_(torch.randn_like(tensor) * spread)
    for name, tensor in [*head.named_parameters(), *head.named_buffers()]:
        if not name.endswith(("e_score_correction_bias", "inv_freq")):
            tensor.data = tensor.data.to(torch.bfloat16)
    return model, head.eval()


def _announcing(model: Any) -> Any:
    """The model, whose config says that it has a head: transformers knows no key for it in some configs."""
    config = model.config
    config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
    if getattr(config, "mtp_layer_types", None) is None:
        config.mtp_layer_types = ["full_attention"]
    return model


def _own(head: MtpModel) -> dict[str, torch.Tensor]:
    """The tensors that are the head's alone."""
    return {name: value for name, value in head.state_dict().items() if name.startswith("layers.0.")}


def save_with_head(
    model: nn.Module, head: MtpModel, directory: Path, *, form: str = "layer", fused: bool = False
) -> Path:
    """Saves a checkpoint whose head has the names of a form (families.base.HEAD_FORMS), `fused` as in `save`."""
    save(model, directory, fused=fused)
    tensors = load_file(directory / _WEIGHTS)
    prefix, names = f"model.layers.{LAYERS}.", {"post_norm": "shared_head.norm"}
    outer = {name: f"{prefix}{names.get(name, name)}" for name in ("enorm", "hnorm", "eh_proj", "post_norm")}
    if form == "mtp":
        prefix = "mtp.layers.0."
        outer = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
        outer |= {"eh_proj": "mtp.fc", "post_norm": "mtp.norm"}
    for name, value in _own(head).items():
        part = name.removeprefix("layers.0.")
        if part.startswith("mtp_block."):
            tensors |= _in_checkpoint(prefix + part.removeprefix("mtp_block."), value, fused=fused)
        else:
            own, _, rest = part.partition(".")
            tensors[f"{outer[own]}.{rest}"] = value
    if form == "layer":
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, directory / _WEIGHTS, {"format": "pt"}
    )
    return directory


def wrap(directory: Path, model_type: str) -> Path:
    """Turns a checkpoint into one of a multimodal model: all tensors but the head's have another prefix."""
    tensors = load_file(directory / _WEIGHTS)
    inner = {name: name.replace("model.", "model.language_model.", 1) for name in tensors}
    renamed = {inner[name] if name.startswith("model.") else name: each for name, each in tensors.items()}
    save_file(renamed, directory / _WEIGHTS, {"format": "pt"})
    text = json.loads((directory / "config.json").read_text())
    whole = {"model_type": model_type, "tie_word_embeddings": False, "text_config": text}
    (directory / "config.json").write_text(json.dumps(whole))
    return directory


def _in_checkpoint(name: str, value: torch.Tensor, *, fused: bool) -> dict[str, torch.Tensor]:
    """A tensor of the head's layer, with one tensor per expert's matrix unless the checkpoint's are fused."""
    before, found, part = name.partition("experts.")
    if not found or fused or "shared_experts" in name:
        return {name: value}
    made: dict[str, torch.Tensor] = {}
    for expert, each in enumerate(value):
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for own, rows in zip(names, each.chunk(len(names)), strict=True):
            made[f"{before}experts.{expert}.{own}.weight"] = rows.clone()
    return made


def guesses_of(head: MtpModel, model: Any, tokens: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """transformers' guesses after some tokens, by one head applied again and again, in float32.

    Returns:
        the likeliest tokens, and the logits [count, vocab] that they come from.
    """
    from transformers.cache_utils import MtpCache

    head, model = head.float(), model.float()
    with torch.inference_mode():
        states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
        cache, rows, drafted = MtpCache(config=head.config), [], list[int]()
        ids, first = torch.tensor([tokens[1:]]), 1
        for _ in range(count):
            at = torch.arange(first, first + ids.shape[1])[None]
            states = head.forward_layer(0, states, at, cache, input_ids=ids)
            rows.append(head._project_to_logits(states[:, -1])[0])
            drafted.append(int(rows[-1].argmax()))
            first, ids, states = first + ids.shape[1], torch.tensor([[drafted[-1]]]), states[:, -1:]
    return drafted, torch.stack(rows)
