"""Modules of transformers that edgemoe computes itself: norms, linear attention, attention and routers."""

from __future__ import annotations

from typing import Any

from edgemoe.families.base import Family
from edgemoe.layers.dense import DenseNorm
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.linear_attention import DeltaNet, PerSequence
from edgemoe.layers.mla import use_compiled_latents
from edgemoe.layers.router import SoftmaxRouter
from edgemoe.machine.process import return_free_memory


def replace_modules(model: Any, family: Family) -> None:
    """Replaces the modules of a model, with their weights, that edgemoe computes itself.

    Args:
        model: transformers' model, whose dense weights are in memory.
        family: the family of the model.
    """
    for name, module in list(model.named_modules()):
        if name.endswith(".linear_attn"):
            rule = DeltaNet.try_from(module)
            model.set_submodule(name, PerSequence(rule or module, module.layer_idx))
        elif family.rms_norm and (norm := DenseNorm.try_from(module)):
            model.set_submodule(name, norm)
        elif hasattr(module, "kv_b_proj"):
            use_compiled_latents(module)
    if family.fused_gqa:
        _place_native_parts(model, family)


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
