"""torch's operators in transformers' modules, made so that the bits of a row do not depend on the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from edgemoe.kernels.native import library as native

_VECTORS = 64
"""Numbers of float32 that the vectors of every processor divide, as many as torch takes at once."""

_BY_NUMBER = frozenset(
    (torch.sigmoid, torch.Tensor.sigmoid, F.silu, F.softplus, torch.exp, torch.Tensor.exp, torch.log)
)
"""Functions of single numbers that torch computes in vectors; numbers that fill no vector take another way."""


class RowsAlike(TorchFunctionMode):
    """Within it F.linear and functions of numbers give a row the same bits among any number of rows, in RAM.

    In bf16 the functions do so without it; products take the compiled kernel.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _product(*args, **kwargs or {})
        if func in _BY_NUMBER and args[0].dtype == torch.float32:
            return _in_whole_vectors(func, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias of [T, K] and [N, K], both bf16 or both float32."""
    if x.dtype == torch.bfloat16:
        y = native.dense_product(x.contiguous(), weight.contiguous(), None)
    else:
        y = native.wide_product(x.contiguous(), weight.contiguous())
    return y if bias is None else y + bias


def _in_whole_vectors(
    func: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **how: Any
) -> torch.Tensor:
    """Applies a function of single numbers to as many numbers as fill torch's vectors."""
    flat = x.reshape(-1)
    return func(F.pad(flat, (0, -len(flat) % _VECTORS)), *args, **how)[: len(flat)].view(x.shape)
