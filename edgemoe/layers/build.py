"""transformers' model over a store: dense weights in memory, experts behind the experts interface."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from edgemoe.experts import layer as experts
from edgemoe.experts.device_layer import DeviceExpertLayer
from edgemoe.experts.layer import ExpertLayer, ExpertRuntime
from edgemoe.families.base import Family
from edgemoe.families.table import known_family
from edgemoe.kernels.activation import CUSTOM, fused_name
from edgemoe.layers import attention
from edgemoe.layers.dense import DenseEmbedding, DenseLinear, DenseNorm
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.linear_attention import PerSequence
from edgemoe.layers.load import load_dense
from edgemoe.layers.router import SoftmaxRouter
from edgemoe.machine.huge_pages import in_huge_pages
from storage.errors import MissingTensor, ModelRefused

SCALE_SUFFIX = "_scale"
"""A tensor `name` at 8 bits has its row scales in `name` + this."""


def skeleton(directory: Path) -> nn.Module:
    """The model of a store without any weights: transformers' modules on the meta device.

    Imports the code of the model's class, which counts as the program's memory.

    Args:
        directory: with config.json.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.NAME, trust_remote_code=False
        )
    return model


def build_model(model: Any, dense: Path, runtime: ExpertRuntime) -> nn.Module:
    """Makes a skeleton ready to run, with its experts left to `runtime`.

    Args:
        model: of `skeleton`.
        dense: the store's dense.safetensors.
        runtime: shared by all MoE layers; dense weights go to its device.

    Raises:
        MissingTensor: a parameter that the config declares is not in the store.
        ModelRefused: the architecture has parts that are not supported.
    """
    model.set_experts_implementation(experts.NAME)
    modules = _without_weights(model)
    family, device = known_family(model.config.model_type), runtime.device
    tensors = {family.in_modules(name): tensor for name, tensor in load_dense(dense, device).items()}
    _place_dense(model, tensors, tied=bool(model.config.tie_word_embeddings))
    _place_buffers(model, device.place if device else None)
    _bind_experts(model, modules, runtime, family)
    for name, module in list(model.named_modules()):
        if name.endswith(".linear_attn"):
            model.set_submodule(name, PerSequence(module, module.layer_idx))
        elif family.rms_norm and (norm := DenseNorm.try_from(module)):
            model.set_submodule(name, norm)
    if family.fused_gqa:
        _place_native_parts(model, family)
    if device is None:
        in_huge_pages(model.parameters())
    return model.eval()  # type: ignore[no-any-return]


def _without_weights(model: nn.Module) -> dict[int, str]:
    """Drops the (meta) weights of every experts module except its biases. Returns layer -> the module's name."""
    found = {}
    for name, module in model.named_modules():
        if not hasattr(module, "_apply_gate"):
            continue
        if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
            raise ModelRefused(
                f"experts of one gate_up and one down matrix in {name}",
                "experts without a gate, or with a norm behind them",
                "choose a supported model family",
            )
        match = re.search(r"\.layers\.(\d+)\.", name)
        assert match, name
        for parameter in [p for p, _ in module.named_parameters(recurse=False)]:
            if not parameter.endswith("_bias"):
                delattr(module, parameter)
        found[int(match[1])] = name
    return dict(sorted(found.items()))


def _bind_experts(model: nn.Module, modules: dict[int, str], runtime: ExpertRuntime, family: Family) -> None:
    """Attaches an ExpertLayer to every experts module, with the next one's router."""
    following: list[int | None] = [*list(modules)[1:], None]
    kind = DeviceExpertLayer if runtime.device else ExpertLayer
    named = family.activation_key and getattr(model.config, family.activation_key)
    activation = fused_name(named) if named else CUSTOM
    for (layer, name), after in zip(modules.items(), following, strict=True):
        next_router = None
        if after is not None:
            block: Any = model.get_submodule(modules[after].rpartition(".")[0])
            router = block.gate if hasattr(block, "gate") else block.router
            next_router = after, DenseLinear(router.weight.detach().to(torch.bfloat16), None, None)
        module: Any = model.get_submodule(name)
        module.edgemoe = kind(layer, runtime, module, activation, next_router)


def _place_dense(model: nn.Module, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
    """Puts every dense tensor into its module; none may be missing or left over."""
    if tied and "lm_head.weight" not in tensors:
        for suffix in ("", SCALE_SUFFIX):
            if (table := tensors.get("model.embed_tokens.weight" + suffix)) is not None:
                tensors["lm_head.weight" + suffix] = table
    missing = []

    def take(name: str, current: torch.Tensor) -> torch.Tensor:
        """Removes a tensor from `tensors`; notes a missing one, for which the current one stands in."""
        value = tensors.pop(name, None)
        if value is None or value.shape != current.shape:
            missing.append(name)
            return current
        return value

    for name, module in list(model.named_modules()):
        # Not subclasses: some routers are linear layers that do more.
        if type(module) in (nn.Linear, nn.Embedding):
            weight = take(f"{name}.weight", module.weight)
            scale = tensors.pop(f"{name}.weight{SCALE_SUFFIX}", None)
            if isinstance(module, nn.Embedding):
                model.set_submodule(name, DenseEmbedding(weight, scale))
            else:
                bias = None if module.bias is None else take(f"{name}.bias", module.bias)
                model.set_submodule(name, DenseLinear(weight, scale, bias))
            continue
        for parameter, current in _kept(module):
            value = take(f"{name}.{parameter}", current)
            is_buffer = not isinstance(current, nn.Parameter)
            setattr(module, parameter, value if is_buffer else nn.Parameter(value, requires_grad=False))
    if missing:
        raise MissingTensor(
            f"all dense tensors of {type(model).__name__} in the store",
            f"{len(missing)} missing or of another shape, first {missing[0]}",
            "convert the model again from a complete checkpoint",
        )
    if tensors:
        raise ModelRefused(
            f"a module of {type(model).__name__} for every dense tensor",
            f"{len(tensors)} tensors without one, first {min(tensors)}",
            "check that config.json belongs to this checkpoint",
        )


def _kept(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers."""
    buffers = [
        b for b in module.named_buffers(recurse=False) if b[0] not in module._non_persistent_buffers_set
    ]
    return [*module.named_parameters(recurse=False), *buffers]


def _place_native_parts(model: Any, family: Family) -> None:
    """Replaces attention modules and routers that the compiled kernel computes in one call."""
    assert family.fused_gqa
    for layer in model.get_submodule("model.layers"):
        if attention_module := GroupedQueryAttention.try_from(layer.self_attn):
            layer.self_attn = attention_module
        gate = getattr(layer.mlp, "gate", None)
        if router := SoftmaxRouter.try_from(gate, family.fused_gqa.gate, model.config):
            layer.mlp.gate = router


def _place_buffers(model: nn.Module, place: torch.device | None) -> None:
    """Computes buffers that no checkpoint holds (rotary frequencies), which the meta device left empty."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for _, buffer in module.named_buffers(recurse=False)):
            kind: Any = type(module)
            try:
                fresh = kind(config=model.config)
            except TypeError as error:
                raise ModelRefused(
                    f"{name} to be built from its config",
                    f"{error} in {kind.__name__}",
                    "choose a supported model family",
                ) from error
            model.set_submodule(name, fresh.to(place))
