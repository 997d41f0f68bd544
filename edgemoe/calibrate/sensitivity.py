"""Sensitivity of each layer: the KL that a little noise in the sum of its experts causes."""

from __future__ import annotations

import math

import torch

from edgemoe.calibrate.state import CalibrationState
from edgemoe.calibrate.windows import Window
from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import Engine
from edgemoe.evaluate.metrics import QualityMeter
from edgemoe.experts.step import ExpertProbe, Routed, Study
from edgemoe.kv.sequence import SequenceKV

NOISE = 0.1
"""Size of the disturbance, relative to the mean output of an expert."""


class Disturbance(ExpertProbe):
    """A probe that adds noise to the experts' sum of one layer.

    Args:
        layer: number of the layer that gets the noise.
        size: standard deviation of the noise.
    """

    def __init__(self, layer: int, size: float) -> None:
        self._layer, self._size = layer, size

    def routed(self, layer: int, routing: Routed, out: torch.Tensor) -> None:
        """Adds the noise, which depends on the layer alone."""
        if layer == self._layer:
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(layer)) * self._size
            out += noise.to(out.device, out.dtype)


def measure_sensitivity(
    engine: Engine,
    sequence: SequenceKV,
    windows: list[Window],
    state: CalibrationState,
    progress: CountProgress,
) -> None:
    """Disturbs each layer in each window, and adds the KL to the undisturbed model."""
    layers = state.errors.layers
    for number, window in enumerate(windows):
        done = state.disturbed - number * len(layers)
        reference = None
        progress.advance()
        for row, layer in enumerate(layers):
            if row >= done:
                sequence.crop(0)
                if reference is None:
                    reference = engine.all_logits(sequence, window, decode=True).bfloat16()
                    sequence.crop(0)
                with engine.studied(Study(probe=Disturbance(layer, _noise_size(engine, state, row)))):
                    logits = engine.all_logits(sequence, window, decode=True)
                meter = QualityMeter()
                meter.add(logits, window, reference)
                state.kl[row] += meter.quality().kl or 0.0
                state.disturbed += 1
                state.save()
            progress.advance()


def _noise_size(engine: Engine, state: CalibrationState, row: int) -> float:
    """Size of the noise of each number of a layer's sum."""
    squared, counts = state.errors.squared[row, :, -1].sum(), state.errors.counts[row].sum()
    return NOISE * math.sqrt(float(squared / counts.clamp_min(1)) / engine.shape.hidden)
