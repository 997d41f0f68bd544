"""transformers' model over a store: dense weights in memory, experts behind the hooks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from edgemoe.engine.fused_model import NewTokenModel
from edgemoe.experts import layer as experts
from edgemoe.experts.layer import ExpertLayer, ExpertRunner
from edgemoe.experts.token import TokenExperts
from edgemoe.families.table import known_family
from edgemoe.layers import attention
from edgemoe.layers.dense import DenseEmbedding, DenseLinear, DenseNorm, in_huge_pages, load_dense
from edgemoe.layers.fused_decode import NewTokenLayers
from edgemoe.layers.gqa import PlainAttention
from edgemoe.layers.linear_attention import PerSequence
from edgemoe.layers.router import SoftmaxRouter
from storage.device import Device
from storage.errors import MissingTensor, ModelRefused

SCALE_SUFFIX = "_scale"
"""A tensor `name` at 8 bits has its row scales in `name` + this."""


def skeleton(directory: Path) -> nn.Module:
    """The model of a store without any weights: transformers' modules on the meta device.

    Brings in the code of the model's class, which is the program's memory and not the model's.

    Args:
        directory: with config.json.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.NAME, trust_remote_code=False
        )
    return model


def build_model(model: Any, dense: Path, runner: ExpertRunner, device: Device | None = None) -> nn.Module:
    """Makes a skeleton ready to run, with every expert left where `runner` finds it.

    Args:
        model: of `skeleton`.
        dense: the store's dense.safetensors.
        runner: shared by all MoE layers.
        device: whose memory dense weights are put into; None: RAM.

    Raises:
        MissingTensor: a parameter that the config asks for is not in the store.
        ModelRefused: the architecture has parts that are not understood.
    """
    model.set_experts_implementation(experts.NAME)
    modules = _without_weights(model)
    family = known_family(model.config.model_type)
    tensors = {family.in_modules(name): tensor for name, tensor in load_dense(dense, device).items()}
    _place_dense(model, tensors, tied=bool(model.config.tie_word_embeddings))
    _place_buffers(model, device.place if device else None)
    _bind_experts(model, modules, runner)
    _bind_linear_attention(model)
    _place_norms(model)
    if family.plain_attention:
        _place_quick_ways(model)
    if device is None:
        in_huge_pages(model.parameters())
    return model.eval()  # type: ignore[no-any-return]


def _without_weights(model: nn.Module) -> dict[int, str]:
    """Drops the (meta) weights of every experts module, but not its biases. Returns layer -> the module's name."""
    found = {}
    for name, module in model.named_modules():
        if not hasattr(module, "_apply_gate"):
            continue
        if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
            raise ModelRefused(
                f"the experts of {name} were wanted",
                "they have no gate, or a norm behind them",
                "This version runs experts with one gate_up and one down matrix",
            )
        match = re.search(r"\.layers\.(\d+)\.", name)
        assert match, name
        for parameter in [p for p, _ in module.named_parameters(recurse=False)]:
            if not parameter.endswith("_bias"):
                delattr(module, parameter)
        found[int(match[1])] = name
    return dict(sorted(found.items()))


def _bind_experts(model: nn.Module, modules: dict[int, str], runner: ExpertRunner) -> None:
    """Tells every experts module its layer, the runner, and the next one's router."""
    following: list[int | None] = [*list(modules)[1:], None]
    for (layer, name), after in zip(modules.items(), following, strict=True):
        next_layer = None
        if after is not None:
            block: Any = model.get_submodule(modules[after].rpartition(".")[0])
            router = block.gate if hasattr(block, "gate") else block.router
            next_layer = after, DenseLinear(router.weight.detach().to(torch.bfloat16), None, None)
        experts_module: Any = model.get_submodule(name)
        bound = ExpertLayer(layer, runner, next_layer)
        experts_module.edgemoe = replace(bound, of_one_token=TokenExperts.like(experts_module, bound))


def _place_dense(model: nn.Module, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
    """Puts every dense tensor where it belongs; nothing may be missing and nothing left over."""
    if tied and "lm_head.weight" not in tensors:
        for suffix in ("", SCALE_SUFFIX):
            if (table := tensors.get("model.embed_tokens.weight" + suffix)) is not None:
                tensors["lm_head.weight" + suffix] = table
    missing = []
    for name, module in list(model.named_modules()):
        # Not their subclasses: some routers are linear layers that do more.
        if type(module) in (nn.Linear, nn.Embedding):
            weight = tensors.pop(f"{name}.weight", None)
            scale = tensors.pop(f"{name}.weight{SCALE_SUFFIX}", None)
            if weight is None or weight.shape != module.weight.shape:
                missing.append(f"{name}.weight")
            elif isinstance(module, nn.Embedding):
                model.set_submodule(name, DenseEmbedding(weight, scale))
            else:
                bias = None
                if module.bias is not None:
                    bias = tensors.pop(f"{name}.bias", None)
                    if bias is None or bias.shape != module.bias.shape:
                        missing.append(f"{name}.bias")
                model.set_submodule(name, DenseLinear(weight, scale, bias))
            continue
        for parameter, current in _kept(module):
            value = tensors.pop(f"{name}.{parameter}", None)
            if value is None or value.shape != current.shape:
                missing.append(f"{name}.{parameter}")
            elif isinstance(current, nn.Parameter):
                setattr(module, parameter, nn.Parameter(value, requires_grad=False))
            else:
                setattr(module, parameter, value)
    if missing:
        raise MissingTensor(
            f"{len(missing)} dense tensors of {type(model).__name__} were wanted, first {missing[0]}",
            "the store has none of that name and shape",
            "Convert the model again from a complete checkpoint",
        )
    if tensors:
        raise ModelRefused(
            f"a place for every dense tensor in {type(model).__name__} was wanted",
            f"{len(tensors)} have none, first {min(tensors)}",
            "Check that config.json belongs to this checkpoint",
        )


def _kept(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters, and the buffers that checkpoints hold."""
    buffers = [
        b for b in module.named_buffers(recurse=False) if b[0] not in module._non_persistent_buffers_set
    ]
    return [*module.named_parameters(recurse=False), *buffers]


def _bind_linear_attention(model: nn.Module) -> None:
    """Lets every linear-attention module see one sequence at a time."""
    for name, module in list(model.named_modules()):
        if name.endswith(".linear_attn"):
            model.set_submodule(name, PerSequence(module, module.layer_idx))


def _place_norms(model: nn.Module) -> None:
    """Replaces the norms that edgemoe has a quicker way for."""
    for name, module in list(model.named_modules()):
        norm = DenseNorm.like(module)
        if norm is not None:
            model.set_submodule(name, norm)


def _place_quick_ways(model: Any) -> None:
    """Puts a quicker way before every attention module and router, and for new tokens every layer, that it fits."""
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        if attention_module := PlainAttention.like(layer.self_attn):
            layer.self_attn = attention_module
        if router := SoftmaxRouter.like(getattr(layer.mlp, "gate", None)):
            layer.mlp.gate.forward = router
    kinds = getattr(model.config, "layer_types", None)
    groups = NewTokenLayers.place(layers, kinds or [""] * len(layers))
    model.of_one_token = NewTokenModel.like(model, groups)


def _place_buffers(model: nn.Module, place: torch.device | None) -> None:
    """Computes buffers that no checkpoint holds (rotary frequencies), which the meta device left empty."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for _, buffer in module.named_buffers(recurse=False)):
            kind: Any = type(module)
            try:
                fresh = kind(config=model.config)
            except TypeError as error:
                raise ModelRefused(
                    f"the buffers of {name} were wanted",
                    f"{kind.__name__} cannot be rebuilt from its config ({error})",
                    "Choose a supported model family",
                ) from error
            model.set_submodule(name, fresh.to(place))
