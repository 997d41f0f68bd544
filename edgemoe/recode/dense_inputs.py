"""Hessians of the inputs of a model's dense matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from edgemoe.calibrate.windows import Window
from edgemoe.engine.engine import Engine
from edgemoe.kv.sequence import SequenceKV
from edgemoe.layers.dense import DenseLinear
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.importance import PromptAttention
from edgemoe.policy.settings import RunSettings
from edgemoe.recode.plans import plan_for_run
from edgemoe.recode.request import RecodeRequest
from edgemoe.recode.sample import hessian_of

HEAD = "lm_head.weight"
"""Name of the head in the model."""


class _Inputs:
    """The matrices that layers of a model multiply an input with, one after another.

    Attributes:
        first: matrix -> the first matrix that has the same input.
    """

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        self._last: tuple[torch.Tensor, str] | None = None

    def watch(self, layer: DenseLinear, x: torch.Tensor) -> None:
        if layer.names:
            shared = self._last[1] if self._last and self._last[0] is x else layer.names[0]
            self.first |= dict.fromkeys(layer.names, shared)
            self._last = x, shared


class _Sums:
    """Sums of the products of inputs.

    Args:
        names: a matrix for each input.

    Attributes:
        hessians: matrix -> float32 [K, K].
    """

    def __init__(self, names: Collection[str]) -> None:
        self.hessians, self._names = dict[str, torch.Tensor](), names

    def watch(self, layer: DenseLinear, x: torch.Tensor) -> None:
        for name in layer.names:
            if name in self._names:
                rows = x.reshape(-1, x.shape[-1]).float()
                added = hessian_of(rows, torch.ones(len(rows), 1))
                before = self.hessians.get(name)
                self.hessians[name] = added if before is None else before.add_(added)


def hessians_of(
    store: StoreModel,
    windows: Sequence[Window],
    sizes: Mapping[str, int],
    request: RecodeRequest,
    limit: int,
) -> dict[str, torch.Tensor | None]:
    """Sums the products of matrices' inputs, while the windows go once through the store at its highest level.

    Args:
        store: the store.
        windows: the sample.
        sizes: names of matrices in the model -> bytes of a Hessian; the first names whose Hessians fit are summed.
        request: the limits.
        limit: most bytes of all Hessians; one is always allowed.

    Returns:
        name -> float32 [K, K], which matrices with the same input share; None for a matrix that is not multiplied with.

    Raises:
        DoesNotFit: the limits are too small.
    """
    settings, largest = RunSettings.uniform(store.manifest.max_level), max(sizes.values())
    # What is added for one layer in the window that runs, too.
    others = min(sum(sizes.values()), max(limit, largest)) + largest
    plan = plan_for_run(store, request, settings, others, "sums of inputs")
    with Engine(store, plan, settings) as engine:
        sequence, inputs = engine.sequences.new(), _Inputs()
        with engine.watched(inputs.watch):
            engine.prefill(sequence, windows[0][:2])
        found = _fitting(sizes, inputs.first, limit)
        sums = _Sums({first for first in found.values() if first})
        with engine.watched(sums.watch):
            for window in windows:
                sequence.crop(0)
                _run(engine, sequence, window, all_rows=HEAD in found)
    return {name: sums.hessians[first] if first else None for name, first in found.items()}


def _fitting(sizes: Mapping[str, int], first: Mapping[str, str], limit: int) -> dict[str, str | None]:
    """The first names whose Hessians fit: name -> the matrix whose Hessian it shares; None: it has no inputs."""
    found, used = dict[str, str | None](), 0
    for name, size in sizes.items():
        shared = first.get(name)
        more = 0 if shared is None or shared in found.values() else size
        if used and used + more > limit:
            break
        found[name] = shared
        used += more
    return found


def _run(engine: Engine, sequence: SequenceKV, window: Window, *, all_rows: bool) -> None:
    """Runs a window; `all_rows`: the head runs for every token, and not for the last one alone."""
    if not all_rows:
        engine.prefill(sequence, window)
        return
    prompt, rows = PromptAttention(), min(engine.plan.scored_rows, engine.plan.prefill_rows)
    for start in range(0, len(window), rows):
        engine.all_logits(sequence, window[start : start + rows], decode=False, prompt=prompt)
