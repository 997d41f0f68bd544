"""Takes the sample: the windows of a text go once through the store at its highest level."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.calibrate.windows import Window, written_window
from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import Engine
from edgemoe.experts.step import ExpertProbe, MeasuredLayer, Study
from edgemoe.kernels.base import Part, Rows
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.recode.plans import plan_for_run
from edgemoe.recode.request import WINDOW, RecodeRequest
from edgemoe.recode.sample import ExpertSample


class _Layers(ExpertProbe):
    """Finds the experts of every layer."""

    def __init__(self) -> None:
        self.layers: dict[int, MeasuredLayer] = {}

    def computed(
        self,
        layer: MeasuredLayer,
        x: Rows,
        parts: Sequence[Part],
        experts: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Keeps the layer."""
        self.layers[layer.layer] = layer


def take_sample(
    store: StoreModel, sample: ExpertSample, windows: list[Window], request: RecodeRequest
) -> dict[int, MeasuredLayer]:
    """Samples the windows that are missing; returns the experts of every layer.

    Raises:
        DoesNotFit: the limits, or the free memory, are too small.
    """
    settings = RunSettings.uniform(store.manifest.max_level)
    others = sample.choice_bytes(store.shape.top_k)
    plan = plan_for_run(store, request, settings, others, "choices of its routers")
    layers, name = _Layers(), store.directory.name
    sample.open()
    with (
        Engine(store, plan, settings) as engine,
        CountProgress(f"sampling {name}", sample.tokens) as progress,
    ):
        sequence = engine.sequences.new()
        progress.advance(sample.done * WINDOW)
        with engine.studied(Study(probe=layers)):
            engine.prefill(sequence, [0, 0])
        while sample.done < len(windows):
            window = windows[sample.done] or written_window(engine, sequence, sample.done)
            sequence.crop(0)
            with engine.studied(Study(probe=sample)):
                engine.prefill(sequence, window)
            sample.end_window(window)
            progress.advance(WINDOW)
    return layers.layers
