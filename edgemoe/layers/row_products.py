"""Products of rows on a device with several linear layers; of one row in as few launches as their types allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from edgemoe.layers.dense import DenseLinear


class RowProducts:
    """Multiplies rows with linear layers, one row by Triton's kernel, which takes several layers of a type per launch.

    Args:
        linears: layers with equal numbers of columns, on the device.
    """

    def __init__(self, linears: Sequence[DenseLinear]) -> None:
        from edgemoe.kernels.triton.dense import MOST_MATRICES, Matrix

        self._linears = list(linears)
        self._sizes = [linear.out_features for linear in linears]
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index, linear in enumerate(linears):
            kinds.setdefault((linear.weight.dtype, linear.bias is None), []).append(index)
        self._launches: list[tuple[list[int], list[Any]]] = []
        for indices in kinds.values():
            for start in range(0, len(indices), MOST_MATRICES):
                part = indices[start : start + MOST_MATRICES]
                self._launches.append((part, [Matrix(*linears[index].parts) for index in part]))

    @classmethod
    def try_from(cls, linears: Sequence[Any]) -> RowProducts | None:
        """Makes one of layers that the kernel multiplies with; None where one of them is of another type."""
        known = all(type(each) is DenseLinear for each in linears)
        return cls(linears) if known and len({each.in_features for each in linears}) == 1 else None

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Multiplies bf16 [R, K]; returns bf16 [R, N] of each layer, in their order."""
        from edgemoe.kernels.triton.dense import multiply

        if len(x) != 1:
            return [linear(x) for linear in self._linears]

        results = [x] * len(self._sizes)
        for indices, matrices in self._launches:
            sizes = [self._sizes[index] for index in indices]
            joined = x.new_empty(sum(sizes))
            multiply(x[0], matrices, joined)
            for index, part in zip(indices, joined.split(sizes), strict=True):
                results[index] = part[None]
        return results
