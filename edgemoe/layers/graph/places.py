"""Where the planes of every expert lie, in a table that a device's kernels read: in its memory, or in the host's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgemoe.kernels.torch_planes import block_tensor
from edgemoe.layers.graph.memory import ADDRESSES
from edgemoe.machine.device import Device
from edgemoe.prefetch.base import PinnedExperts
from edgemoe.storage.base import Blocks, ExpertKey, Plane

_PLANES = tuple(plane.label for plane in Plane)

_PLANE_OF = [0, 0, 1, 2, 2]
"""The plane of each address of an item."""


class ExpertPlaces:
    """A table of all experts. A plane that both tiers have is read in the device's memory.

    Args:
        device: the device that reads the table, and the slower tier's planes where they lie.
        kernel: TritonExpertKernel.
        pinned: experts of both tiers.
        layers, experts: number of layers of the model, and of experts in a layer.

    Attributes:
        table: int64 [layers, experts, PLACE], on the device.
        offsets: int64 [2, 6], on the device (place_experts).
        levels: int64 [2, layers, experts]: each expert's level in the device's memory, and in either.
        own: int64 [layers, experts]: each expert's level in the device's memory in the table that was sent last.
    """

    def __init__(self, device: Device, kernel: Any, pinned: PinnedExperts, layers: int, experts: int) -> None:
        from edgemoe.kernels.triton.place import PLACE

        self._device, self._pinned = device, pinned
        self._own: dict[ExpertKey, Blocks] = {}
        self._slower: dict[ExpertKey, tuple[int, Blocks]] = {}
        self._staged = [device.host_tensor((layers, experts, PLACE), torch.int64) for _ in range(2)]
        self.table = torch.zeros(layers, experts, PLACE, dtype=torch.int64, device=device.place)
        self._offsets = np.array(kernel.plane_offsets(), np.int64)
        self.offsets = torch.tensor(self._offsets).to(device.place)
        self._numbers: NDArray[np.int64] = np.zeros((layers, experts, PLACE), np.int64)
        self.levels = self._numbers[..., -2:].transpose(2, 0, 1)
        self.own = self.levels[0].copy()
        self._new: set[ExpertKey] = set()
        """Experts whose blocks in the device's memory have changed since the last `send`."""
        self._sent = False
        pinned.observe(self._own_changed)
        if device.reads_host_memory:
            pinned.observe_slower(self._slower_changed)

    def items(self, key: ExpertKey, level: int) -> NDArray[np.int64]:
        """The items of an expert at a level of the device's memory, as GraphMemory.set_experts takes them."""
        items = np.empty((2, ADDRESSES), np.int64)
        items[:, :-1] = self._numbers[key.layer, key.expert, _PLANE_OF] + self._offsets[:, :-1]
        items[:, -1] = np.minimum(level, self._offsets[:, -1])
        return items

    def send(self) -> None:
        """Launches the copy of the table to the device, if it has changed.

        An expert whose copy into the device's memory has not ended is read in the slower tier, if that has as much of
        it; for other copies the kernels launched later wait. Work that was launched before with the table goes on with
        the table of then. Only the last launch before this call may still run.
        """
        if self._sent:
            return
        self._staged.reverse()  # the device may still copy the other one
        numbers = self._staged[0].numpy()
        numbers[:] = self._numbers
        arriving = [key for key in self._new if key in self._own and self._pinned.arriving([key])]
        slower = {
            key for key in arriving if self._slower.get(key, (0,))[0] >= numbers[key.layer, key.expert, 3]
        }
        for key in slower:
            numbers[key.layer, key.expert] = self._place({}, 0, *self._slower[key])
        self._device.await_copies(self._pinned.arriving(key for key in arriving if key not in slower))
        self.own = numbers[..., 3].copy()
        self.table.copy_(self._staged[0], non_blocking=True)
        self._new, self._sent = slower, not slower

    def _own_changed(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        self._new.add(key)
        if level:
            self._own[key] = blocks
        else:
            self._own.pop(key, None)
        self._numbers[key.layer, key.expert, 3] = level
        self._update(key)

    def _slower_changed(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        if level:
            self._slower[key] = level, blocks
        else:
            self._slower.pop(key, None)
        self._update(key)

    def _update(self, key: ExpertKey) -> None:
        """Sets an expert's addresses and level, from both tiers."""
        level = int(self._numbers[key.layer, key.expert, 3])
        slower = self._slower.get(key, (0, {}))
        self._numbers[key.layer, key.expert] = self._place(self._own.get(key, {}), level, *slower)
        self._sent = False

    def _place(self, own: Blocks, level: int, slower: int, blocks: Blocks) -> list[int]:
        """The numbers of an expert with a level in each tier, and its blocks there."""
        planes = (own.get(name, blocks.get(name)) for name in _PLANES)
        addresses = [0 if block is None else block_tensor(block).data_ptr() for block in planes]
        return [*addresses, level, max(level, slower)]
