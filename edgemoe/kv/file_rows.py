"""Keys and values of some tokens as files have them: layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch


class FileRows:
    """Stored bytes of some tokens. In RAM they are the sequence's own memory; on a device they are copies in RAM.

    Args:
        rows: rows of each head of each layer, [tokens, W].
        on_device: whether a device has the rows.

    Attributes:
        views: the bytes of each head, writable. On a device they are undefined before `load`.

    >>> row = torch.arange(4, dtype=torch.int16).view(2, 2)
    >>> bytes(FileRows([row], on_device=False).load()[0]) == row.numpy().tobytes()
    True
    """

    def __init__(self, rows: Sequence[torch.Tensor], *, on_device: bool) -> None:
        self._rows, self._on_device = [each.view(torch.uint8) for each in rows], on_device
        self._bytes = [torch.empty_like(row, device="cpu") for row in self._rows] if on_device else self._rows
        self.views = [memoryview(cast(Any, each.numpy())).cast("B") for each in self._bytes]

    def load(self) -> list[memoryview]:
        """Copies the rows from a device, after all kernels that were launched before, and returns the views.

        One head at a time: a copy of all heads would take memory on the device.
        """
        if self._on_device:
            for copy, row in zip(self._bytes, self._rows, strict=True):
                copy.copy_(row)
        return self.views

    def store(self) -> None:
        """Copies bytes that were written into the views to a device, before all kernels that are launched later."""
        if self._on_device:
            for copy, row in zip(self._bytes, self._rows, strict=True):
                row.copy_(copy)
