"""Modules of transformers that the compiled kernel computes in RAM, besides attention, routers and plain norms."""

from __future__ import annotations

from typing import Any

from torch import nn

from edgemoe.layers.delta_net import GatedDeltaNet
from edgemoe.layers.gated_mlp import GatedMLP, PlainMLP
from edgemoe.layers.gated_norm import GatedNorm
from edgemoe.layers.recurrences import ChannelDelta
from edgemoe.layers.short_convolution import ShortConvolution
from edgemoe.layers.state_space import SelectiveStateSpace

_RECURRENT = (GatedDeltaNet, ShortConvolution, SelectiveStateSpace, ChannelDelta)
"""Modules that stand in for modules with a state of fixed size."""

_DENSE = (GatedMLP, PlainMLP, GatedNorm)
"""Modules that stand in for blocks and norms that are made of linear layers."""


def recurrent_in_ram(module: Any) -> nn.Module | None:
    """Makes the module that stands in for one with a state of fixed size; None: the kernel does not compute it."""
    made = (kind.try_from(module) for kind in _RECURRENT)
    return next((each for each in made if each is not None), None)


def dense_in_ram(module: Any) -> nn.Module | None:
    """Makes the module that stands in for one of linear layers; None: the kernel does not compute it."""
    made = (kind.try_from(module) for kind in _DENSE)
    return next((each for each in made if each is not None), None)
