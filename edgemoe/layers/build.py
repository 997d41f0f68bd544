"""transformers' model over a store: dense weights in memory, experts behind the experts interface."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.experts import layer as experts
from edgemoe.experts.device_layer import DeviceExpertLayer
from edgemoe.experts.layer import ExpertLayer, ExpertRuntime
from edgemoe.families.base import Family
from edgemoe.families.table import family_of, known_family
from edgemoe.kernels.activation import CUSTOM, fused_name
from edgemoe.layers import attention
from edgemoe.layers.dense import DenseEmbedding, DenseLinear, DenseNorm
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.linear_attention import PerSequence
from edgemoe.layers.load import load_dense
from edgemoe.layers.remapped_router import remap_choices
from edgemoe.layers.router import SoftmaxRouter, next_gates, next_logits
from edgemoe.layers.trial import buffers_of_config, try_step
from edgemoe.machine.model_code import without_compiler
from edgemoe.machine.pages import in_huge_pages
from edgemoe.machine.process import return_free_memory
from edgemoe.storage.convert.checkpoint import Config
from edgemoe.storage.files.header import Spec, read_header
from edgemoe.storage.files.untrusted import foreign_code
from edgemoe.storage.store.manifest import SCALE_SUFFIX
from edgemoe.storage.store.manifest_entries import FileEntry

_MATRICES = (nn.Linear, nn.Embedding)
"""Modules whose matrices may be at 8 bits. Not their subclasses: some routers are linear layers that do more."""

_LOGITS_ONLY = {
    "return_dict": True,
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits"), False),
}
"""Keys of a config that are for training and would change what a model returns."""


@without_compiler()
def skeleton(directory: Path, bounded: Config) -> nn.Module:
    """The model of a store without any weights: transformers' modules on the meta device.

    A step of two tokens shows that the modules compute with the config's values. Imports the code of the model's class,
    which counts as the program's memory.

    Args:
        directory: with config.json.
        bounded: its contents, bounded.

    Raises:
        ModelRefused: transformers does not accept a value of the config, or its modules cannot compute with it.
    """
    file = directory / "config.json"
    family = family_of(bounded)
    with foreign_code(f"values in {file} that transformers accepts", values=bounded), torch.device("meta"):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, **_LOGITS_ONLY)
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.NAME, trust_remote_code=False
        )
        model.set_experts_implementation(experts.NAME)
    with foreign_code(f"values in {file} that transformers' modules compute with", values=bounded):
        try_step(model, family, bounded)
    return model  # type: ignore[no-any-return]


def build_model(model: Any, dense: Path, file: FileEntry, runtime: ExpertRuntime) -> nn.Module:
    """Makes a skeleton ready to run, with its experts left to `runtime`.

    Args:
        model: of `skeleton`.
        dense: the store's dense.safetensors.
        file: its size and checksum in the manifest.
        runtime: shared by all MoE layers; dense weights go to its device.

    Raises:
        MissingTensor, ModelRefused: as check_dense.
        ChecksumMismatch, TruncatedFile, BadHeader: the file is damaged.
    """
    family, device = known_family(model.config.model_type), runtime.device
    modules = _without_weights(model)
    _check_dense(model, dense_specs(dense), dense.parent)
    # No name keeps the tensors: parts that are joined below free theirs, layer by layer.
    _place_dense(
        model, {family.in_modules(k): tensor for k, tensor in load_dense(dense, file, device).items()}
    )
    _place_buffers(model, device.place if device else None)
    _bind_experts(model, modules, runtime, family)
    for name, module in list(model.named_modules()):
        if name.endswith(".linear_attn"):
            model.set_submodule(name, PerSequence(module, module.layer_idx))
        elif family.rms_norm and (norm := DenseNorm.try_from(module)):
            model.set_submodule(name, norm)
    if family.fused_gqa:
        _place_native_parts(model, family)
    for layer, name in modules.items():
        remap_choices(layer, _router_beside(model, name), family, model.config)
    if device is None:
        in_huge_pages(model.parameters())
    return model.eval()  # type: ignore[no-any-return]


def check_dense(directory: Path, bounded: Config, stored: Mapping[str, Spec]) -> None:
    """Compares the dense tensors of a store, made or still to be made, with transformers' modules of a config.json.

    Args:
        directory, bounded: as in skeleton.
        stored: every dense tensor.

    Raises:
        MissingTensor: a parameter of the model is not among them, or has another shape or type.
        ModelRefused: a tensor without a parameter, or a config that skeleton refuses.
    """
    model = skeleton(directory, bounded)
    _without_weights(model)
    _check_dense(model, stored, directory)


def dense_specs(path: Path) -> dict[str, Spec]:
    """Every tensor of a store's dense.safetensors.

    Raises:
        BadHeader, TruncatedFile, MissingTensor: from read_header.
    """
    return {name: entry.spec for name, entry in read_header(path).tensors.items()}


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
    activation, gates = fused_name(named) if named else CUSTOM, next_gates(family, model.config)
    for (layer, name), after in zip(modules.items(), following, strict=True):
        next_router = None
        if after is not None:
            next_router = after, next_logits(_router_beside(model, modules[after]), family)
        module: Any = model.get_submodule(name)
        module.edgemoe = kind(layer, runtime, module, activation, next_router, gates)


def _router_beside(model: nn.Module, experts: str) -> Any:
    """The router of the block that has the experts module of a name."""
    block: Any = model.get_submodule(experts.rpartition(".")[0])
    return block.gate if hasattr(block, "gate") else block.router


def _check_dense(model: Any, stored: Mapping[str, Spec], directory: Path) -> None:
    """Compares dense tensors with the parameters of a model, by name, shape and type. `directory` is for messages.

    Matrices of linear layers and embeddings are BF16, or I8 with a scale, BF16, for each row; biases are BF16, and
    other parameters BF16 or F32.
    """
    family = known_family(model.config.model_type)
    left = {family.in_modules(name): spec for name, spec in stored.items()}
    _tie(model, left)
    wrong = []
    for name, shape, other in _parameters(model):
        found, scale = left.pop(name, None), left.pop(name + SCALE_SUFFIX, None) if other == "I8" else None
        scales = ("BF16", shape[:1]) if other == "I8" else None
        if (found, scale) not in ((("BF16", shape), None), ((other, shape), scales)):
            wrong.append(f"{name} of {list(shape)}: {f'{found[0]} {list(found[1])}' if found else 'none'}")
    if wrong:
        raise MissingTensor(
            f"all dense tensors of {type(model).__name__} in {directory}",
            f"{len(wrong)} missing or of another shape or type, first {wrong[0]}",
            "convert the model again from a complete checkpoint",
        )
    if left:
        raise ModelRefused(
            f"a module of {type(model).__name__} for every dense tensor in {directory}",
            f"{len(left)} tensors without one, first {min(left)}",
            "check that config.json belongs to this checkpoint",
        )


def _tie(model: Any, tensors: dict[str, Any]) -> None:
    """Lets the head share the embedding's table where the config says so and no other is stored."""
    if model.config.tie_word_embeddings and "lm_head.weight" not in tensors:
        for suffix in ("", SCALE_SUFFIX):
            if (table := tensors.get("model.embed_tokens.weight" + suffix)) is not None:
                tensors["lm_head.weight" + suffix] = table


def _parameters(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name and shape of every dense parameter, and the type that it may have besides BF16."""
    for name, module in model.named_modules():
        for parameter, current in _kept(module):
            kinds = {"weight": "I8", "bias": "BF16"} if type(module) in _MATRICES else {}
            yield f"{name}.{parameter}", tuple(current.shape), kinds.get(parameter, "F32")


def _place_dense(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Puts every dense tensor into its module; `_check_dense` has passed."""
    _tie(model, tensors)
    for name, module in list(model.named_modules()):
        if type(module) in _MATRICES:
            weight, scale = tensors[f"{name}.weight"], tensors.get(f"{name}.weight{SCALE_SUFFIX}")
            placed = (
                DenseEmbedding(weight, scale)
                if isinstance(module, nn.Embedding)
                else DenseLinear(weight, scale, tensors.get(f"{name}.bias"))
            )
            model.set_submodule(name, placed)
            continue
        for parameter, current in _kept(module):
            value = tensors[f"{name}.{parameter}"]
            if isinstance(current, nn.Parameter):
                setattr(module, parameter, nn.Parameter(value, requires_grad=False))
            else:
                setattr(module, parameter, value)


def _kept(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers."""
    buffers = [
        b for b in module.named_buffers(recurse=False) if b[0] not in module._non_persistent_buffers_set
    ]
    return [*module.named_parameters(recurse=False), *buffers]


def _place_native_parts(model: Any, family: Family) -> None:
    """Replaces attention modules and routers that the compiled kernel computes in one call."""
    assert family.gate
    for layer in model.get_submodule("model.layers"):
        if attention_module := GroupedQueryAttention.try_from(layer.self_attn):
            layer.self_attn = attention_module
            return_free_memory()  # q, k and v, which are now joined, would stay in malloc's heap
        gate = getattr(layer.mlp, "gate", None)
        if router := SoftmaxRouter.try_from(gate, family.gate, model.config):
            layer.mlp.gate = router


def _place_buffers(model: nn.Module, place: torch.device | None) -> None:
    """Computes buffers that no checkpoint holds (rotary frequencies), which the meta device left empty."""
    for name, module in buffers_of_config(model).items():
        model.set_submodule(name, module.to(place))
