"""Notices a host that waits for a device in other ways than edgemoe.machine.device allows, where both are the CPU.

A tensor computed from a device's tensors is a device's as well. Reading one in Python, or choosing rows of one by a
tensor that lies in RAM, makes the host wait for all launched work; only Device.to_host may.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_double import DoubleDevice
from torch.overrides import TorchFunctionMode

_READS = (
    "tolist",
    "item",
    "cpu",
    "numpy",
    "nonzero",
    "equal",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


class _Watch(TorchFunctionMode):
    def __init__(self, device: DoubleDevice) -> None:
        super().__init__()
        self.on_device: dict[int, torch.Tensor] = {}
        self._broken = device.broken

    def mark(self, value: Any) -> None:
        for tensor in _tensors(value):
            self.on_device[id(tensor)] = tensor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, far = function.__name__, [self._is_far(t) for t in _tensors((args, kwargs))]
        if name in _READS and far and far[0]:
            self._broken.append(f"{name} of a device's tensor")
        if name in ("__getitem__", "__setitem__") and self._is_far(args[0]):
            for index in _tensors(args[1]):
                if not self._is_far(index) or index.dtype == torch.bool:
                    self._broken.append("rows chosen by indices in other memory, or by a mask")
        result = function(*args, **(kwargs or {}))
        # In edgemoe a torch.device is given only where a tensor is sent to, or made on, the device.
        placed = any(isinstance(place, torch.device) for place in (*args[1:2], (kwargs or {}).get("device")))
        if any(far) or placed:
            self.mark(result)
        return result

    def _is_far(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.on_device


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


@contextmanager
def watched(device: DoubleDevice, patch: pytest.MonkeyPatch, there: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within the context the double notes in `broken` every host read of a tensor that follows from `there`."""
    watch, to_host = _Watch(device), device.to_host

    def allowed(tensors):
        with torch._C.DisableTorchFunction():
            return to_host(tensors)

    patch.setattr(device, "to_host", allowed)
    watch.mark(list(there))
    with watch:
        yield
