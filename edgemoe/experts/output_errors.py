"""The squared error of each expert's output at each level, summed over the tokens that a step routes to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgemoe.experts.step import ExpertProbe, MeasuredLayer, Routed
from edgemoe.kernels.base import Part, Rows
from edgemoe.storage.base import LEVELS
from edgemoe.storage.store.calibration import RANDOM, SAMPLE_BYTES, Calibration

_SHRINK = 8
"""Tokens of the layer's mean that are added to each expert's: an expert that few tokens chose is near the mean."""


class OutputErrors(ExpertProbe):
    """Measures the experts' errors in steps that compute every expert at the reference's level.

    The output at that level stands for the model's own. A sum does not depend on the order in which experts come.

    Args:
        layers: numbers of the layers with experts.
        experts: number of experts in a layer.

    Attributes:
        squared: float64 [layers, experts, levels], sums over tokens and the H numbers of an output, for each of LEVELS;
            at level 0 of the squared output.
        counts: int64 [layers, experts], tokens.
        choices: layer -> the routers' choices [T, k] and gate weights [T, k] of the last step.
    """

    def __init__(self, layers: Sequence[int], experts: int) -> None:
        self.layers = tuple(layers)
        self.squared = torch.zeros(len(layers), experts, len(LEVELS), dtype=torch.float64)
        self.counts = torch.zeros(len(layers), experts, dtype=torch.int64)
        self.choices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def computed(
        self,
        layer: MeasuredLayer,
        x: Rows,
        parts: Sequence[Part],
        experts: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Computes the same rows at every lower level, and adds the differences."""
        row = self.layers.index(layer.layer)
        rows = [part.rows for part in parts]
        for column, level in enumerate(LEVELS):
            if level >= parts[0].level:
                continue
            other = torch.zeros_like(out)
            if level:
                lower = [Part(part.blocks, part.resident, level, part.rows) for part in parts]
                layer.apply(x, lower, experts, other)
            # One sum an expert, so that the others of the call do not change its rounding.
            lost = [
                float(each.square().sum(dtype=torch.float64))
                for each in (other.float() - out.float()).split(rows)
            ]
            self.squared[row, list(experts), column] += torch.tensor(lost, dtype=torch.float64)
        self.counts[row, list(experts)] += torch.tensor(rows)

    def routed(self, layer: int, routing: Routed, out: torch.Tensor) -> None:
        """Keeps the router's choice."""
        self.choices[layer] = routing.choice.clone(), routing.gates.float()

    def means(self) -> torch.Tensor:
        """The mean squared error of each expert: float32 [layers, experts, levels].

        An expert with few tokens is near the layer's mean; a layer that no token reached has 0.
        """
        counts = self.counts.unsqueeze(-1).double()
        of_layer = self.squared.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp_min(1)
        return ((self.squared + _SHRINK * of_layer) / (counts + _SHRINK)).float()

    def calibration(self, source: str, level: int, tokens: int) -> Calibration:
        """The calibration that a step of random tokens has measured; all layers count as equally sensitive.

        Args:
            source: fingerprint of the checkpoint.
            level: the level of the reference.
            tokens: number of tokens of the step.
        """
        choices = [self.choices[layer] for layer in self.layers]
        chosen, gates = (torch.stack(each) for each in zip(*choices, strict=True))
        kept = sample_tokens(chosen.shape)
        return Calibration(
            source=source,
            max_level=level,
            origin=RANDOM,
            text="",
            tokens=tokens,
            layers=self.layers,
            error=self.means().numpy(),
            sensitivity=np.ones(len(self.layers), np.float32),
            chosen=chosen[:, :kept].numpy().astype(np.uint16),
            gates=gates[:, :kept].numpy().astype(np.float16),
        )


def sample_tokens(shape: Sequence[int]) -> int:
    """Tokens of routers' choices [layers, tokens, k] that a calibration keeps: at most SAMPLE_BYTES of them."""
    layers, tokens, slots = shape
    return min(tokens, max(1, SAMPLE_BYTES // (layers * slots * 4)))
