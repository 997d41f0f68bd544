"""The memory in which one call of csrc/decode_layers.c computes the experts of a layer."""

from __future__ import annotations

import ctypes

import torch

from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.kernels.native.structures import Expert, ExpertWorkspace, RemappingRule
from edgemoe.policy.remapping import Remapping


class ExpertBuffers:
    """The memory in which one call computes the experts of a layer, and its structure.

    Args:
        kernel: Kernel of the experts.
        normed: bf16 [rows, H], input of a layer's block; gives the most rows of a call.
        slots: Experts of a token.
        experts: Most experts of a layer.

    Attributes:
        structure: Valid as long as this object.
    """

    def __init__(self, kernel: NativeExpertKernel, normed: torch.Tensor, slots: int, experts: int) -> None:
        (rows, hidden), pairs = normed.shape, len(normed) * slots
        self._rows, self._kept = normed.new_empty(pairs, hidden), torch.zeros(pairs)
        self._gathered = normed.new_empty(pairs if rows > 1 else 1, hidden)
        self._row_of, self._after = torch.zeros(2, pairs, dtype=torch.int64)
        self._first, self._together = torch.zeros(experts, dtype=torch.int64), (Expert * pairs)()
        self._popularity = torch.zeros(experts, dtype=torch.int64)
        self._remapping = RemappingRule(popularity=self._popularity.data_ptr())
        up, down, inner = kernel.matrices()
        self.structure = ExpertWorkspace(
            up=up,
            down=down,
            inner=inner,
            most_rows=rows,
            slots=slots,
            experts=experts,
            together=ctypes.addressof(self._together),
            gathered=self._gathered.data_ptr(),
            rows=self._rows.data_ptr(),
            gates=self._kept.data_ptr(),
            row_of=self._row_of.data_ptr(),
            after=self._after.data_ptr(),
            first=self._first.data_ptr(),
        )

    def remap(self, remapping: Remapping | None) -> None:
        """Sets how the tokens of the calls that follow agree on experts; None: each has its own choice."""
        if remapping:
            self._remapping.alpha, self._remapping.bins = remapping.alpha, remapping.bins
        self.structure.remapping = ctypes.addressof(self._remapping) if remapping else None
