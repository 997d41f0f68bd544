"""The compiled CPU kernel: its shared library, its threads, and its dense operators.

The library is built from csrc/ where a C compiler is found when edgemoe is installed, and used where the processor has
AVX2, or under Linux NEON; elsewhere torch's operators do the same work (torch_int4.py). Integer sums are exact and
rounded in one order, so a token's result is bit-identical alone and among other tokens, and an answer does not depend
on limits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from functools import cache
from typing import Any

import torch

from edgemoe.kernels.native.dense_weight import dense_weight
from edgemoe.kernels.native.norms import form_of
from edgemoe.kernels.native.signatures import SIGNATURES
from edgemoe.kernels.native.structure_sizes import check_sizes
from edgemoe.kernels.native.structures import DenseHeads
from edgemoe.machine.cgroups import cores
from edgemoe.storage.record.layout import LAYOUTS

INTERFACE = 49
"""Version of the functions, structures and results of csrc/: a library of another version is not used."""

LAYOUT = LAYOUTS["cpu-avx2-paired"]
"""The layout that the kernel reads."""

_WORTH_THREADS = 1 << 15
"""Numbers of a norm that take one thread longer than waking the others."""


@cache
def library() -> Any:
    """The shared library; None where it was not built or the processor cannot run it."""
    found = importlib.util.find_spec("edgemoe.kernels.native._kernels")
    if found is None or found.origin is None:
        return None
    loaded = ctypes.CDLL(found.origin)
    supported = getattr(loaded, f"edgemoe_supported_{INTERFACE}", None)
    if supported is None or not supported():
        return None
    check_sizes(loaded)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    loaded.edgemoe_bf16(True)
    loaded.edgemoe_choose_widest()
    return loaded


def failure(result: int, memory: str) -> Exception:
    """The error of a call that returned one of the failures of csrc/pool.h, and computed nothing.

    Args:
        result: the negative number that a function of the library returned.
        memory: the purpose of the memory that the call needs.

    Returns:
        MemoryError where there was none, or ValueError where sizes in structures contradict the buffers'.
    """
    if result == -1:
        return MemoryError(f"no memory for {memory}")
    return ValueError(f"expected structures and buffers of equal sizes, got different ones ({memory})")


def use_bf16(use: bool) -> bool:
    """Lets products with bf16 weights use AVX512-BF16, or not; the default is to use it where it exists.

    It adds up in another order than AVX2, so it is no choice by time. Not to be called while a product runs.

    Returns:
        whether they use it now.
    """
    return bool(library().edgemoe_bf16(use))


@cache
def available() -> bool:
    """Whether this process can use the kernel."""
    return library() is not None


@cache
def dense_bf16_up_to() -> int:
    """Rows up to which this kernel's product with a bf16 weight is the fastest here.

    With AVX512-BF16 that is any number, except with AMX, which torch uses. Otherwise it is faster up to 128 rows than
    converting the weight for torch's product.
    """
    return sys.maxsize if library().edgemoe_bf16(-1) and not torch.cpu._is_amx_tile_supported() else 128


def choose_threads(count: int | None = None) -> None:
    """Sets the number of torch's threads, which all products of this process have from their first one on.

    Args:
        count: None: torch's number, at most cores(): a thread that the kernel has stopped for a cgroup's limit
            is waited for by all others. What OMP_NUM_THREADS says stays.
    """
    default = torch.get_num_threads()
    if count is None and "OMP_NUM_THREADS" not in os.environ:
        count = min(default, cores())
    if count not in (None, default):
        torch.set_num_threads(count)
    _chosen.add(torch.get_num_threads())


_chosen: set[int] = set()
"""The number of threads, once it was chosen."""


@cache
def thread_count() -> int:
    """Threads of all products of this process: torch's number of threads at the first call."""
    if not _chosen:
        choose_threads()
    return torch.get_num_threads()


@cache
def threads() -> int:
    """The address of the thread pool that all products of this process share."""
    opened: int | None = library().edgemoe_open(thread_count())
    if opened is None:
        raise OSError(
            f"expected {thread_count()} threads for products, got none: raise the limit of processes (ulimit -u)"
        )
    return opened


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=threads.cache_clear)


def _check_bf16(x: torch.Tensor) -> None:
    """Refuses other types of numbers: the kernel gets an address alone, and would read what lies there as bf16."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"expected bf16 numbers, got {x.dtype}")


def dense_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x W^T, accumulated in float32.

    Args:
        x: bf16 [T, K], contiguous.
        weight: contiguous: bf16 [N, K], int8 [N, K] with `scale`, or uint8, a matrix of storage.store.dense_groups.
        scale: bf16 [N], of an int8 weight's rows.

    Returns:
        bf16 [T, N].

    Raises:
        MemoryError: no memory for a copy of x.
        ValueError: K or N of the arguments differ, or x is not bf16.
    """
    _check_bf16(x)
    y = x.new_empty(x.shape[0], len(weight))
    if scale is not None and scale.numel() != len(weight):
        raise ValueError(f"expected {len(weight)} scales, got {scale.numel()}")
    structure = dense_weight(weight, scale)
    result = library().edgemoe_dense_product(
        threads(), ctypes.byref(structure), x.data_ptr(), *x.shape, y.data_ptr(), y.shape[1]
    )
    if result:
        raise failure(result, "a product's activations")
    return y


def head_products(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, *, by_column: bool = False
) -> torch.Tensor:
    """x W^T of each head, with the bits of dense_product by a bf16 weight.

    Args:
        x: bf16 [heads, T, K], contiguous.
        weight: bf16 or int8 [heads, N, K]; each head's matrix is contiguous.
        scale: bf16 [heads, N], or [heads, K] of columns: int8 weights times these are rounded to bf16.
        by_column: whether scales are of columns.

    Returns:
        bf16 [heads, T, N].

    Raises:
        MemoryError: no memory for a copy of x.
        ValueError: sizes of the arguments differ, or x is not bf16.
    """
    _check_bf16(x)
    heads, tokens, cols = x.shape
    (stride, *inner), rows = weight.stride(), weight.shape[1]
    if weight.shape[::2] != (heads, cols) or inner != [cols, 1] or not x.is_contiguous():
        raise ValueError(f"expected matrices [{heads}, N, {cols}], got {list(weight.shape)}")
    y = x.new_empty(heads, tokens, rows)
    sizes = {"heads": heads, "stride": stride, "rows": rows, "cols": cols, "x_cols": cols, "y_cols": rows}
    matrices = DenseHeads(
        weight=weight.data_ptr(), by_column=by_column, x_stride=tokens * cols, y_stride=tokens * rows, **sizes
    )
    if scale is not None:
        matrices.scale, matrices.scale_stride = scale.data_ptr(), scale.stride(0)
    addresses = ctypes.byref(matrices), x.data_ptr(), tokens, y.data_ptr()
    if result := library().edgemoe_dense_heads(threads(), *addresses):
        raise failure(result, "activations of heads")
    return y


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T in float32; the bits of a row do not depend on the number of rows.

    Args:
        x: float32 [T, K], contiguous.
        weight: float32 [N, K], contiguous.

    Returns:
        float32 [T, N].

    Raises:
        MemoryError: no memory for the call.
        ValueError: K of the arguments differs.
    """
    rows, cols = weight.shape
    if x.shape[1] != cols or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"expected contiguous rows of {cols}, got {list(x.shape)}")
    y = x.new_empty(x.shape[0], rows)
    result = library().edgemoe_wide_product(
        *(threads(), weight.data_ptr(), rows, cols), *(x.data_ptr(), x.shape[0], y.data_ptr())
    )
    if result:
        raise failure(result, "a product in float32")
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, rounded where transformers rounds.

    Args:
        x: bf16 [..., K], contiguous.
        weight: bf16 [K]; or float32 [K], and then the product alone is rounded; or float32 [2, K], where the mean of x
            is subtracted first: factors, and numbers that are added to the products.
        epsilon: a number above 0.

    Returns:
        bf16 [..., K].

    Raises:
        MemoryError: no memory for the call.
        ValueError: K of the arguments differs, or x is not bf16.
    """
    _check_bf16(x)
    y = torch.empty_like(x)
    cols = weight.shape[-1]
    if x.shape[-1] != cols:
        raise ValueError(f"expected rows of {cols}, got {x.shape[-1]}")
    of = x.data_ptr(), weight.data_ptr(), form_of(weight), epsilon, x.numel() // cols, cols, y.data_ptr()
    if x.numel() < _WORTH_THREADS:
        library().edgemoe_rms_norm(*of)
    elif result := library().edgemoe_norm_rows(threads(), *of):
        raise failure(result, "norms of rows")
    return y


def address(block: memoryview) -> int:
    """The address of an arena's block."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
