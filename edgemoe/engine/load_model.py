"""Loads an engine's dense weights, and makes what runs steps through its model."""

from __future__ import annotations

from typing import Any

from torch import nn

from edgemoe.engine.device_runner import DeviceModelRunner
from edgemoe.engine.drafts.head_runner import HeadRunner
from edgemoe.engine.model_runner import ModelRunner
from edgemoe.errors import UserError
from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.families.table import family_of
from edgemoe.layers.build import build_model
from edgemoe.layers.fused_decode import FusedDecode
from edgemoe.layers.head import attach_head, build_head
from edgemoe.layers.skeleton import skeleton
from edgemoe.machine.out_of_memory import taking
from edgemoe.machine.process import freeze_existing_objects, return_free_memory
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.store.manifest import HEAD_NAME


def model_without_weights(store: StoreModel) -> nn.Module:
    """Makes transformers' model of a store without weights; Python's objects so far are never collected.

    Raises:
        ModelRefused: as layers.skeleton.skeleton.
    """
    freeze_existing_objects()  # before any object of an engine exists: these are collected with it
    model = skeleton(store.directory, store.config)
    if store.head:
        attach_head(model)
    return_free_memory()
    return model


def load_model(
    skeleton: Any, store: StoreModel, plan: MemoryPlan, runtime: ExpertRuntime
) -> tuple[nn.Module, ModelRunner]:
    """Loads the dense weights into a model without weights, and makes what runs steps through it.

    Args:
        skeleton: the model without weights (layers.skeleton.skeleton).
        store: an opened store.
        plan: the division of the limit.
        runtime: the state that the model's MoE layers share.

    Raises:
        DoesNotFit: a device has too little memory.
        DamagedData: the dense weights are damaged.
        UserError: the plan has rows for guesses, and new tokens cannot run with any.
    """
    with taking(store.device, "dense weights", plan.minimum_vram_bytes):
        name = store.manifest.dense_name
        file, family = store.manifest.files[name], family_of(store.config)
        model = build_model(skeleton, family, store.directory / name, file, runtime)
        if store.device:
            return model, DeviceModelRunner(model, runtime, store.shape, plan)
        head = None
        if store.head:
            file, own = store.manifest.files[HEAD_NAME], store.head.family
            head = build_head(model, own, store.directory / HEAD_NAME, file, runtime), own.layer
        runner = ModelRunner(model, runtime, plan.decode_rows, head)
        fused = isinstance(runner.fused, FusedDecode) and runner.fused.takes_guesses
        if plan.drafts and not (fused and (runner.head_decode or not head)):
            raise UserError(
                "a model whose new tokens the compiled kernel takes through all layers, for --draft",
                f"model_type {store.config['model_type']} with kernel {store.compute.name}",
                "leave it out",
            )
        if head and runner.head_decode:
            runner.head = HeadRunner.of(head[0], runner.head_decode, store, plan, runtime.source)
        return model, runner
