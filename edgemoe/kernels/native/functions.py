"""Functions of single bf16 numbers as tables of their 65,536 values, for csrc/operations.c."""

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
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        return function(bits.view(torch.bfloat16)).contiguous()
