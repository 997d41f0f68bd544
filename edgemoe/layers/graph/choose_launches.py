"""The choice of the launches of a model's new tokens: by kernels of their own, or by transformers' modules."""

from __future__ import annotations

import logging
from typing import Any

import torch

from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.families.base import FusedGQA
from edgemoe.families.table import traits_of
from edgemoe.kv.shape import KVShape
from edgemoe.layers.graph.base import Launches
from edgemoe.layers.graph.launches import GraphLaunches, fits, outer_fits
from edgemoe.layers.graph.memory import GraphMemory, Sizes, TokenMemory
from edgemoe.layers.graph.module_launches import ModuleLaunches, experts_of, why_not
from edgemoe.layers.graph.module_memory import ModuleMemory

Made = tuple[TokenMemory, Launches]

_log = logging.getLogger("edgemoe")


def choose_launches(
    model: Any, runtime: ExpertRuntime, kernel: Any, shape: KVShape, slots: int
) -> Made | None:
    """Makes the memory and the launches of a model's new tokens.

    Args:
        model: the model that layers.build made, on the runtime's device.
        runtime: the runtime of its experts.
        kernel: TritonExpertKernel, the runtime's or the kernel that it wraps.
        shape: the shape of a sequence's KV.
        slots: experts of a token.

    Returns:
        None: the model cannot be captured; the reason has been logged.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """
    assert runtime.device
    traits = traits_of(model.config.model_type).fused_gqa
    if _has_kernels(model, traits):
        memory = GraphMemory(runtime.device, model, kernel.inner, runtime.experts, slots)
        windows = traits.windows(model.config)
        return memory, GraphLaunches(runtime.device, model, windows, kernel, memory, shape.format)
    reason, name = why_not(model, shape), model.config.model_type
    if reason:
        _log.debug("new tokens of %s run by transformers' modules: %s", name, reason)
        return None
    try:
        return _of_modules(model, runtime, kernel, shape, slots)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an operator of transformers, or of another version of torch
        _log.warning(
            "new tokens of %s run by transformers' modules, which cannot be captured: %s", name, error
        )
        _log.debug("the capture failed", exc_info=True)
        return None


def _has_kernels(model: Any, traits: FusedGQA) -> bool:
    """Whether every part of a model has a kernel of its own."""
    if not traits.block_is_experts or getattr(model.config, "clip_qkv", None):
        return False
    if not traits_of(model.config.model_type).product_router or not outer_fits(model):
        return False
    return all(map(fits, model.model.layers))


def _of_modules(model: Any, runtime: ExpertRuntime, kernel: Any, shape: KVShape, slots: int) -> Made:
    assert runtime.device
    config, layers = model.config, model.model.layers
    sizes = Sizes(
        len(layers), config.hidden_size, model.lm_head.out_features, kernel.outer, kernel.inner, slots
    )
    first = next(each for each in map(experts_of, layers) if each)
    biases = (kernel.products, kernel.outer) if first.biases else None
    memory = ModuleMemory(runtime.device, sizes, shape, biases)
    return memory, ModuleLaunches(runtime.device, model, shape, kernel, memory)
