"""Hessians of the inputs of a model's dense matrices of 4 bits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from edgemoe.calibrate.windows import Window
from edgemoe.engine.engine import Engine
from edgemoe.layers.dense import DenseLinear
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.recode.plans import plan_for_run
from edgemoe.recode.request import RecodeRequest
from edgemoe.recode.sample import hessian_of


def hessians_of(
    store: StoreModel,
    windows: Sequence[Window],
    names: Collection[str],
    request: RecodeRequest,
    others: int,
) -> dict[str, torch.Tensor]:
    """Sums the products of each matrix's inputs, while the windows go once through the store at its highest level.

    Args:
        store: the store.
        windows: the sample.
        names: names of the matrices in the model.
        request: the limits.
        others: most bytes of the result, and of what is added to it at a time.

    Returns:
        name -> float32 [K, K], which matrices with the same input share.

    Raises:
        DoesNotFit: the limits are too small.
    """
    found = dict[tuple[str, ...], torch.Tensor]()

    def watch(layer: DenseLinear, x: torch.Tensor) -> None:
        if set(names).isdisjoint(layer.names):
            return
        rows = x.reshape(-1, x.shape[-1]).float()
        added = hessian_of(rows, torch.ones(len(rows), 1))
        found[layer.names] = found[layer.names].add_(added) if layer.names in found else added

    settings = RunSettings.uniform(store.manifest.max_level)
    plan = plan_for_run(store, request, settings, others, "sums of inputs")
    with Engine(store, plan, settings) as engine, engine.watched(watch):
        sequence = engine.sequences.new()
        for window in windows:
            sequence.crop(0)
            engine.prefill(sequence, window)
    return {name: hessian for layer, hessian in found.items() for name in layer}
