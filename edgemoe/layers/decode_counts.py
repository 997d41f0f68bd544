"""Counts of a step of new tokens that the kernel took through all layers, read from its trace."""

from __future__ import annotations

from collections.abc import Sequence

from edgemoe.experts.step import StepContext
from edgemoe.kernels.native.decode_layers import CHOSEN, WANTED, NativeDecodeLayers


def count_damage(native: NativeDecodeLayers, routed: Sequence[int], step: StepContext) -> None:
    """Counts what the levels of the tokens cost, where levels go by damage.

    Args:
        native: has the trace of the step.
        routed: the layers whose router is the kernel's, at least one.
        step: the step.
    """
    policy, rows, layers = step.policy, step.step.rows, list(routed)
    if policy.settings.priced:
        trace, gates = native.trace[layers][:, :, :rows], native.gates[layers][:, :rows]
        of_rows = [layer for layer in layers for _ in range(rows)]
        chosen, wanted = trace[:, CHOSEN].flatten(0, 1), trace[:, WANTED].flatten(0, 1)
        step.use.add_damage(policy.damage, of_rows, chosen, gates.flatten(0, 1), wanted)


def count_remapped(native: NativeDecodeLayers, routed: Sequence[int], step: StepContext) -> None:
    """Counts the experts that tokens chose by themselves, and the experts that they agreed on.

    Arguments: see count_damage.
    """
    layers = list(routed)
    chosen = native.trace[layers][:, CHOSEN, : step.step.rows].flatten(1).tolist()
    counts = native.remapped[layers].tolist()
    for (before, pairs), experts in zip(counts, chosen, strict=True):
        step.use.add_remapped(before, len(set(experts)), pairs)
