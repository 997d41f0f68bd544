"""Modules of transformers that edgemoe computes itself: norms, linear attention, attention and routers."""

from __future__ import annotations

from typing import Any

from torch import nn

from edgemoe.families.base import Traits
from edgemoe.layers.compiled_modules import dense_in_ram, recurrent_in_ram
from edgemoe.layers.decoder_parts import parts_of
from edgemoe.layers.dense import DenseNorm
from edgemoe.layers.device_modules import norm_on_device, recurrent_on_device
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.indexed import IndexBySequence, indexers
from edgemoe.layers.latent_attention import LatentAttention
from edgemoe.layers.linear_attention import PerSequence, stateful_modules
from edgemoe.layers.mla import use_compiled_latents
from edgemoe.layers.rotations import LayerRotation, Rotations
from edgemoe.layers.router import CompiledRouter, further_arguments, router_name
from edgemoe.machine.process import return_free_memory


def replace_modules(model: Any, traits: Traits) -> None:
    """Replaces the modules of a model, with their weights, that edgemoe computes itself.

    Args:
        model: transformers' model, whose dense weights are in memory.
        traits: the traits of its family.
    """
    stateful, choosing = stateful_modules(model), indexers(model)
    for name, module in list(model.named_modules()):
        if name in stateful:
            own = recurrent_in_ram(module) or recurrent_on_device(module)
            model.set_submodule(name, PerSequence(own or module, module.layer_idx))
        elif name in choosing:
            model.set_submodule(name, IndexBySequence(module))
        elif traits.rms_norm and (norm := norm_on_device(module) or DenseNorm.try_from(module)):
            model.set_submodule(name, norm)
        elif hasattr(module, "kv_b_proj"):
            use_compiled_latents(module)
    _place_native_parts(model, traits)


def _place_native_parts(model: Any, traits: Traits) -> None:
    """Replaces attention modules, routers and dense gated layers that the compiled kernel computes."""
    rotations = Rotations(model, traits.fused_gqa).layers
    for layer, rotation in zip(model.get_submodule("model.layers"), rotations, strict=True):
        for part in parts_of(layer):
            if not part.mixes:
                _place_router(part.block, traits, model.config)
            elif own := _attention_of(part.module, rotation):
                setattr(layer, part.name, own)
        for name, module in list(layer.named_modules()):
            if dense := dense_in_ram(module):
                layer.set_submodule(name, dense)
        return_free_memory()  # parts that are now joined would stay in malloc's heap


def _attention_of(module: Any, rotation: LayerRotation) -> nn.Module | None:
    """The compiled form of an attention module; None: it has none."""
    if hasattr(module, "k_proj"):
        return GroupedQueryAttention.try_from(module, *rotation[:3])
    return LatentAttention.try_from(module, rotation)


def _place_router(block: Any, traits: Traits, config: Any) -> None:
    """Replaces the router of a block that has one, where the compiled kernel chooses as it does."""
    name = router_name(block)
    router = getattr(block, name, None)
    if router is None:
        return
    further = [getattr(block, each) for each in further_arguments(block, router)]
    if own := CompiledRouter.try_from(router, traits, config, further):
        setattr(block, name, own)
