"""Functions of single bf16 numbers as tables of their 65,536 values, for csrc/operations.c and csrc/delta_net.c."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache
def values_of(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The values of a function of torch: bf16 [65536], of the numbers whose bits are 0, 1, ..., 65535.

    So a kernel has torch's own bits, with any vectors of the processor.
    """
    with torch.inference_mode():
        return function(_numbers()).contiguous()


@cache
def wide_values_of(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The values of a function for the same numbers, computed in float32 and not rounded: float32 [65536]."""
    with torch.inference_mode():
        return function(_numbers().float()).contiguous()


def _numbers() -> torch.Tensor:
    """All bf16 numbers, in the order of their bits."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
