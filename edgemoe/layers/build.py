"""transformers' model over a store: dense weights in memory, experts in place of its experts modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from edgemoe.experts.device_layer import DeviceExpertLayer
from edgemoe.experts.layer import ExpertLayer
from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.families.base import Family, Traits
from edgemoe.families.meta_model import place_buffers
from edgemoe.layers.dense_tensors import (
    dense_specs,
    join_parts,
    join_tensors,
    place_tensors,
    require_tensors,
)
from edgemoe.layers.device_router import choose_on_device
from edgemoe.layers.gating import fused_activation
from edgemoe.layers.load import load_dense
from edgemoe.layers.remapped_router import remap_choices
from edgemoe.layers.replace_modules import replace_modules
from edgemoe.layers.router import choose_by_row, next_gates, next_logits, router_of
from edgemoe.layers.skeleton import without_weights
from edgemoe.machine.pages import in_huge_pages
from edgemoe.storage.store.manifest_entries import FileEntry


def build_model(
    model: Any, family: Family, dense: Path, file: FileEntry, runtime: ExpertRuntime
) -> nn.Module:
    """Makes a skeleton ready to run, with its experts left to `runtime`.

    Args:
        model: the model without weights (layers.skeleton.skeleton).
        family: the family of its config.
        dense: the store's dense.safetensors.
        file: its size and checksum in the manifest.
        runtime: shared by all MoE layers; dense weights go to its device.

    Raises:
        MissingTensor, ModelRefused: as check_dense.
        ChecksumMismatch, TruncatedFile, BadHeader: the file is damaged.
    """
    traits, device = family.traits, runtime.device
    modules = without_weights(model)
    require_tensors(model, family, dense_specs(dense), dense.parent)
    place_buffers(model, device.place if device else None)
    # No name keeps the tensors: parts that are joined below free theirs, layer by layer.
    tensors = {family.in_modules(k): tensor for k, tensor in load_dense(dense, file, device).items()}
    join_parts(family, tensors, join_tensors)
    place_tensors(model, tensors)
    del tensors
    _bind_experts(model, modules, runtime, traits, family.hidden)
    model.eval()  # before modules are tried: in training phimoe's routers choose at random
    replace_modules(model, traits)
    for layer, name in modules.items():
        block = _block_of(model, name)
        router = router_of(block)
        choose_on_device(block, router, traits, model.config)
        choose_by_row(router)
        remap_choices(layer, router, traits, model.config)
    if device is None:
        in_huge_pages(model.parameters())
    loaded: nn.Module = model
    return loaded


def _bind_experts(
    model: Any, modules: dict[int, str], runtime: ExpertRuntime, traits: Traits, hidden: int
) -> None:
    """Attaches an ExpertLayer to every experts module, with the next one's router; experts take states [T, hidden]."""
    following: list[int | None] = [*list(modules)[1:], None]
    kind = DeviceExpertLayer if runtime.device else ExpertLayer
    gates = next_gates(traits, model.config)
    for (layer, name), after in zip(modules.items(), following, strict=True):
        next_router = None
        # Experts of a projected state have none that a router takes.
        if after is not None and hidden == model.config.hidden_size:
            next_router = after, next_logits(_block_of(model, modules[after]), traits)
        module: Any = model.get_submodule(name)
        module.edgemoe = kind(layer, runtime, module, fused_activation(module), next_router, gates)


def _block_of(model: nn.Module, experts: str) -> nn.Module:
    """The block that has the experts module of a name."""
    return model.get_submodule(experts.rpartition(".")[0])
