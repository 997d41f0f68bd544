"""Modules of transformers that Triton's kernels compute on a device; nothing where these do not run."""

from __future__ import annotations

from typing import Any

from torch import nn

from edgemoe.layers.device_delta_net import DeviceDeltaNet
from edgemoe.layers.device_norm import TritonNorm
from edgemoe.layers.device_recurrences import (
    DeviceChannelDelta,
    DeviceShortConvolution,
    DeviceStateSpace,
)

_RECURRENT = (DeviceDeltaNet, DeviceShortConvolution, DeviceStateSpace, DeviceChannelDelta)
"""Modules that stand in for modules with a state of fixed size."""


def recurrent_on_device(module: Any) -> nn.Module | None:
    """Makes the module that stands in for one with a state of fixed size; None: no kernel computes it."""
    made = (kind.try_from(module) for kind in _RECURRENT)
    return next((each for each in made if each is not None), None)


def norm_on_device(module: Any) -> nn.Module | None:
    """Makes the module that stands in for a norm; None: no kernel computes it."""
    return TritonNorm.try_from(module)
