"""edgemoe's own CPU kernel: products with planes as they lie, by the C files of avx2/.

The shared library is built where a C compiler is found when edgemoe is installed, and used where the processor
has AVX2; elsewhere torch's operators do the same work (cpu.py). However many tokens there are, sums over their
numbers are exact integers and rounded in one order, so a token's result is the same bit for bit alone or among
others, and an answer does not depend on limits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from typing import Any

import torch

from storage.layout import LAYOUTS

_INTERFACE = 12
"""Goes up with every change of a function or structure of the C files: a library built before is left alone."""

LAYOUT = LAYOUTS["cpu-avx2-paired"]
"""What the kernel reads, whatever layout torch's own would want."""

DENSE_BF16_UP_TO = 128
"""Rows up to which a product with a bf16 weight here beats converting the weight and torch's; with int8 any do."""


@cache
def library() -> Any:
    """The shared library, or None where there is none or the processor cannot run it."""
    found = importlib.util.find_spec("edgemoe.kernels.native._kernels")
    if found is None or found.origin is None:
        return None
    loaded = ctypes.CDLL(found.origin)
    supported = getattr(loaded, f"edgemoe_supported_{_INTERFACE}", None)
    if supported is None or not supported():
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    loaded.edgemoe_open.restype = pointer
    loaded.edgemoe_open.argtypes = [ctypes.c_int]
    loaded.edgemoe_close.argtypes = [pointer]
    loaded.edgemoe_expert_product.argtypes = [pointer, pointer, pointer, size, pointer, size, pointer]
    loaded.edgemoe_experts.argtypes = [
        pointer,
        pointer,
        pointer,
        size,
        pointer,
        size,
        pointer,
        size,
        pointer,
        size,
    ]
    loaded.edgemoe_weighted_sum.argtypes = [pointer, pointer, size, size, size, ctypes.c_int, pointer]
    loaded.edgemoe_weighted_sum.restype = None
    loaded.edgemoe_rms_norm.argtypes = [pointer, pointer, ctypes.c_float, size, size, pointer]
    loaded.edgemoe_rms_norm.restype = None
    loaded.edgemoe_attention.argtypes = [pointer] * 7
    loaded.edgemoe_attention_rows.argtypes = [pointer, pointer, pointer, size, size, *[pointer] * 4]
    loaded.edgemoe_pass.argtypes = [pointer, pointer, size, *[pointer] * 5]
    loaded.edgemoe_pass.restype = size
    loaded.edgemoe_route.argtypes = [pointer] * 5
    loaded.edgemoe_route.restype = None
    loaded.edgemoe_choose.argtypes = [pointer, pointer, pointer, size, *[pointer] * 4]
    loaded.edgemoe_dense_product.argtypes = [pointer, pointer, pointer, size, size, pointer, size, pointer]
    loaded.edgemoe_vnni(True)
    return loaded


def use_vnni(use: bool) -> bool:
    """Whether products and a prompt's attention may use AVX-512, as they do from the start where there is VNNI.

    The results are the same, bit for bit. Not to be called while something is computed.

    Returns:
        whether they do now.
    """
    return bool(library().edgemoe_vnni(use))


def available() -> bool:
    """Whether this process can use the kernel."""
    return library() is not None


@cache
def thread_count() -> int:
    """How many threads products of this process have: as many as torch's operators when this is first asked."""
    return torch.get_num_threads()


@cache
def threads() -> int:
    """The address of the threads that all products of this process share."""
    opened: int | None = library().edgemoe_open(thread_count())
    if opened is None:
        raise OSError(f"{thread_count()} threads for products were wanted, and the system gave none")
    return opened


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=threads.cache_clear)


def dense_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x W^T, accumulated in float32.

    Args:
        x: bf16 [T, K], contiguous.
        weight: [N, K], contiguous: bf16, or int8 with `scale`.
        scale: bf16 [N], of an int8 weight's rows.

    Returns:
        bf16 [T, N].

    Raises:
        MemoryError: no memory for a copy of x.
    """
    rows, cols = weight.shape
    y = x.new_empty(x.shape[0], rows)
    scales = None if scale is None else scale.data_ptr()
    if library().edgemoe_dense_product(
        threads(), weight.data_ptr(), scales, rows, cols, x.data_ptr(), x.shape[0], y.data_ptr()
    ):
        raise MemoryError("no memory for a product's activations")
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, rounded where transformers rounds.

    Args:
        x: bf16 [..., K], contiguous.
        weight: bf16 [K].
        epsilon: above 0.

    Returns:
        bf16 [..., K].
    """
    y = torch.empty_like(x)
    cols = weight.numel()
    library().edgemoe_rms_norm(
        x.data_ptr(), weight.data_ptr(), epsilon, x.numel() // cols, cols, y.data_ptr()
    )
    return y


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over k of weights [T, k] * rows [T, k, H], in float32 and in this order.

    Args:
        rows: bf16 [T, k, H], contiguous.
        weights: float32, T k in all, contiguous.
        plus: bf16, T H in all, contiguous: the sums, rounded, are added to it in place.

    Returns:
        bf16 [T, H], or `plus`.
    """
    out = rows.new_empty(rows.shape[0], rows.shape[2]) if plus is None else plus
    library().edgemoe_weighted_sum(
        rows.data_ptr(), weights.data_ptr(), *rows.shape, plus is not None, out.data_ptr()
    )
    return out


def address(block: memoryview) -> int:
    """Where a block of an arena lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
