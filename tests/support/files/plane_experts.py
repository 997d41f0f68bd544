"""Experts of several shapes as planes in RAM, for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from records import KEY, MemoryReader, a_store, blocks_for

from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.kernels.base import ExpertKernel, Part, Rows
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.layout import LAYOUTS

SHAPES = {"small": ((48, 64), (64, 24)), "odd": ((200, 100), (100, 100)), "tiny": ((2, 3), (3, 1))}


def _silu_gated(both: torch.Tensor) -> torch.Tensor:
    first, second = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


ACTIVATION = Activation(CUSTOM, _silu_gated)
"""silu(h) u, not fused by any kernel."""


def applied(
    kernel: ExpertKernel, x: torch.Tensor, parts: Sequence[Part], activation: Activation = ACTIVATION
) -> torch.Tensor:
    """The result of ExpertKernel.forward in a tensor of its own."""
    out = x.new_empty(sum(part.rows for part in parts), kernel._geometry.matrices[1].rows)  # type: ignore[attr-defined]
    kernel.forward(Rows(x), parts, activation, out)
    return out


def an_expert(shape: str, layout: str):
    """Returns (geometry, record, level -> blocks) of an expert of one of SHAPES."""
    geometry, _, record = a_store(SHAPES[shape], LAYOUTS[layout])
    form = PlaneForm(geometry, LAYOUTS[layout], LAYOUTS[layout])
    blocks = {level: blocks_for(form, level) for level in (8, 4, 2)}
    for level, into in blocks.items():
        form.fill(MemoryReader(record, geometry), KEY, level, into, None)
    return geometry, record, blocks
