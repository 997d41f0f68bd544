"""Counts of a step of new tokens that the kernel took through all layers, read from its trace."""

from __future__ import annotations

from collections.abc import Sequence

from edgemoe.experts.step import StepContext
from edgemoe.kernels.native.decode_layers import CHOSEN, NativeDecodeLayers


def count_remapped(native: NativeDecodeLayers, routed: Sequence[int], step: StepContext) -> None:
    """Counts the experts that tokens chose by themselves, and the experts that they agreed on.

    Args:
        native: has the trace of the step.
        routed: the layers whose router is the kernel's, at least one.
        step: the step.
    """
    layers = list(routed)
    chosen = native.trace[layers][:, CHOSEN, : step.step.rows].flatten(1).tolist()
    counts = native.remapped[layers].tolist()
    for (before, pairs), experts in zip(counts, chosen, strict=True):
        step.use.add_remapped(before, len(set(experts)), pairs)
